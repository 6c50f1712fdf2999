"""The arguments of `Engine` and `Runtime`: the requests that they make, the fields of routes and what these reply, and the bytes of files as
structs, as JSON, and in the parts of messages.

Pure functions; any thread.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headrace.errors import RequestError
from headrace.media_kinds import PARTS, REFS, FileRef, ImageRef, MediaKind, VideoRef
from headrace.messages.bodies import converted
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput


@runtime_checkable
class Array(Protocol):
    """The common interface of NumPy's arrays and torch's tensors."""

    def tolist(self) -> Any: ...


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
    return converted(media_structs(without_none(given)), GenerateReqInput)


PooledInputs = str | Sequence[str] | Sequence[Sequence[str]]
"""A text, several, or pairs of texts."""


def encode_request(prompt: object, input_ids: object, others: dict[str, Any]) -> EmbeddingReqInput:
    if "text" in others:
        prompt = others.pop("text") if prompt is None else prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = [
            item if isinstance(item, str) else list(item) if isinstance(item, Sequence) else item for item in prompt
        ]
    if input_ids is not None:
        input_ids = _plain_ids(input_ids)
    return converted(without_none({"text": prompt, "input_ids": input_ids, **others}), EmbeddingReqInput)


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


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


def media_structs(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with files in structs; the rest is checked later. Raises RequestError for what is no file."""
    return given | {
        kind.field: _struct(kind.field, given[kind.field], kind) for kind in MediaKind if kind.field in given
    }


def media_json(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as HTTP takes them: files in base64; the rest is checked by the server. Raises RequestError for what is no file."""
    return given | {kind.field: _json(kind.field, given[kind.field]) for kind in MediaKind if kind.field in given}


def _struct(name: str, given: object, kind: MediaKind) -> object:
    if isinstance(given, list | tuple):
        return [_struct(name, item, kind) for item in given]
    if isinstance(given, VideoRef):
        given = {"frames": given.frames, "fps": given.fps}
    ref = REFS[kind]
    if ref is VideoRef and isinstance(given, Mapping) and isinstance(given.get("frames"), list | tuple):
        return {**given, "frames": [_struct(name, frame, MediaKind.IMAGE) for frame in given["frames"]]}
    data = _file_bytes(name, given)
    if data is None:
        return given
    if not issubclass(ref, FileRef):
        raise RequestError(f'{name}: a video is given by its frames: {{"frames": [...], "fps": 2}}', name)
    return ref(data=data)


def _json(name: str, given: object) -> object:
    if isinstance(given, list | tuple):
        return [_json(name, item) for item in given]
    if isinstance(given, Mapping):
        return {key: _json(name, value) for key, value in given.items()}
    if isinstance(given, VideoRef):
        return {"frames": _json(name, given.frames), "fps": given.fps}
    if isinstance(given, FileRef):
        detail = {"detail": given.detail} if isinstance(given, ImageRef) else {}
        return {"url": given.url or b64encode(given.data).decode()} | detail
    data = _file_bytes(name, given)
    return given if data is None else b64encode(data).decode()


def _file_bytes(name: str, given: object) -> bytes | None:
    """The bytes of a file that is given as such, or by its path; None of anything else that may be sent. Raises RequestError for arrays."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, PathLike):
        try:
            return Path(given).read_bytes()
        except OSError as error:
            raise RequestError(f"{name}: {given} cannot be read: {error.strerror}", name) from None
    if hasattr(given, "__array_interface__") or hasattr(given, "__array__"):
        raise RequestError(
            f"{name} has {'an image of Pillow' if hasattr(given, 'getbands') else 'an array'}: give the bytes of a file, or its Path",
            name,
        )
    return None


def messages_as_json(messages: object) -> object:
    """Messages in which the URL of an item may be the bytes of a file, as chat completions take them."""
    return [_message(message) for message in messages] if isinstance(messages, list | tuple) else messages


def _message(message: object) -> object:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    assert isinstance(message, Mapping), "it has content"
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in PARTS:
        return part
    kind = part["type"]
    return {**part, kind: _json(kind, part.get(kind))}


ONE_REPLY = ("n", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "stream_options")
"""Fields of chat completions for what a `ChatReply` does not hold."""


def chat_fields(messages: object, tools: object, stream: bool, options: Mapping[str, object]) -> dict[str, Any]:
    """The fields of the chat completion. Raises RequestError for one whose effect could not be seen."""
    for name in ONE_REPLY:
        if options.get(name) not in (None, False, 0) and (name, options[name]) != ("n", 1):
            raise RequestError(f"{name} is not for chat: use generate, or the HTTP API", name, "unsupported_parameter")
    if options.get("functions"):
        raise RequestError("functions is not for chat: give tools", "functions", "unsupported_parameter")
    given = {"messages": messages_as_json(messages), "tools": tools, "stream": stream, **options}
    if stream:
        given["stream_options"] = {"include_usage": True}
    return without_none(given)


def rerank_fields(
    query: str,
    documents: Sequence[str | Mapping[str, Any]],
    top_n: int | None,
    return_documents: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    given = {"query": query, "documents": _plain(documents), "top_n": top_n, "return_documents": return_documents}
    return without_none(given | options)


def score_fields(
    query: str | list[int],
    items: str | Sequence[str] | Sequence[list[int]],
    label_token_ids: list[int] | None,
    apply_softmax: bool,
    item_first: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    given: dict[str, Any] = {"items": _plain(items), "apply_softmax": apply_softmax, "item_first": item_first}
    if label_token_ids is None:
        given["queries"] = query
    else:
        given |= {"query": query, "label_token_ids": label_token_ids}
    return without_none(given | options)


def scores_of(reply: dict[str, Any]) -> Any:
    """What `score` returns of a reply, which has labels or not."""
    return reply["scores"] if "scores" in reply else [item["score"] for item in reply["data"]]


def _plain(items: Any) -> Any:
    return items if isinstance(items, str) else list(items)
