"""Whether guessing tokens changes any: 500 prompts, sampled in several ways, with and without --speculative-algorithm.

    .venv/bin/python -m bench.speculation_equality [--model smollm2] [--algorithm auto] [--num-prompts 500] [--num-tokens 24] [--output FILE]

The prompts are those of `headrace bench serving --presets E,R,F,G,H`. Four requests run at a time, so that guesses pay. With a small KV cache
requests are set back and computed again; with a killed scheduler, all that run are replayed. Prints JSON: of each way, how many answers are the
same (ids, text, reason of the end, every bit of the logprobs), and how many tokens were guessed.
"""

import json
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from rich.progress import Progress

from bench.program import parser_of, write_report
from headrace import Engine
from headrace.benchmark.workloads import PERSON_SCHEMA, TASKS

Output = dict[str, Any]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
    "grammar": {"temperature": 0.6, "seed": 5, "json_schema": json.dumps(PERSON_SCHEMA)},
    "penalties": {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0},
    "stop strings": {"temperature": 0, "stop": [" and", "return", ".\n"]},
}
_COMPARED = ("output_token_logprobs", "output_top_logprobs", "finish_reason", "completion_tokens")


@dataclass(frozen=True)
class Found:
    """Of one way. retractions: of the requests whose tokens were guessed."""

    way: str
    prompts: int
    equal: int
    output_tokens: int
    guessed_tokens: int
    right_tokens: int
    retractions: int = 0
    restarts: int = 0


def prompts(count: int) -> list[str]:
    """As many of each kind of task."""
    rng = random.Random(1234)
    kinds = [tasks(rng, -(-count // len(TASKS))) for tasks in TASKS.values()]
    return [prompt for of_kinds in zip(*kinds, strict=True) for prompt in of_kinds][:count]


def answers(engine: Engine, texts: Sequence[str], way: str, num_tokens: int) -> list[Output]:
    """Of all prompts."""
    sampling: Any = {**WAYS[way], "max_new_tokens": num_tokens}
    logprobs: Any = {"return_logprob": True, "top_logprobs_num": 2} if way == "logprobs" else {}
    return engine.generate(list(texts), sampling, **logprobs)


def compare(way: str, plain: list[Output], guessed: list[Output], restarts: int = 0) -> Found:
    """Answer by answer."""

    def of(output: Output) -> list[Any]:
        return [output["text"], output["output_ids"], *(output["meta_info"].get(name) for name in _COMPARED)]

    metas = [output["meta_info"] for output in guessed]
    return Found(
        way,
        len(plain),
        sum(of(a) == of(b) for a, b in zip(plain, guessed, strict=True)),
        sum(meta["completion_tokens"] for meta in metas),
        sum(meta["spec_draft_token_num"] for meta in metas),
        sum(meta["spec_accept_token_num"] for meta in metas),
        sum(meta["num_retractions"] for meta in metas),
        restarts,
    )


def with_a_killed_scheduler(engine: Engine, texts: Sequence[str], num_tokens: int) -> tuple[list[Output], int]:
    """Greedy answers of an engine whose scheduler is killed on the way, and how often it was started again."""
    found: list[list[Output]] = []
    asking = threading.Thread(target=lambda: found.append(answers(engine, texts, "greedy", num_tokens)))
    asking.start()
    for _ in range(2):  # what is in flight at a third death is given up
        time.sleep(8)
        for child in psutil.Process().children(recursive=True):
            if "scheduler" in child.cmdline():
                child.send_signal(signal.SIGKILL)
    asking.join()
    samples = (line.split() for line in engine.metrics().splitlines() if line.startswith("headrace:restarts_total"))
    return found[0], sum(int(float(value)) for _, value in samples)


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--num-prompts", type=int, default=500)
    parser.add_argument("--num-tokens", type=int, default=24)
    parser.add_argument("--only-killed", action="store_true", help="only greedy, and with a scheduler that is killed")
    args = parser.parse_args()
    texts, num_tokens = prompts(args.num_prompts), args.num_tokens
    options: dict[str, Any] = {
        "model_path": args.model,
        "quantization": "int8",
        "max_running_requests": 4,
        "log_level": "error",
    }
    guessing = {"speculative_algorithm": args.algorithm}
    found = []
    with Progress() as progress:
        bar = progress.add_task("ways", total=2 if args.only_killed else len(WAYS) + 2)
        with ExitStack() as engines:
            plain_engine, guessing_engine = (
                engines.enter_context(Engine(max_total_tokens=262144, **options, **more)) for more in ({}, guessing)
            )
            greedy: list[Output] = []
            for way in ["greedy"] if args.only_killed else WAYS:
                plain = answers(plain_engine, texts, way, num_tokens)
                greedy = greedy or plain
                found.append(compare(way, plain, answers(guessing_engine, texts, way, num_tokens)))
                progress.advance(bar)
        if not args.only_killed:
            with Engine(max_total_tokens=1024, **options, **guessing) as engine:
                found.append(compare("a small KV cache", greedy, answers(engine, texts, "greedy", num_tokens)))
                progress.advance(bar)
        with Engine(max_total_tokens=262144, single_process=False, **options, **guessing) as engine:
            outputs, restarts = with_a_killed_scheduler(engine, texts, num_tokens)
            found.append(compare("a scheduler that is killed", greedy, outputs, restarts))
            progress.advance(bar)
    write_report(
        {
            "model": args.model,
            "quantization": "int8",
            "algorithm": args.algorithm,
            "prompts": len(texts),
            "num_tokens": num_tokens,
            "comparisons": [asdict(one) for one in found],
        },
        args.output,
    )


if __name__ == "__main__":
    main()
