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
from typing import Any

import psutil
from rich.progress import track

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


def compare(way: str, plain: list[Output], guessed: list[Output], restarts: int = 0) -> dict[str, Any]:
    """Answer by answer."""

    def of(output: Output) -> list[Any]:
        return [output["text"], output["output_ids"], *(output["meta_info"].get(name) for name in _COMPARED)]

    metas = [output["meta_info"] for output in guessed]
    return {
        "way": way,
        "prompts": len(plain),
        "equal": sum(of(a) == of(b) for a, b in zip(plain, guessed, strict=True)),
        "output_tokens": sum(meta["completion_tokens"] for meta in metas),
        "guessed_tokens": sum(meta["spec_draft_token_num"] for meta in metas),
        "right_tokens": sum(meta["spec_accept_token_num"] for meta in metas),
        "retractions": sum(meta["num_retractions"] for meta in metas),
        "restarts": restarts,
    }


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
    args = parser.parse_args()
    texts, num_tokens = prompts(args.num_prompts), args.num_tokens
    plainly: dict[str, Any] = {
        "model_path": args.model,
        "quantization": "int8",
        "max_running_requests": 4,
        "max_total_tokens": 262144,
        "log_level": "error",
        "speculative_algorithm": "off",
    }
    guessing = plainly | {"speculative_algorithm": args.algorithm}
    plain: dict[str, list[Output]] = {}
    found = []
    with Engine(**plainly) as one, Engine(**guessing) as other:
        for way in track(WAYS, description="ways"):
            plain[way] = answers(one, texts, way, num_tokens)
            found.append(compare(way, plain[way], answers(other, texts, way, num_tokens)))
    with Engine(**guessing | {"max_total_tokens": 1024}) as engine:
        found.append(compare("a small KV cache", plain["greedy"], answers(engine, texts, "greedy", num_tokens)))
    with Engine(single_process=False, **guessing) as engine:
        outputs, restarts = with_a_killed_scheduler(engine, texts, num_tokens)
        found.append(compare("a scheduler that is killed", plain["greedy"], outputs, restarts))
    write_report(
        {
            "model": args.model,
            "quantization": "int8",
            "algorithm": args.algorithm,
            "prompts": len(texts),
            "num_tokens": num_tokens,
            "comparisons": found,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
