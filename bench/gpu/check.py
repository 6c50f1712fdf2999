"""`python -m bench.gpu.check`: tests and times everything on a GPU, in one command.

Owns the order of the pieces, the time they may take, the results as they come and the document with their table. Does not measure.
Every piece runs in a process of its own: one that fails, hangs or runs out of memory says so in the results, and the next one
begins with an empty device. What a piece has found when its time is up is kept. Needs torch and the packages that the runtime imports; neither
a network nor the native CPU kernels. Exit code 1 when a piece failed or an expectation was missed.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.options import MODELS, Options
from bench.program import names_of, parser_of, report_of
from headrace.benchmark.results import write_json


class Piece(NamedTuple):
    """What it is, the seconds that it may take, and the function that measures it, in a module here."""

    what: str
    limit_s: float
    module: str
    function: str


PIECES = {
    "device": Piece("which device and versions", 40, "rates", "device_facts"),
    "kernels": Piece(
        "every op and backend against the CPU, graphs against eager steps", 120, "kernels", "check_kernels"
    ),
    "rates": Piece("copy bandwidth of the memory and rate of bfloat16 products", 40, "rates", "measure_rates"),
    "shapes": Piece("the kernels that decode, in several shapes of tiles", 60, "shapes", "measure_shapes"),
    "decode": Piece("decode steps at 1k tokens of context, and their kernels", 120, "steps", "measure_decode"),
    "prefill": Piece("2k and 8k tokens of prompt, and their kernels", 60, "steps", "measure_prefill"),
    "serving": Piece("64 requests through the scheduler, and the gap between steps", 60, "serving", "measure_serving"),
    "server": Piece("the whole server over HTTP: start, presets B8, B32 and C", 120, "server", "measure_server"),
    "tokens": Piece("tokens of a small model, computed in ten ways", 120, "equality", "compare_tokens"),
    "quantized": Piece("decode and prefill in fp8 and int4", 120, "steps", "measure_quantized"),
    "deterministic": Piece("steps with bits that no batch changes", 60, "steps", "measure_deterministic"),
    "speculation": Piece("drafts from n-grams: tokens and speed", 60, "equality", "measure_speculation"),
    "experts": Piece("decode steps of a mixture of experts", 80, "steps", "measure_experts"),
    "offline": Piece("256 requests of 100 to 1,024 tokens in and out", 120, "serving", "measure_offline"),
    "transformers": Piece("the same in transformers", 150, "against_transformers", "measure_transformers"),
    "features": Piece("logprobs, embeddings, updates, fp8 KV; tests of the device", 120, "features", "try_features"),
}
"""In order of worth. A module that cannot be imported fails its own pieces only."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = parser_of(__doc__)
    pieces = ",".join(PIECES)
    parser.add_argument("--only", type=names_of(tuple(PIECES)), default=pieces, help="pieces: " + ", ".join(PIECES))
    parser.add_argument("--models", type=names_of(MODELS), help="comma-separated: " + ", ".join(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small layers and short prompts: a trial of this command")
    parser.add_argument("--rehearse", action="store_true", help="the same as --device cpu --tiny, for every piece")
    parser.add_argument("--limit-s", type=float, default=540.0, help="all pieces end within this many seconds")
    parser.add_argument(
        "--out", type=Path, help="folder for results.jsonl (a line a result as they come), profiles.tar"
    )
    parser.add_argument("--rates", type=Path, help="take the piece `rates` from an earlier document or results.jsonl")
    parser.add_argument("--in-process", action="store_true", help="run the pieces in this process, without time limits")
    args = parser.parse_args(arguments)
    if args.rehearse:
        args.device, args.tiny = "cpu", True
    options = Options(args.device, args.tiny, args.models or (MODELS[:1] if args.tiny else MODELS))
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        earlier = {} if args.rates is None else {"rates": _rates_of(args.rates)}
        results = _run_all(args.only, options, earlier, args.limit_s, args.in_process, out)
        content = report_of("gpu", {"device": args.device, "tiny": args.tiny, "results": results})
        print(table(content), flush=True)
        if args.output is not None:
            write_json(args.output, content)
            print(f"results: {args.output}")
    return 1 if any(piece["status"] != "ok" or not all(row["ok"] for row in piece["rows"]) for piece in results) else 0


def _rates_of(path: Path) -> dict[str, Any]:
    """The piece `rates` of a document, or of a results.jsonl."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        rows = [row for row in map(json.loads, text.splitlines()) if row["piece"] == "rates"]
        return {"piece": "rates", "status": "ok", "rows": rows}
    return next(piece for piece in json.loads(text)["results"] if piece["piece"] == "rates")


def _run_all(
    names: Sequence[str], options: Options, earlier: dict[str, Any], limit_s: float, in_process: bool, out: Path
) -> list[dict[str, Any]]:
    begin = time.monotonic()
    results = []
    for name in names:
        what, own_limit_s, *_ = PIECES[name]
        left = limit_s - (time.monotonic() - begin)
        print(f"== [{time.monotonic() - begin:3.0f} s] {name}: {what}", file=sys.stderr, flush=True)
        started = time.monotonic()
        if left <= 0:
            status = f"not run: the {limit_s:.0f} s are over; run it with --only {name}"
        elif in_process:
            status = _run(name, options, earlier, out)
        else:
            status = _in_child(name, options, earlier, min(left, own_limit_s), out)
        seconds = time.monotonic() - started
        ended = {"piece": name, "status": status, "seconds": seconds}
        _write_line(out, ended)
        earlier[name] = {**ended, "rows": _rows_of(name, out)}
        results.append(earlier[name])
        print(f"   {status}, {seconds:.1f} s", file=sys.stderr, flush=True)
        _pack_profiles(out)
    return results


def _write_line(out: Path, content: dict[str, Any]) -> None:
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(content) + "\n")


def _rows_of(name: str, out: Path) -> list[dict[str, Any]]:
    """The rows that a piece has written, without its name."""
    lines = [line for line in _lines(out) if line["piece"] == name and "what" in line]
    return [{key: value for key, value in line.items() if key != "piece"} for line in lines]


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _pack_profiles(out: Path) -> None:
    if profiles := sorted(out.glob("profile-*")):
        with tarfile.open(out / "profiles.tar", "w") as tar:
            for path in profiles:
                tar.add(path, path.name)


def _run(name: str, options: Options, earlier: dict[str, Any], out: Path) -> str:
    """Run one piece in this process; its rows go to results.jsonl. An exception that it raises becomes its status, and goes no further."""
    import traceback

    import torch

    from bench.gpu.bench import SMALL, Bench, Rows, Sizes

    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU here")
        piece = PIECES[name]
        measure = getattr(import_module(f"bench.gpu.{piece.module}"), piece.function)
        rows = Rows(lambda row: _write_line(out, {"piece": name, **row}))
        measure(Bench(options, SMALL if options.tiny else Sizes(), earlier, out), rows)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        status = f"failed: {type(error).__name__}: {error}"[:500]
        _write_line(out, {"piece": name, "failure": status})
        return status
    return "ok"


def _in_child(name: str, options: Options, earlier: dict[str, Any], limit_s: float, out: Path) -> str:
    """Run one piece in a process of its own, which is killed with all that it started when its time is up."""
    # What every piece imports is imported once, here, where no device is touched; then processes begin as copies of this one.
    import headrace.execution.build  # noqa: F401

    def piece() -> None:
        os.setsid()
        sys.exit(0 if _run(name, options, earlier, out) == "ok" else 1)

    child = multiprocessing.get_context("fork").Process(target=piece)
    child.start()
    assert child.pid is not None
    child.join(limit_s)
    code = child.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    if code is None:
        return f"failed: not done after {limit_s:.0f} s"
    failures = [line["failure"] for line in _lines(out) if line["piece"] == name and "failure" in line]
    return "ok" if code == 0 else failures[-1] if failures else f"failed: its process ended with exit code {code}"


def table(content: dict[str, Any]) -> str:
    """The results as text: a line for each row; a row that missed its expectation is marked."""
    lines = []
    for piece in content["results"]:
        lines.append(f"{piece['piece']}: {piece['status']}")
        for row in piece["rows"]:
            mark = "  " if row["ok"] else "! "
            expected = f"  (expected {row['expected']})" if row["expected"] else ""
            lines.append(f"  {mark}{row['what']:<44} {row['value']}{expected}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
