"""What guessing by n-grams costs: microseconds for each row of a step, by the length of its sequence.

    .venv/bin/python -m bench.drafting [--lengths 128,8192,131072] [--output FILE]

Times what a worker does after a step: telling the drafter the token that was sampled, and asking for guesses. The tokens are words of Python's
help pages, so that most n-grams have come before. Prints JSON; medians of 5 rounds.
"""

import time
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from statistics import median

import numpy as np
from rich.progress import track

from bench.program import parser_of, write_report
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.params import ResolvedSamplingParams
from headrace.speculative.base import Drafts
from headrace.speculative.ngram import NgramDrafter, SharedOutputs

STEPS = 2000


@dataclass(frozen=True)
class Cost:
    """add_us: of the whole sequence, once. step_us: of one token, again and again; shared_us: the same with the outputs of others."""

    tokens: int
    add_us: float
    step_us: float
    shared_us: float


def words(count: int) -> list[int]:
    """Ids of the words of a long text, from the beginning again when it ends."""
    text = " ".join(topics.values()).split()
    ids = {word: number for number, word in enumerate(sorted(set(text)))}
    return [ids[text[index % len(text)]] for index in range(count)]


def timed(drafter: NgramDrafter, tokens: list[int], length: int) -> tuple[float, float]:
    """Microseconds to add the first `length` tokens, and for each of the others."""
    ids = np.array(tokens[:length], np.int32)
    task, content = SampleTask(ResolvedSamplingParams(max_new_tokens=STEPS, seed=0)), PromptContent(ids.tobytes())
    new = NewSequence(0, "a", ids, length, np.empty(0, np.int32), task, (), content)
    drafts = Drafts([drafter])
    begin = time.perf_counter()
    drafts.add(new)
    added = time.perf_counter()
    for token_id in tokens[length:]:
        drafts.extend(0, [token_id])
        drafts.propose([0])
    return 1e6 * (added - begin), 1e6 * (time.perf_counter() - added) / (len(tokens) - length)


def cost(length: int) -> Cost:
    """Of a sequence of so many tokens, which grows by `STEPS`."""
    tokens = words(length + STEPS)
    plain = [timed(NgramDrafter(16), tokens, length) for _ in range(5)]
    shared = [timed(NgramDrafter(16, SharedOutputs(65536)), tokens, length) for _ in range(5)]
    return Cost(
        length,
        round(median(add for add, _ in plain), 1),
        round(median(step for _, step in plain), 2),
        round(median(step for _, step in shared), 2),
    )


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", default="128,8192,131072")
    args = parser.parse_args()
    costs = [asdict(cost(int(length))) for length in track(args.lengths.split(","), description="lengths")]
    write_report({"steps": STEPS, "costs": costs}, args.output)


if __name__ == "__main__":
    main()
