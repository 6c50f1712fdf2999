"""What a process reads of the model besides its weights: configuration, tokenizer and chat template.

Each process opens what it needs for itself; the threads of an engine that is one process (--single-process) share a tokenizer. What takes long to
import is imported where it is used.
"""

import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.checkpoint.names import known_model, resolve_model
from headrace.config.checks import check_pooling, encoder_args
from headrace.config.resolve import sampling_defaults
from headrace.config.server_args import ServerArgs
from headrace.config.web import media_args, unsupported_by_options
from headrace.errors import ModelError, RequestError
from headrace.log import get_logger
from headrace.media_kinds import MediaKind
from headrace.messages.control import ReadyInfo

logger = get_logger(__name__)

SMALL_MODEL_REPLY_TOKENS = 1024

if TYPE_CHECKING:
    from headrace.checkpoint.model_config import ModelConfig
    from headrace.checkpoint.pooling import PoolingConfig
    from headrace.frontend.media import PromptMedia
    from headrace.parsers.registry import OutputFormat
    from headrace.server.context import ServedModel
    from headrace.text.chat_templates import ChatTemplate
    from headrace.text.tokenizers import Tokenizer


def read_model_config(args: ServerArgs) -> "ModelConfig":
    """What the checkpoint says of itself, with the user's overrides; reads no weights."""
    from headrace.checkpoint.gguf import is_gguf
    from headrace.checkpoint.model_config import load_model_config
    from headrace.checkpoint.source import open_checkpoint
    from headrace.config.resolve import override_model

    path = resolve_model(args.model_path)
    is_file = path.is_file() and is_gguf(path)
    config = open_checkpoint(path, args.mmproj).config if is_file or args.names_mmproj else load_model_config(path)
    return override_model(config, args.json_model_override_args)


def read_pooling_config(args: ServerArgs, model: "ModelConfig") -> "PoolingConfig | None":
    """What the model makes of a text instead of more text; None = it generates. Raises ModelError, and ConfigError for options that do not fit."""
    from headrace.checkpoint.pooling import read_pooling

    pooling = read_pooling(resolve_model(args.model_path), model, args.is_embedding)
    if pooling is not None:
        check_pooling(args, is_encoder=model.encoder is not None)
        if args.context_length is not None:
            pooling = msgspec.structs.replace(pooling, max_tokens=args.context_length)
    return pooling


def with_encoder(args: ServerArgs) -> ServerArgs:
    """The options with those that an encoder sets itself, if the model is one; reads no GGUF file, which takes longer."""
    if not resolve_model(args.model_path).is_dir():
        return args
    model = read_model_config(args)
    if model.encoder is None:
        return args
    check_pooling(args, is_encoder=True)  # the user's options, before any is changed
    return encoder_args(args, model.max_position_embeddings)


def open_tokenizer(args: ServerArgs, *, encodes: bool = True) -> "Tokenizer":
    """The tokenizer of the model, or the one of --tokenizer-path. encodes: see `load_tokenizer`."""
    from headrace.frontend.tokenize import NoTokenizer
    from headrace.text.tokenizers import load_tokenizer

    if args.skip_tokenizer_init:
        return NoTokenizer()
    path = resolve_model(args.tokenizer_path or args.model_path)
    encodes = encodes or args.single_process
    key = (path, encodes, _stamp(path))
    with _opening:
        tokenizer = _open_tokenizers.get(key)
        if tokenizer is None:
            tokenizer = _open_tokenizers[key] = load_tokenizer(path, encodes=encodes)
    return tokenizer


# A tokenizer of each thread would be made and freed in another arena of malloc each time, which keep most of that memory.
_open_tokenizers: "weakref.WeakValueDictionary[tuple[Path, bool, object], Tokenizer]" = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _stamp(path: Path) -> object:
    """What changes with the files of a model."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple(
        (file.name, (stat := file.stat()).st_ino, stat.st_mtime_ns, stat.st_size) for file in files if file.exists()
    )


def tokens_of(args: ServerArgs, text: str) -> list[int]:
    """Of a text, with --skip-tokenizer-init, too; none if the model has no tokenizer."""
    from headrace.text.tokenizers import load_tokenizer

    try:
        return load_tokenizer(resolve_model(args.tokenizer_path or args.model_path)).encode(text)
    except ModelError:
        return []


def open_media(
    args: ServerArgs, tokenizer: "Tokenizer", model: "ModelConfig", pooling: "PoolingConfig | None"
) -> "PromptMedia":
    """What makes the media of prompts; of a model that takes none, what says why not. Starts no process. Raises ConfigError for wrong options."""
    from headrace.frontend.media import PromptMedia
    from headrace.messages.media import MediaSupport

    limits = media_args(args)
    reasons: dict[MediaKind, str] = {
        MediaKind.IMAGE: model.vision_unsupported_reason,
        MediaKind.AUDIO: model.audio_unsupported_reason,
    }
    if model.media is None and model.audio is None:
        return PromptMedia(support=MediaSupport(reasons=reasons))
    by_options = unsupported_by_options(args, pooling is not None)
    if by_options:
        return PromptMedia(support=MediaSupport(reasons=_more_reasons(model, reasons, by_options)))
    from headrace.checkpoint.gguf import is_gguf
    from headrace.checkpoint.gguf_mmproj import media_files
    from headrace.multimodal.loader import make_loader

    path = resolve_model(args.model_path)
    try:
        files = media_files(path, args.mmproj) if path.is_file() and is_gguf(path) else None
        loader = make_loader(path, tokenizer, limits, reasons, files)
    except ModelError as error:
        logger.warning("the model's media are not supported: %s", error.message)
        return PromptMedia(support=MediaSupport(reasons=_more_reasons(model, reasons, error.message)))
    return PromptMedia(loader)


def _more_reasons(model: "ModelConfig", reasons: "dict[MediaKind, str]", reason: str) -> "dict[MediaKind, str]":
    """The reasons with one for what the model could take."""
    if model.media is not None:
        reasons = reasons | dict.fromkeys((MediaKind.IMAGE, MediaKind.VIDEO), reason)
    return reasons if model.audio is None else reasons | {MediaKind.AUDIO: reason}


def open_chat_template(args: ServerArgs, tokenizer: "Tokenizer") -> "ChatTemplate | None":
    """The template of --chat-template or the model's own; None when there is none."""
    from headrace.text.chat_templates import chat_template_of, read_template_argument

    override = read_template_argument(args.chat_template) if args.chat_template else None
    try:
        return chat_template_of(tokenizer, override)
    except RequestError:
        return None


def open_output_format(
    args: ServerArgs, tokenizer: "Tokenizer", template: "ChatTemplate | None"
) -> "OutputFormat | None":
    """How the model writes tool calls and reasoning: as the options say, or as the checkpoint shows. Raises ConfigError for unknown names."""
    from headrace.parsers.registry import AUTO, choose

    tool_parser = args.tool_call_parser
    if tool_parser == AUTO and template is not None and not template.uses_tools:
        # It knows no tools, so they are written out for it in this format.
        tool_parser = "hermes"
    return choose(
        template="" if template is None else template.source,
        special=tokenizer.added_tokens,
        response_template=tokenizer.response_template,
        tool_parser=tool_parser,
        reasoning_parser=args.reasoning_parser,
    )


class EndTokens(NamedTuple):
    """The tokens that end outputs of a model. eos: all of them. turn: those of chats, too."""

    eos: frozenset[int]
    turn: frozenset[int]


def end_tokens(args: ServerArgs, model: "ModelConfig", tokenizer: "Tokenizer") -> EndTokens:
    """What config.json, generation_config.json and the tokenizer say of ends; and of chats the token with which a template ends an assistant's turn.

    What a tokenizer, a GGUF file or a template says counts only if the output format does not use it within a turn. An `eos_token_id` in
    --json-model-override-args stands for all three files; null = config.json states none.
    """
    from headrace.parsers.registry import choose

    template = open_chat_template(args, tokenizer)
    shown = [one for one in (template, _open_tool_template(args, tokenizer)) if one is not None]
    texts = {one.turn_end() for one in shown}
    # Whatever parser the options name, the model writes as it was trained to.
    formats = [
        choose(template=one.source, special=tokenizer.added_tokens, response_template=tokenizer.response_template)
        for one in shown
    ]
    formats.append(open_output_format(args, tokenizer, template))
    inner = frozenset(index for found in formats if found is not None for index in found.inner_ids)
    ids = {index for text in texts if text and (index := tokenizer.token_to_id(text)) is not None}
    stated = msgspec.json.decode(args.json_model_override_args).get("eos_token_id")
    # Of a GGUF file the model's own are those of its tokenizer, most of them known by their text alone.
    own = frozenset(() if stated is None and resolve_model(args.model_path).is_file() else model.eos_token_ids)
    eos = own if stated is not None else own | (frozenset((*model.eos_token_ids, *tokenizer.eos_ids)) - inner)
    return EndTokens(eos, frozenset(ids) - inner - eos)


def _open_tool_template(args: ServerArgs, tokenizer: "Tokenizer") -> "ChatTemplate | None":
    """The checkpoint's own template for conversations with tools, if it has another one for them."""
    from headrace.text.chat_templates import chat_template_of

    has_other = not args.chat_template and "tool_use" in tokenizer.chat_template
    return chat_template_of(tokenizer, has_tools=True) if has_other else None


def served_model(
    args: ServerArgs,
    ready: ReadyInfo,
    tokenizer: "Tokenizer",
    template: "ChatTemplate | None",
    model: "ModelConfig",
    pooling: "PoolingConfig | None",
) -> "ServedModel":
    from headrace.server.context import ServedModel

    tool_template = _open_tool_template(args, tokenizer)
    media = open_media(args, tokenizer, model, pooling).as_loaded(ready)
    media.close()
    return ServedModel(
        name=args.served_name,
        aliases=args.served_names[1:],
        context_length=ready.context_length,
        tokenizer=tokenizer,
        chat_template=template,
        tool_template=tool_template,
        output_format=open_output_format(args, tokenizer, tool_template or template),
        ready=ready,
        model_type=_model_type(model),
        architectures=tuple(model.around.get("architectures") or model.architectures),
        sampling_defaults=sampling_defaults(args, model),
        pooling=pooling,
        media_support=media.support,
        reply_limit=reply_limit(args),
    )


def reply_limit(args: ServerArgs) -> int:
    """Most tokens of a chat's reply whose request gives no limit; 0 = as many as fit. Small models, greedy ones most, may not end by themselves."""
    if args.default_max_tokens is not None:
        return args.default_max_tokens
    return SMALL_MODEL_REPLY_TOKENS if known_model(args.model_path) else 0


def _model_type(model: "ModelConfig") -> str:
    """At the top of the checkpoint's config.json."""
    encoded = model.media or model.audio
    return model.model_type if encoded is None else encoded.family
