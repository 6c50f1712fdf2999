"""The servers that are compared, and how each is started for a class of precision: `python -m bench.compare.peers NAME` starts one alone.

Owns their commands. llama.cpp's server is as bench/compare/setup built it, OpenVINO GenAI's pipeline is behind the small server in
openvino_completions.py, and Headrace's is from the checkout's .venv, with no option but the class of its weights.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from bench.compare.greedy import ContinueGreedily, by_generate, by_llama_cpp
from bench.program import parser_of
from bench.servers import ServerProcess, leave_on_sigterm
from headrace.errors import ConfigError

Precision = Literal["16", "8", "4"]
PRECISIONS: tuple[Precision, ...] = ("16", "8", "4")
HERE = Path(__file__).resolve().parent
PEERS_VENV = HERE / ".venv"
MODELS = PEERS_VENV / "models"

QUANTIZATIONS: dict[Precision, tuple[str, ...]] = {
    "16": ("none", "int16"),
    "8": ("int8", "int8-fast"),
    "4": ("int4",),
}
"""Our weights of each class, the ones to begin with first. none: the file dequantised, and what is fastest here in 16 bits."""
_LLAMA_CPP = {"16": "f16", "8": "q8_0", "4": "q4_0"}
_LLAMA_CPP_ACTIVATIONS = {"16": "f16", "8": "q8_0", "4": "q8_0"}  # vec_dot_type of these weights in ggml-cpu.c
_SLOTS = 32
_SLOT_TOKENS = 8192  # the model's context, and enough for the longest request of the presets, 8,001; 6 GB in all
_OPENVINO = {"16": "fp16", "8": "int8", "4": "int4"}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started and asked. name: server and format, as figures call it. needs: files that must be there first.

    ask_precision: what it computes in, by the names of Headrace's /server_info; nothing if it has that route.
    """

    name: str
    arguments: list[str]
    continue_greedily: ContinueGreedily
    needs: tuple[Path, ...] = ()
    ask_precision: Callable[[], dict[str, str]] = dict


CommandFor = Callable[[Precision, int], ServerCommand]


class ComparedServer(ServerProcess):
    """A server by its command."""

    def __init__(self, command: ServerCommand, port: int, log_file: Path) -> None:
        """Raises ConfigError when something that the server needs is missing."""
        for path in command.needs:
            if not path.exists():
                raise ConfigError(f"{command.name} needs {path}; run bench/compare/setup first")
        self.command = command
        super().__init__(command.name, command.arguments, port, log_file)


def quantized_command(quantization: str, port: int) -> ServerCommand:
    """Headrace with the smollm2 model and one of QUANTIZATIONS."""
    headrace = HERE.parents[1] / ".venv" / "bin" / "headrace"
    arguments = [str(headrace), "serve", "smollm2", "--port", str(port), "--quantization", quantization]
    return ServerCommand(f"Headrace {quantization}", arguments, by_generate, needs=(headrace,))


def headrace_command(precision: Precision, port: int) -> ServerCommand:
    """Headrace with the smollm2 model."""
    return quantized_command(QUANTIZATIONS[precision][0], port)


def llama_cpp_command(precision: Precision, port: int) -> ServerCommand:
    """llama-server. Slots with a KV cache of their own were faster here than a unified one."""
    binary = PEERS_VENV / "llama.cpp" / "build" / "bin" / "llama-server"
    name = _LLAMA_CPP[precision]
    model, threads = MODELS / f"{name}.gguf", str(len(os.sched_getaffinity(0)))
    return ServerCommand(
        f"llama.cpp {name}",
        [
            str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads,
            "--alias", name, "-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS), "--no-kv-unified", "-fa", "on", "-b", "2048",
            "-ub", "512", "--no-ui",
        ],
        by_llama_cpp,
        needs=(binary, model),
        ask_precision=lambda: {"activations": _LLAMA_CPP_ACTIVATIONS[precision], "kv_cache_dtype": "f16"},
    )  # fmt: skip


def openvino_command(precision: Precision, port: int) -> ServerCommand:
    """The continuous batching pipeline of OpenVINO GenAI."""
    python = PEERS_VENV / "bin" / "python"
    model = MODELS / f"openvino-{_OPENVINO[precision]}"
    return ServerCommand(
        f"OpenVINO {_OPENVINO[precision]}",
        [str(python), str(HERE / "openvino_completions.py"), str(model), "--port", str(port)],
        by_generate,
        needs=(python, model / "openvino_model.xml"),
        ask_precision=partial(_ask_openvino, python, model),
    )


def _ask_openvino(python: Path, model: Path) -> dict[str, str]:
    command = [str(python), str(HERE / "openvino_completions.py"), str(model), "--precision"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"OpenVINO does not say what it computes in:\n{done.stderr[-2000:]}")
    said: dict[str, str] = json.loads(done.stdout)
    return said


PEERS: dict[str, CommandFor] = {"llama.cpp": llama_cpp_command, "openvino": openvino_command}


def main() -> None:
    """Start the server, say when it is ready, stay until interrupted."""
    commands = {"headrace": headrace_command, **PEERS}
    parser = parser_of(__doc__, output=False)
    parser.add_argument("name", choices=commands)
    parser.add_argument("--class", dest="precision", choices=PRECISIONS, default="16", help="bits of a weight")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    command = commands[options.name](options.precision, options.port)
    log_file = Path(tempfile.gettempdir(), f"{options.name}-{options.port}.log")
    leave_on_sigterm()
    with ComparedServer(command, options.port, log_file) as server:
        ready_s = server.wait_until_ready()
        # Blocked, not handled: also where the shell that started this ignores interrupts.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        print(f"{server.name} at {server.url}, ready after {ready_s:.1f} s; log in {server.log_file}", flush=True)
        print(f"ends on {signal.Signals(signal.sigwait({signal.SIGINT, signal.SIGTERM})).name}", flush=True)


if __name__ == "__main__":
    main()
