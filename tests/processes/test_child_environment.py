"""What a child process is given: nothing that could be somebody's secret, and its own GPU."""

import json
import os
import sys
from pathlib import Path

import pytest

from headrace.config.machine import SECRET_VARIABLE
from headrace.config.server_args import ServerArgs
from headrace.messages.channel import Ports
from headrace.processes.child import ChildProcess, environment
from headrace.processes.early import ENGINE_DEFAULTS

SECRETS = (
    "HEADRACE_API_KEY", "HEADRACE_ADMIN_API_KEY", "HF_TOKEN", "HF_HUB_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "DATABASE_URL", "PGPASSWORD", "https_proxy",
    "HTTP_PROXY", "KUBECONFIG", "SSH_AUTH_SOCK", "NVIDIA_API_KEY", "NCCL_SECRET", "PYTHON_KEYRING_PASSWORD", "OTEL_EXPORTER_OTLP_HEADERS",
    "PIP_INDEX_URL", "PYTHON_TOKEN", "headrace_api_key",
)  # fmt: skip
NEEDED = (
    "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "OMP_NUM_THREADS", "KMP_AFFINITY", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES",
    "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET",
    "TRITON_CACHE_DIR", "HEADRACE_CACHE_DIR", "HEADRACE_CPU_ISA", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM",
)  # fmt: skip


def test_a_child_gets_what_libraries_read_and_no_secret():
    given = environment({name: name for name in SECRETS + NEEDED}, "scheduler", ServerArgs(), 0)
    assert given == {name: name for name in NEEDED}


def test_what_is_named_by_the_operator_is_passed_on():
    own = {"BIAS_TABLE": "x", "BIAS_KEY": "y", "OTHER": "z"}
    assert environment(own, "detokenizer", ServerArgs(child_env="BIAS_TABLE, BIAS_KEY, ABSENT"), 0) == {
        "BIAS_TABLE": "x",
        "BIAS_KEY": "y",
    }


@pytest.mark.parametrize(
    ("kind", "options", "is_passed"),
    [
        ("scheduler", {}, False),
        ("scheduler", {"disaggregation_mode": "decode"}, True),
        ("detokenizer", {"disaggregation_mode": "decode"}, False),
    ],
)
def test_the_secret_of_servers_is_passed_on_to_who_needs_it(kind, options, is_passed):
    given = environment({SECRET_VARIABLE: "x"}, kind, ServerArgs(**options), 0)
    assert (SECRET_VARIABLE in given) == is_passed


@pytest.mark.parametrize(
    "own, replica, seen",
    [({}, 1, "1"), ({"CUDA_VISIBLE_DEVICES": "4, 6"}, 1, "6"), ({"CUDA_VISIBLE_DEVICES": "4"}, 1, "")],
)
def test_each_replica_sees_one_gpu(own: dict[str, str], replica: int, seen: str):
    given = environment({**own, "HOME": "/h"}, "scheduler", ServerArgs(dp_size=2), replica)
    assert given == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": seen} | ENGINE_DEFAULTS


@pytest.mark.parametrize(
    "own, replica, seen",
    [
        ({}, 1, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "4, 6,5,7"}, 1, "5,7"),
        ({"CUDA_VISIBLE_DEVICES": "4,6,5"}, 1, "5"),
        ({"CUDA_VISIBLE_DEVICES": "4"}, 1, ""),
    ],
)
def test_each_replica_sees_a_gpu_for_each_of_its_ranks(own: dict[str, str], replica: int, seen: str):
    given = environment(own, "scheduler", ServerArgs(dp_size=2, tp_size=2), replica)
    assert given == {"CUDA_VISIBLE_DEVICES": seen} | ENGINE_DEFAULTS
    # A rank has the GPU of its number of those that its scheduler sees.
    assert environment(given, "follower", ServerArgs(dp_size=2, tp_size=2), replica) == given


def test_one_replica_and_the_detokenizer_see_what_we_see():
    own = {"CUDA_VISIBLE_DEVICES": "4,6", "OMP_NUM_THREADS": "2"}
    assert environment(own, "scheduler", ServerArgs(), 0) == own | ENGINE_DEFAULTS
    assert environment(own, "detokenizer", ServerArgs(dp_size=2), 0) == own
    assert environment(own, "scheduler", ServerArgs(dp_size=2, device="cpu"), 1) == own | ENGINE_DEFAULTS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_neither_the_environment_nor_the_options_of_a_started_child_hold_a_key(monkeypatch, tmp_path: Path):
    for name in ("HEADRACE_API_KEY", "OPENAI_API_KEY", "SOMETHING"):
        monkeypatch.setenv(name, "hush-hush")
    # Stands in for a child: writes down all that it was given.
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([dict(os.environ), sys.stdin.readline()], open({str(tmp_path / 'given')!r}, 'w'))\n"
    )
    stand_in.chmod(0o700)
    monkeypatch.setattr(ChildProcess, "program", (str(stand_in), "-m", "headrace.processes.child_main"))
    args = ServerArgs(api_key="hush-hush", admin_api_key="hush-hush", otlp_traces_endpoint="http://u:hush-hush@h/")
    started = ChildProcess("detokenizer", args, Ports.in_directory(tmp_path))
    started.stop(60.0)
    os.close(started._reports_fd)

    given_env, bootstrap = json.loads((tmp_path / "given").read_text())
    assert given_env["PATH"] == os.environ["PATH"]
    assert "hush-hush" not in json.dumps(given_env) + bootstrap
    assert json.loads(bootstrap)["args"]["port"] == args.port
