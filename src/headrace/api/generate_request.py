"""The requests that the arguments of `Engine.generate` and `Engine.encode` make. Pure functions; any thread."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from headrace.api.media import media_structs
from headrace.errors import RequestError
from headrace.messages.field_errors import field_error
from headrace.messages.neutral import without_neutral
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput
from headrace.messages.whole_numbers import with_whole_numbers


@runtime_checkable
class Array(Protocol):
    """The common interface of NumPy's arrays and torch's tensors."""

    def tolist(self) -> Any:
        """The values as nested lists."""


TokenIds = Sequence[int] | Sequence[Sequence[int]] | Sequence[Array] | Array


def generate_request(
    prompt: object, sampling_params: object, input_ids: object, stream: bool, others: dict[str, Any]
) -> GenerateReqInput:
    """The request, with checked types. Raises RequestError that names the field."""
    if "text" in others:
        prompt = others.pop("text") if prompt is None else prompt
    if input_ids is not None:
        input_ids = _plain_ids(input_ids)
    given = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream, **others}
    given = {name: value for name, value in given.items() if value is not None}
    given = media_structs(given)
    try:
        return msgspec.convert(
            without_neutral(with_whole_numbers(given, GenerateReqInput), GenerateReqInput), GenerateReqInput
        )
    except msgspec.ValidationError as error:
        raise field_error(str(error), GenerateReqInput) from None


PooledInputs = str | Sequence[str] | Sequence[Sequence[str]]
"""A text, several, or pairs of texts."""


def encode_request(prompt: object, input_ids: object, others: dict[str, Any]) -> EmbeddingReqInput:
    """The request, with checked types. Raises RequestError that names the field."""
    if "text" in others:
        prompt = others.pop("text") if prompt is None else prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = [
            item if isinstance(item, str) else list(item) if isinstance(item, Sequence) else item for item in prompt
        ]
    if input_ids is not None:
        input_ids = _plain_ids(input_ids)
    given = {"text": prompt, "input_ids": input_ids, **others}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(
            without_neutral(with_whole_numbers(given, EmbeddingReqInput), EmbeddingReqInput), EmbeddingReqInput
        )
    except msgspec.ValidationError as error:
        raise field_error(str(error), EmbeddingReqInput) from None


def _plain_ids(ids: object) -> list[object]:
    """Token ids, or lists of them, as lists; whether they are integers is checked with the rest. Raises RequestError."""
    if isinstance(ids, Array):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple):
        raise RequestError(
            f"input_ids must be a list of token ids, of lists of them, or an array, got {type(ids).__name__}",
            "input_ids",
        )
    return [item if isinstance(item, int) else _plain_item(item) for item in ids]


def _plain_item(item: object) -> object:
    if isinstance(item, Array):
        item = item.tolist()
    return list(item) if isinstance(item, tuple) else item
