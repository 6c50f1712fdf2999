"""Requests for what belongs between a prompt and a suffix: their prompts, and what ends their output. Runs in the event loop that serves HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.errors import RequestError
from headrace.sampling.params import SamplingParams
from headrace.server.context import ServingContext
from headrace.text.fill_in_middle import FillInMiddle


@dataclass(frozen=True, slots=True)
class Middle:
    """How the model fills in the middle, and the tokens of the suffix."""

    how: FillInMiddle
    suffix: list[int]

    def around(self, prefixes: Sequence[int | list[int]], begins: bool = True) -> list[int | list[int]]:
        """The prompt of a prefix, or one for each of a list of prefixes. begins: as a text of this model begins."""
        if prefixes and isinstance(prefixes[0], list):
            return [self.how.prompt(prefix, self.suffix, begins) for prefix in prefixes if isinstance(prefix, list)]
        return [*self.how.prompt([index for index in prefixes if isinstance(index, int)], self.suffix, begins)]

    def ending(self, sampling: SamplingParams) -> SamplingParams:
        """The same parameters, for an output that ends with the middle."""
        return stopping(sampling, self.how)


def stopping(sampling: SamplingParams, how: FillInMiddle) -> SamplingParams:
    """The same parameters, for an output that ends with the middle."""
    if sampling.ignore_eos:
        return sampling
    return msgspec.structs.replace(sampling, stop_token_ids=[*(sampling.stop_token_ids or []), *sorted(how.ends)])


def fill_in_middle(context: ServingContext, param: str) -> FillInMiddle:
    """How the served model does it. param: the field that asks for it. Raises RequestError if it does not."""
    context.check_tokenizer(param)
    found = FillInMiddle.of(context.model.tokenizer)
    if found is None:
        message = f"{param}: this model does not fill in the middle: its tokenizer has no tokens such as <|fim_prefix|>"
        raise RequestError(message, param, "unsupported_parameter")
    return found


async def middle_of(context: ServingContext, suffix: str, param: str = "suffix") -> Middle:
    """What a request with a suffix needs. Special tokens that the suffix spells out are text. Raises RequestError."""
    how = fill_in_middle(context, param)
    context.check_text_length(param, len(suffix))
    return Middle(how, await context.in_text_thread(lambda: context.model.tokenizer.encode(suffix, False)))
