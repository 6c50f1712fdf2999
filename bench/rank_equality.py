"""Whether several processes give what one gives: greedy text and logprobs of 100 prompts, in float32.

    .venv/bin/python -m bench.rank_equality [--models smollm2,bench/configs/qwen3-moe-100m] [--num-tokens 16] [--output FILE]

Answers the prompts in one process, then with each way to use several that fits the model, one engine after the other. Prints JSON: how many
texts are the same, and how far the logprobs of the chosen tokens are from those of one process, as long as the tokens agree. A folder with a
config alone gets random weights and SmolLM2's tokenizer.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.program import parser_of, words, write_report
from headrace import Engine
from headrace.benchmark.agreement import common_length
from headrace.checkpoint.names import resolve_model

BEGINNINGS = (
    "The capital of {} is",
    "A short story about {}. Once upon a time",
    "Q: What is known of {}?\nA:",
    "In the year 1950, {}",
    "Three facts about {}:\n1.",
    "Dear reader, today we look at {}. First,",
    "def describe():\n    # a function about {}\n    return",
    "{} and its neighbours have",
    "It is often said that {}",
    "The history of {} begins",
)
SUBJECTS = words("France, the sea, Japan, a small lighthouse, the railway, Brazil, mathematics, the moon, bread, Kenya")
PROMPTS = [beginning.format(subject) for beginning, subject in product(BEGINNINGS, SUBJECTS)]

DENSE: dict[str, dict[str, Any]] = {
    "tp 2": {"tp_size": 2},
    "pp 2": {"pp_size": 2},
    "tp 2 x pp 2": {"tp_size": 2, "pp_size": 2},
}
MIXTURE: dict[str, dict[str, Any]] = {
    **DENSE,
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2},
    "tp 2, dp attention 2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "tp 2, ep 2, dp attention 2": {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True},
}


@dataclass(frozen=True)
class Answer:
    """What came of a prompt. logprobs: of the chosen tokens."""

    ids: list[int]
    text: str
    logprobs: list[float]


def answers(model: str, num_tokens: int, options: dict[str, Any]) -> list[Answer]:
    """Of all prompts, by a new engine."""
    with Engine(model_path=model, dtype="float32", log_level="error", max_total_tokens=16384, **options) as engine:
        outputs = engine.generate(
            PROMPTS, {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}, return_logprob=True
        )
    return [
        Answer(
            output["output_ids"], output["text"], [value for value, *_ in output["meta_info"]["output_token_logprobs"]]
        )
        for output in outputs
    ]


def compare(one: list[Answer], several: list[Answer]) -> dict[str, Any]:
    """Prompt by prompt. Differences are those of logprobs, of all tokens before the first that differs in its prompt."""
    differences: list[float] = []
    for a, b in zip(one, several, strict=True):
        same = common_length(a.ids, b.ids)
        differences += [abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True)]
    return {
        "prompts": len(one),
        "equal_texts": sum(a.text == b.text and a.ids == b.ids for a, b in zip(one, several, strict=True)),
        "logprobs": len(differences),
        "largest_difference": max(differences),
        "differences_above_1e_4": sum(difference > 1e-4 for difference in differences),
        "differences_above_2e_3": sum(difference > 2e-3 for difference in differences),
    }


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=words, default="smollm2,bench/configs/qwen3-moe-100m")
    parser.add_argument("--num-tokens", type=int, default=16)
    args = parser.parse_args()
    found = []
    for model in args.models:
        path = resolve_model(model)
        options: dict[str, Any] = {}
        if not list(path.glob("*.safetensors")):
            options = {"load_format": "dummy", "tokenizer_path": "smollm2"}
        ways = MIXTURE if "moe" in Path(model).name else DENSE
        one = answers(model, args.num_tokens, options)
        for way, ranks in track(ways.items(), description=model):
            several = answers(model, args.num_tokens, options | ranks)
            found.append({"model": model, "way": way, **compare(one, several)})
    write_report({"prompts": len(PROMPTS), "num_tokens": args.num_tokens, "comparisons": found}, args.output)


if __name__ == "__main__":
    main()
