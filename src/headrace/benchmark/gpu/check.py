"""`python -m headrace.benchmark.gpu.check`: tests and times everything on a GPU, in one command.

Owns the order of the pieces, the time they may take, the results document and its table. Does not measure (`pieces`). Every piece
runs in a process of its own: one that fails, hangs or runs out of memory says so in the results, and the next one begins with an empty
device. Needs torch and the packages that the runtime imports; neither a network nor the native CPU kernels. Exit code 1 when a piece
failed or an expectation was missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.benchmark.gpu.options import MODELS, Options
from headrace.benchmark.results import write_json
from headrace.benchmark.timing import timing_document

PIECES = {
    "device": "which device and versions",
    "kernels": "every op and attention backend against the reference on the CPU, graphs against eager steps",
    "rates": "copy bandwidth of the memory and rate of bfloat16 products",
    "decode": "decode steps at 1k tokens of context beside the floors",
    "prefill": "8k tokens of prompt beside the rate of products",
    "serving": "64 requests at once through the scheduler: throughput, and the gap between steps",
    "transformers": "generate of transformers, static cache and compiled, one request",
}
LIMIT_S = {
    "device": 60,
    "kernels": 240,
    "rates": 60,
    "decode": 280,
    "prefill": 120,
    "serving": 180,
    "transformers": 280,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m headrace.benchmark.gpu.check", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PIECES), help="pieces, comma-separated: " + ", ".join(PIECES))
    parser.add_argument("--models", default="", help="comma-separated: " + ", ".join(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small layers and short prompts: a trial of this command")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no further piece after this many seconds")
    parser.add_argument("--output", type=Path, help="write the results document here, as JSON")
    parser.add_argument("--rates", type=Path, help="take the piece `rates` from an earlier document")
    parser.add_argument("--in-process", action="store_true", help="run the pieces in this process, without time limits")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    parser.add_argument("--earlier", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    models = tuple(args.models.split(",")) if args.models else (MODELS[:1] if args.tiny else MODELS)
    names = args.only.split(",")
    for given, known, what in ((names, PIECES, "piece"), (models, MODELS, "model")):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {what} is called {', '.join(unknown)}; there are {', '.join(known)}")
    options = Options(args.device, args.tiny, models)
    if args.piece:
        print(json.dumps(_run(args.piece, options, json.loads(args.earlier.read_text()))))
        return 0
    earlier: dict[str, Any] = {}
    if args.rates is not None:
        document = json.loads(args.rates.read_text())
        earlier = {piece["piece"]: piece for piece in document["results"] if piece["piece"] == "rates"}
    results = _run_all(names, options, earlier, args.budget_s, args.in_process)
    content = timing_document("gpu", {"device": args.device, "tiny": args.tiny}, results)
    print(table(content), flush=True)
    if args.output is not None:
        write_json(args.output, content)
        print(f"results: {args.output}")
    return 1 if any(piece["status"] != "ok" or not all(row["ok"] for row in piece["rows"]) for piece in results) else 0


def _run_all(
    names: Sequence[str], options: Options, earlier: dict[str, Any], budget_s: float, in_process: bool
) -> list[dict[str, Any]]:
    begin = time.monotonic()
    results = []
    for name in names:
        left = budget_s - (time.monotonic() - begin)
        print(f"== {name}: {PIECES[name]}", file=sys.stderr, flush=True)
        if left <= 0:
            piece = {
                "piece": name,
                "status": f"not run: the {budget_s:.0f} s are over; run it with --only {name}",
                "rows": [],
            }
        elif in_process:
            piece = _run(name, options, earlier)
        else:
            piece = _in_child(name, options, earlier, min(left, LIMIT_S[name]))
        earlier[name] = piece
        results.append(piece)
        print(f"   {piece['status']}, {piece.get('seconds', 0.0):.1f} s", file=sys.stderr, flush=True)
    return results


def _run(name: str, options: Options, earlier: dict[str, Any]) -> dict[str, Any]:
    """Run one piece in this process. An exception that it raises becomes its status, and goes no further."""
    import traceback

    from headrace.benchmark.gpu import pieces

    begin, rows = time.monotonic(), list[dict[str, Any]]()
    status = "ok"
    try:
        pieces.run(name, options, earlier, rows)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        status = f"failed: {type(error).__name__}: {error}"[:500]
    return {"piece": name, "status": status, "seconds": time.monotonic() - begin, "rows": rows}


def _in_child(name: str, options: Options, earlier: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Run one piece in a process of its own, which is killed when its time is up."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(earlier, file)
        file.flush()
        command = [sys.executable, "-m", "headrace.benchmark.gpu.check", "--piece", name, "--earlier", file.name]
        command += ["--device", options.device, "--models", ",".join(options.models)]
        command += ["--tiny"] if options.tiny else []
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return {"piece": name, "status": f"failed: not done after {limit_s:.0f} s", "seconds": limit_s, "rows": []}
    lines = done.stdout.decode().strip().splitlines()
    if done.returncode or not lines:
        return {"piece": name, "status": f"failed: its process ended with exit code {done.returncode}", "rows": []}
    piece: dict[str, Any] = json.loads(lines[-1])
    return piece


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
