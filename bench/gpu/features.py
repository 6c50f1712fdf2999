"""What else runs on the device: features through small engines, and the tests of the repository that a GPU can run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.gpu.bench import Bench, Rows
from bench.gpu.equality import GREEDY, answers, small_engine
from bench.gpu.tokens import save_small

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
            try:
                rows.add(f"feature: {what}", feature(bench, name))
            except Exception as error:  # the boundary of a feature: the others go on
                rows.add(f"feature: {what}", f"failed: {type(error).__name__}: {error}"[:300], ok=False)
    root = Path(__file__).resolve().parents[2]
    for what, tests in _TESTS:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
            "-W",
            "ignore",
            *tests,
        ]
        command += ["--collect-only"] if bench.options.tiny else ["-n", "8"]
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
    found = []
    for options in ({"device": bench.options.device}, {"device": "cpu", "disable_native_kernels": True}):
        with small_engine(folder, options) as engine:
            out = engine.generate(
                input_ids=list(range(3, 40)), sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
            )
            meta = out["meta_info"]
            found.append([entry[0] for entry in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])])
    difference = float(np.abs(np.array(found[0]) - np.array(found[1])).max())
    assert difference < 1e-3, difference
    return f"at most {difference:.1e} from the CPU's"


def _embeddings(bench: Bench, folder: str) -> str:
    found = []
    for options in ({"device": bench.options.device}, {"device": "cpu", "disable_native_kernels": True}):
        with small_engine(folder, {**options, "is_embedding": True}) as engine:
            found.append(np.array(engine.encode(input_ids=list(range(3, 60)))["embedding"]))
    difference = float(np.abs(found[0] - found[1]).max())
    assert difference < 1e-3, difference
    return f"at most {difference:.1e} from the CPU's"


def _fp8_cache(bench: Bench, folder: str) -> str:
    if bench.options.device == "cpu":
        return "needs a GPU"
    on = {"device": "cuda", "dtype": "bfloat16"}
    want, _ = answers(folder, on)
    got, _ = answers(folder, {**on, "kv_cache_dtype": "fp8_e4m3"})
    same = sum(a == b for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=True))
    return f"{same} of {sum(map(len, want))} tokens as with bfloat16"


def _compiled(bench: Bench, folder: str) -> str:
    if bench.options.device == "cpu":
        return "needs a GPU"
    want, _ = answers(folder, {"device": "cuda"})
    got, seconds = answers(folder, {"device": "cuda", "enable_torch_compile": True})
    differ = sum(a != b for a, b in zip(want, got, strict=True))
    return f"{differ} of {len(want)} requests differ, {seconds:.1f} s with compiling"
