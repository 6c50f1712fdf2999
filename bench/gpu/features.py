"""What else runs on the device: features through small engines, and the tests of the repository that a GPU can run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.gpu.bench import Bench, Rows
from bench.gpu.equality import GREEDY, ON_CPU, answers, differing, small_engine
from bench.gpu.tokens import save_small
from headrace.api.engine import Engine

_KERNELS = ("attention", "rows", "draw", "token_mask", "experts", "linear", "routing")
_TESTS = (
    ("a runner on the device: overlap, graphs, grammars, drafts", ["tests/execution/test_execution_cuda.py"]),
    ("a whole model on Triton", ["tests/execution/test_execution_triton.py"]),
    ("the sampler's draws", ["tests/sampling/test_sampling_draw.py", "tests/sampling/test_sampling_typical.py"]),
    ("kernels, compiled", [f"tests/kernels/test_triton_{name}.py" for name in _KERNELS]),
)


def try_features(bench: Bench, rows: Rows) -> None:
    """Each feature and each group of tests is a row."""
    with TemporaryDirectory() as name:
        save_small(Path(name))
        features: dict[str, Callable[[Bench, str], str]] = {
            "weights replaced by themselves": _replaced,
            "logprobs": _logprobs,
            "embeddings": _embeddings,
            "fp8 KV cache": _fp8_cache,
            "compiled pieces": _compiled,
        }
        for what, feature in features.items():
            with rows.failure_of(f"feature: {what}"):
                rows.add(f"feature: {what}", feature(bench, name))
    root = Path(__file__).resolve().parents[2]
    for what, tests in _TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
        command += ["-W", "ignore", *tests, *(["--collect-only"] if bench.tiny else ["-n", "8"])]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines()
        (bench.out / f"profile-tests-{what.replace(' ', '-')}.txt").write_text("\n".join(lines[-400:]))
        rows.add(f"tests: {what}", lines[-1] if lines else "nothing said", ok=done.returncode == 0)


def _replaced(bench: Bench, folder: str) -> str:
    with small_engine(folder, {"device": bench.options.device}) as engine:
        before = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["output_ids"]
        engine.update_weights_from_disk(folder)
        assert engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["output_ids"] == before
    return "the same tokens after the update, by new graphs"


def _logprobs(bench: Bench, folder: str) -> str:
    def logprobs(engine: Engine) -> list[float]:
        prompt = list(range(3, 40))
        out = engine.generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0)
        meta = out["meta_info"]
        return [entry[0] for entry in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])]

    return _beside_cpu(bench, folder, logprobs)


def _embeddings(bench: Bench, folder: str) -> str:
    def embedding(engine: Engine) -> list[float]:
        found: list[float] = engine.encode(input_ids=list(range(3, 60)))["embedding"]
        return found

    return _beside_cpu(bench, folder, embedding, is_embedding=True)


def _beside_cpu(bench: Bench, folder: str, measure: Callable[[Engine], list[float]], **options: Any) -> str:
    """How far numbers of an engine on the device are from those of one on the CPU, which must be nearly nothing."""
    found = []
    for where in ({"device": bench.options.device}, ON_CPU):
        with small_engine(folder, {**where, **options}) as engine:
            found.append(np.array(measure(engine)))
    difference = float(np.abs(found[0] - found[1]).max())
    assert difference < 1e-3, difference
    return f"at most {difference:.1e} from the CPU's"


def _fp8_cache(bench: Bench, folder: str) -> str:
    if not bench.on_gpu:
        return "needs a GPU"
    on = {"device": "cuda", "dtype": "bfloat16"}
    want, _ = answers(folder, on)
    got, _ = answers(folder, {**on, "kv_cache_dtype": "fp8_e4m3"})
    same = sum(a == b for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=True))
    return f"{same} of {sum(map(len, want))} tokens as with bfloat16"


def _compiled(bench: Bench, folder: str) -> str:
    if not bench.on_gpu:
        return "needs a GPU"
    want, _ = answers(folder, {"device": "cuda"})
    got, seconds = answers(folder, {"device": "cuda", "enable_torch_compile": True})
    return f"{differing(want, got)} of {len(want)} requests differ, {seconds:.1f} s with compiling"
