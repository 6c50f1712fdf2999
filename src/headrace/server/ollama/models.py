"""The routes of Ollama's API about the server and its models, and the names of models. Runs in the event loop that serves HTTP."""

import hashlib
from typing import Final

from headrace.errors import NotFoundError, RequestError
from headrace.media_kinds import MediaKind
from headrace.server.context import ServedModel
from headrace.server.http import Exchange, encode_json, send_response
from headrace.server.notes import HeaderNotes
from headrace.server.ollama.generation import NDJSON, timestamp
from headrace.server.ollama.protocol import OllamaPullRequest, OllamaShowRequest, full_name, read_body
from headrace.server.ui.pages import redirect
from headrace.text.fill_in_middle import FillInMiddle

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: some clients demand a recent one."""

_NEVER = "2318-01-01T00:00:00Z"
_OPTIONS = {"repetition_penalty": "repeat_penalty"}

_PAGE: Final = (
    b"<!doctype html><meta charset=utf-8><title>Headrace</title><h1>Headrace is running</h1>"
    b"<p>This server speaks the APIs of OpenAI and Ollama.</p>"
)


def human_number(count: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 8B, 1.5B; "" for none."""
    if count >= 10**9:
        return f"{count // 10**9}B" if count % 10**9 == 0 else f"{count / 1e9:.1f}B"
    if count >= 10**6:
        return f"{count // 10**6}M" if count % 10**6 == 0 else f"{count / 1e6:.2f}M"
    if count >= 1000:
        return f"{count / 1000:.0f}K"
    return str(count) if count else ""


async def root(exchange: Exchange) -> None:
    """The line by which Ollama's clients recognise a server; browsers are sent to the web pages."""
    if b"text/html" not in (exchange.header(b"accept") or b""):
        await send_response(exchange.send, 200, b"Ollama is running", b"text/plain; charset=utf-8")
    elif exchange.context.args.disable_ui:
        await send_response(exchange.send, 200, _PAGE, b"text/html; charset=utf-8")
    else:
        await redirect(b"ui/", exchange)


async def version(exchange: Exchange) -> None:
    await exchange.reply_json({"version": API_VERSION})


async def tags(exchange: Exchange) -> None:
    """The served model and its adapters."""
    context = exchange.context
    await exchange.reply_json({"models": [_card(context.model, name) for name in context.listed_names]})


async def ps(exchange: Exchange) -> None:
    """The same: they are all loaded, for ever."""
    context, ready = exchange.context, exchange.context.model.ready
    loaded = {
        "expires_at": _NEVER,
        "size_vram": 0 if ready.device == "cpu" else ready.weight_bytes + ready.kv_bytes,
        "context_length": context.model.context_length,
    }
    cards = [_card(context.model, name) for name in context.listed_names]
    for card in cards:
        del card["modified_at"]
    await exchange.reply_json({"models": [card | loaded for card in cards]})


async def show(noted: HeaderNotes, exchange: Exchange) -> None:
    body, headers_of = await read_body(noted, exchange, OllamaShowRequest)
    context, model = exchange.context, exchange.context.model
    adapter = context.adapter_of(_one_name(body.model, body.name))
    defaults = model.sampling_defaults
    brought = {name: value for name, value in defaults.values().items() if getattr(defaults, name) is not None}
    template = "" if model.chat_template is None else model.chat_template.source
    family = model.model_type
    info: dict[str, object] = {
        "general.architecture": family,
        "general.basename": model.name,
        f"{family}.context_length": model.context_length,
        f"{family}.embedding_length": model.ready.hidden_size,
        "general.parameter_count": model.ready.num_parameters,
        f"{family}.vocab_size": model.ready.vocab_size,
    }
    await exchange.reply_json(
        {
            "license": "",
            "modelfile": f"FROM {full_name(model.name)}\n",
            "parameters": "\n".join(f"{_OPTIONS.get(name, name)} {value:g}" for name, value in brought.items()),
            "template": template,
            "details": _details(model, adapter),
            "model_info": info,
            "capabilities": _capabilities(model),
            "modified_at": timestamp(model.created),
        },
        headers=headers_of(()),
    )


async def pull(noted: HeaderNotes, exchange: Exchange) -> None:
    """Success for a model that is served; there is no other."""
    body, headers_of = await read_body(noted, exchange, OllamaPullRequest)
    exchange.context.adapter_of(_one_name(body.model, body.name))
    headers = headers_of(())
    if body.stream is False:
        await exchange.reply_json({"status": "success"}, headers=headers)
        return
    lines = [encode_json({"status": status}) + b"\n" for status in ("pulling manifest", "success")]
    await send_response(exchange.send, 200, b"".join(lines), NDJSON, headers)


async def refuse(exchange: Exchange) -> None:
    """Refused: this server has the models that it was started with."""
    raise NotFoundError(
        "models cannot be created, copied, deleted or pushed here: this server has the models that it was started with",
        code="unsupported_route",
    )


def _card(model: ServedModel, name: str) -> dict[str, object]:
    shown = full_name(name)
    return {
        "name": shown,
        "model": shown,
        "modified_at": timestamp(model.created),
        "size": model.ready.weight_bytes,
        "digest": hashlib.sha256(f"{name}\n{model.ready.fingerprint}".encode()).hexdigest(),
        "details": _details(model, None if name in model.names else name),
    }


def _details(model: ServedModel, adapter: str | None) -> dict[str, object]:
    ready = model.ready
    precision = ready.quantization if ready.quantization != "none" else ready.dtype
    return {
        "parent_model": "" if adapter is None else full_name(model.name),
        "format": ready.file_format,
        "family": model.model_type,
        "families": [model.model_type],
        "parameter_size": human_number(ready.num_parameters),
        "quantization_level": ready.stored_precision or precision,
    }


def _capabilities(model: ServedModel) -> list[str]:
    if model.pooling is not None:
        return ["embedding"] if model.pooling.task == "embed" else []
    form = model.output_format if model.chat_template is not None else None
    found = {
        "completion": True,
        "insert": FillInMiddle.of(model.tokenizer) is not None,
        "vision": MediaKind.IMAGE in model.media_support.tokens,
        "tools": form is not None and form.has_tools,
        "thinking": form is not None and form.has_reasoning,
    }
    return [name for name, has_it in found.items() if has_it]


def _one_name(model: str, name: str) -> str:
    """Raises RequestError when there is none."""
    if not (model or name):
        raise RequestError("model is missing", "model", "missing_field")
    return model or name
