"""`headrace bench quality`: how close an Engine with the given options comes to one that computes in float32.

Figures of speed are published beside these. Owns what is generated and the report; text and arithmetic are agreement.py's.
Runs in the main process, one Engine after the other.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.api.engine import Engine
from headrace.api.options import SamplingOptions
from headrace.benchmark.agreement import (
    NUM_TOKENS,
    PROMPTS,
    WINDOW,
    Greedy,
    agreement,
    default_text,
    increase_error,
    mean_difference,
    perplexity,
    windows_of,
)
from headrace.benchmark.results import header, write_json
from headrace.benchmark.workloads import TokenIds
from headrace.checkpoint.names import resolve_model
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.text.tokenizers import load_tokenizer


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one Engine. text_logprobs: of the tokens of all windows, but the first of each. precision: in words."""

    precision: str
    greedy: Greedy
    text_logprobs: list[float]


def run_quality(server_args: ServerArgs, num_tokens: int, output: Path | None, console: Console) -> dict[str, Any]:
    """Measure, print, write; the results document. num_tokens: of the text, for perplexity.

    Raises ConfigError when the model cannot be computed in float32, because its checkpoint is quantised to integers.
    """
    windows = windows_of(
        load_tokenizer(resolve_model(server_args.tokenizer_name)), default_text("held out"), num_tokens
    )
    reference = outputs_of(
        replace(server_args, dtype="float32", activations="auto", quantization="none", kv_cache_dtype="float32"),
        windows,
    )
    if not reference.precision.startswith("float32"):
        raise ConfigError(
            f"the weights of {server_args.model_path} are {reference.precision}: there is no float32 to compare with"
        )
    got = outputs_of(server_args, windows)
    content = _document(server_args, reference, got)
    quality = content["quality"]
    console.print(f"{server_args.model_path}: {got.precision}, against float32", highlight=False)
    error = quality["perplexity_increase_error"]
    console.print(
        f"perplexity on {len(got.text_logprobs)} tokens: {quality['perplexity']:.3f}, {quality['perplexity_increase']:+.2%}"
        f"{'' if error is None else f' (standard error {error:.2%})'}; "
        f"mean |difference of logprobs| {quality['logprob_difference']:.4f}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"greedy: {agreement(reference.greedy, got.greedy)}", highlight=False, soft_wrap=True)
    if output is not None:
        write_json(output, content)
    return content


def outputs_of(server_args: ServerArgs, windows: list[TokenIds]) -> Outputs:
    """Start an Engine, continue PROMPTS greedily, and have it judge the windows."""
    with Engine(**asdict(server_args)) as engine:
        greedy: SamplingOptions = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        answers = engine.generate(list(PROMPTS), greedy, return_logprob=True)
        info = engine.get_server_info()
        judged = engine.generate(
            input_ids=windows,
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
    logprobs = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    text = [entry[0] for answer in judged for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    weights = f"{info['quantization']} weights"
    if info["quantization"] == "none":
        weights = f"{info['dtype']} weights, {info['activations']} activations"
    precision = f"{weights}, {info['kv_cache_dtype']} KV"
    return Outputs(precision, Greedy([answer["output_ids"] for answer in answers], logprobs), text)


def _document(server_args: ServerArgs, reference: Outputs, got: Outputs) -> dict[str, Any]:
    before, after = perplexity(reference.text_logprobs), perplexity(got.text_logprobs)
    return {
        **header("quality"),
        "model": server_args.model_path,
        "precision": got.precision,
        "quality": {
            "num_tokens": len(got.text_logprobs),
            "window": WINDOW,
            "reference_perplexity": before,
            "perplexity": after,
            "perplexity_increase": after / before - 1,
            "perplexity_increase_error": increase_error(reference.text_logprobs, got.text_logprobs, WINDOW - 1),
            "logprob_difference": mean_difference(reference.text_logprobs, got.text_logprobs),
            "agreement": asdict(agreement(reference.greedy, got.greedy)),
        },
    }
