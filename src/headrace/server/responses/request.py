"""A body of `/v1/responses` as a conversation and sampling parameters.

Owns which of the body's fields mean what there. Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.errors import ContextLengthError, RequestError
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.messages.bodies import is_empty
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, check_only_one
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import Conversation
from headrace.server.openai.structured_outputs import ollamas_format
from headrace.server.responses.items import Item, messages_of
from headrace.server.responses.protocol import ResponsesRequest, TextFormat
from headrace.server.responses.tools import OfferedTools, chosen_tools, offered_tools


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """What a body asks for."""

    conversation: Conversation
    sampling: SamplingParams
    tools: OfferedTools


def input_items(given: str | Sequence[Item] | None) -> list[Item]:
    """`input` as items. Raises RequestError if there is none."""
    if given is None:
        raise RequestError("input is missing", "input", "missing_field")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not given:
        raise RequestError("input is empty", "input")
    return list(given)


def asked_response(
    request: ResponsesRequest, earlier: Sequence[Item], items: Sequence[Item], context_length: int
) -> AskedResponse:
    """What a body asks for. earlier: items of the responses before this one. items: those of the input. Raises RequestError."""
    num_items = len(earlier) + len(items)
    if num_items > context_length:
        raise ContextLengthError("input", context_length, f"there are {num_items} items")
    if earlier:
        # The places of items in errors count from the first one of the first response.
        items = [*earlier, *items]
    tools = offered_tools(request.tools)
    choice, left = chosen_tools(request.tool_choice, tools)
    conversation = Conversation(
        messages=messages_of(items, "input", request.instructions),
        tools=left,
        choice=choice,
        parallel=request.parallel_tool_calls is not False,
        template_kwargs=request.chat_template_kwargs or {},
        thinking=None if request.think is None else request.think is not False,
        effort=request.effort,
    )
    return AskedResponse(conversation, _sampling(request), tools)


def grammar_field(request: ResponsesRequest) -> str | None:
    """The field that says what the output must match; None = none does."""
    own = next((kind for kind in GRAMMAR_KINDS if not is_empty(getattr(request, kind))), None)
    text_format = request.text.format if request.text is not None else None
    is_bound = text_format is not None and text_format.type in ("json_schema", "json_object")
    return own or ("text.format" if is_bound else "format" if request.format else None)


def _sampling(request: ResponsesRequest) -> SamplingParams:
    sampling = SamplingParams(
        grammar_after=request.grammar_after,
        max_new_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        typical_p=request.typical_p,
        stop=request.stop,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=request.repeat_penalty if request.repetition_penalty is None else request.repetition_penalty,
        ignore_eos=bool(request.ignore_eos),
    )
    asked: dict[str, object] = {kind: value for kind in GRAMMAR_KINDS if not is_empty(value := getattr(request, kind))}
    if (schema := ollamas_format(request.format)) not in (None, "", {}):
        check_only_one([*asked, "format"])
        asked["json_schema"] = schema
    text_format = request.text.format if request.text is not None else None
    if text_format is not None and (schema := _schema_of(text_format)) is not None:
        check_only_one([*(["format"] if request.format else asked), "text.format"])
        asked["json_schema"] = schema
    if "json_schema" in asked and not (text_format is not None and text_format.strict):
        asked["json_schema"] = with_one_of_as_any_of(asked["json_schema"])
    check_only_one(list(asked))
    return msgspec.structs.replace(sampling, **asked)


def _schema_of(text_format: TextFormat) -> object:
    """The schema that `text.format` asks for; None = none. Raises RequestError."""
    match text_format.type:
        case "json_schema":
            if text_format.schema is None:
                raise RequestError("text.format.schema is missing", "text.format.schema", "missing_field")
            # An empty value means "not set" elsewhere; here it is a schema.
            return text_format.schema or msgspec.json.encode(text_format.schema).decode()
        case "json_object":
            _no_schema(text_format)
            return {"type": "object"}
        case _:
            _no_schema(text_format)
            return None


def _no_schema(text_format: TextFormat) -> None:
    if not is_empty(text_format.schema):
        kind = text_format.type or "text"
        raise RequestError(f"text.format.schema does not belong to the type {kind}", "text.format.schema")
