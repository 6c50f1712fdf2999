"""A limit of reasoning tokens as sampling parameters. Pure functions, run in the thread that renders prompts."""

import msgspec

from headrace.errors import RequestError
from headrace.parsers.engine import OutputParser
from headrace.parsers.registry import OutputFormat, reasoning_tokens
from headrace.sampling.params import SamplingParams, ThinkingBudget
from headrace.text.tokenizers import Tokenizer

FIELD = "thinking_budget"


def check_reasoning(output_format: OutputFormat | None) -> None:
    """Raises RequestError if it is not known how the model writes its reasoning."""
    if output_format is None or not output_format.has_reasoning:
        raise RequestError(
            f"{FIELD}: this server does not know how the model ends its reasoning, see --reasoning-parser", FIELD
        )


def cannot_end() -> RequestError:
    """The refusal where no single token ends the reasoning."""
    return RequestError(f"{FIELD}: this model's reasoning does not end with a token of its own", FIELD)


def with_thinking_budget(
    sampling: SamplingParams, num_tokens: int, output_format: OutputFormat, start: OutputParser, tokenizer: Tokenizer
) -> SamplingParams | None:
    """The parameters with at most `num_tokens` of reasoning; None if no single token ends it. start: a parser at the beginning of the output."""
    found = reasoning_tokens(output_format, lambda text: tokenizer.encode(text, False, True))
    if found is None:
        return None
    budget = ThinkingBudget(
        num_tokens=num_tokens,
        end_id=found.end_id,
        end_ids=found.end_ids,
        begins=found.begins,
        is_open=start.is_reasoning,
    )
    return msgspec.structs.replace(sampling, thinking_budget=budget)
