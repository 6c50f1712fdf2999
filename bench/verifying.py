"""What a step costs that computes guesses: milliseconds by the number of its tokens, as a whole and in parts.

    .venv/bin/python -m bench.verifying [MODEL] [--quantization int8] [--tokens 1,2,5,9,12,16] [--repeat 7] [--output FILE]

One request at a time; each of its steps has the same number of wrong guesses, so that it gives one token whatever it computes. Rounds of all
numbers in turns. Prints JSON; medians.
"""

import gc
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.progress import track

from bench.program import parser_of, write_report
from headrace import Engine
from headrace.execution import build
from headrace.models.decoder import DecoderLM
from headrace.speculative.base import Drafts

PROMPT = [100 + place % 900 for place in range(300)]
STEPS = 60


class Wrong(Drafts):
    """Guesses the same token `count` times."""

    count = 0

    def propose(self, seqs: Sequence[int]) -> list[list[int]]:
        """See `Drafts.propose`."""
        return [[7] * self.count for _ in seqs]


def generate(engine: Engine, num_tokens: int) -> None:
    """As many tokens after the prompt."""
    engine.generate(
        input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    )


def one_round(engine: Engine, model: DecoderLM) -> dict[str, float]:
    """Milliseconds of a step, on average: as a whole (wall), in the worker (forward), and in parts of the layers."""
    generate(engine, 1)
    model.phase_seconds()
    before, begin = engine.internal_state(), time.perf_counter()
    generate(engine, STEPS)
    wall, after = time.perf_counter() - begin, engine.internal_state()
    seconds = {"wall": wall, "forward": after.forward_s - before.forward_s, **model.phase_seconds()}
    num_steps = after.num_steps - before.num_steps
    return {part: 1e3 * taken / num_steps for part, taken in seconds.items()}


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--tokens", default="1,2,5,9,12,16")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    numbers = [int(number) for number in args.tokens.split(",")]
    wrong = Wrong([])
    monkeypatched: Any = build
    monkeypatched.make_drafts = lambda *arguments, **named: wrong
    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in numbers}
    with Engine(
        model_path=args.model,
        quantization=args.quantization,
        max_total_tokens=32768,
        log_level="error",
        single_process=True,
        speculative_algorithm="ngram",
    ) as engine:
        [model] = (found for found in gc.get_objects() if type(found) is DecoderLM or type(found).__base__ is DecoderLM)
        for _ in track(range(args.repeat), description="rounds"):
            for number in numbers:
                wrong.count = number - 1
                rounds[number].append(one_round(engine, model))
    parts = {
        number: {part: round(median(each[part] for each in found), 3) for part in found[0]}
        for number, found in rounds.items()
    }
    write_report({"steps": STEPS, "prompt": len(PROMPT), "ms": parts}, args.output)


if __name__ == "__main__":
    main()
