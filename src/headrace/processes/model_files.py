"""What a process reads of the model besides its weights: configuration, tokenizer, chat template, and what follows from them.

Where they lie is known to `execution.model_source`. Each process opens what it needs for itself; the threads of an engine that is one process
(--single-process) share a tokenizer. What takes long to import is imported where it is used.
"""

import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.checkpoint.names import known_model, resolve_model
from headrace.config.server_args import ServerArgs
from headrace.config.web import media_args, unsupported_by_options
from headrace.errors import ModelError, RequestError
from headrace.execution.model_source import (
    is_gguf_model,
    media_files_of,
    read_model_config,
    read_pooling_config,
    sampling_defaults,
)
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
    from headrace.text.chat_templates import ChatTemplate, TemplateChildren
    from headrace.text.tokenizers import Tokenizer


class EndTokens(NamedTuple):
    """The tokens that end outputs of a model. eos: all of them. turn: those of chats, too."""

    eos: frozenset[int]
    turn: frozenset[int]


class ModelFiles:
    """The model of the options; each part is opened when it is first asked for, and then kept, until `close`.

    encodes: see `load_tokenizer`. config: with the user's overrides. pooling: None = it generates text. chat_template: that of --chat-template or the
    model's own; None when there is none. tool_template: the model's own for conversations with tools, if it has another one for them.
    """

    def __init__(self, args: ServerArgs, *, encodes: bool = True) -> None:
        self.args = args
        self._encodes = encodes

    @cached_property
    def config(self) -> "ModelConfig":
        return read_model_config(self.args)

    @cached_property
    def pooling(self) -> "PoolingConfig | None":
        return read_pooling_config(self.args, self.config)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        return open_tokenizer(self.args, encodes=self._encodes)

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        from headrace.text.chat_templates import chat_template_of, read_template_argument

        override = read_template_argument(self.args.chat_template) if self.args.chat_template else None
        try:
            return chat_template_of(self.tokenizer, override, children=self._children)
        except RequestError:
            return None

    @cached_property
    def tool_template(self) -> "ChatTemplate | None":
        from headrace.text.chat_templates import chat_template_of

        has_other = not self.args.chat_template and "tool_use" in self.tokenizer.chat_template
        return chat_template_of(self.tokenizer, has_tools=True, children=self._children) if has_other else None

    @cached_property
    def _children(self) -> "TemplateChildren":
        from headrace.text.chat_templates import TemplateChildren

        return TemplateChildren()

    def output_format(self, template: "ChatTemplate | None") -> "OutputFormat | None":
        """How the model writes tool calls and reasoning: as the options say, or as the checkpoint shows. Raises ConfigError for unknown names."""
        from headrace.parsers.registry import AUTO, choose

        tool_parser = self.args.tool_call_parser
        if tool_parser == AUTO and template is not None and not template.uses_tools:
            # It knows no tools, so they are written out for it in this format.
            tool_parser = "hermes"
        return choose(
            template="" if template is None else template.source,
            special=self.tokenizer.added_tokens,
            response_template=self.tokenizer.response_template,
            tool_parser=tool_parser,
            reasoning_parser=self.args.reasoning_parser,
        )

    @cached_property
    def end_tokens(self) -> EndTokens:
        """What config.json, generation_config.json and the tokenizer say of ends; and of chats the token with which a template ends a turn.

        What a tokenizer, a GGUF file or a template says counts only if the output format does not use it within a turn. An `eos_token_id` in
        --json-model-override-args stands for all three files; null = config.json states none.
        """
        from headrace.parsers.registry import choose

        tokenizer, listed = self.tokenizer, self.config.eos_token_ids
        shown = [one for one in (self.chat_template, self.tool_template) if one is not None]
        texts = {one.turn_end() for one in shown}
        # Whatever parser the options name, the model writes as it was trained to.
        formats = [
            choose(template=one.source, special=tokenizer.added_tokens, response_template=tokenizer.response_template)
            for one in shown
        ]
        formats.append(self.output_format(self.chat_template))
        inner = frozenset(index for found in formats if found is not None for index in found.inner_ids)
        ids = {index for text in texts if text and (index := tokenizer.token_to_id(text)) is not None}
        stated = msgspec.json.decode(self.args.json_model_override_args).get("eos_token_id")
        # Of a GGUF file the model's own are those of its tokenizer, most of them known by their text alone.
        own = frozenset(() if stated is None and is_gguf_model(self.args) else listed)
        eos = own if stated is not None else own | (frozenset((*listed, *tokenizer.eos_ids)) - inner)
        return EndTokens(eos, frozenset(ids) - inner - eos)

    def check(self) -> None:
        """Open what may be refused. Raises ConfigError or ModelError."""
        _ = self.pooling, self.tokenizer
        self.output_format(self.chat_template)

    def watch_templates(self, on_lost: Callable[[], object]) -> None:
        """See `ChildPool`: of the processes that render its templates."""
        self._children.on_lost = on_lost

    def close(self) -> None:
        """End the processes that render its templates, if there are any: no more chats. Idempotent."""
        if "_children" in vars(self):
            self._children.close()

    def open_media(self) -> "PromptMedia":
        """What makes the media of prompts; of a model that takes none, what says why not. Starts no process. Raises ConfigError for wrong options."""
        from headrace.frontend.media import PromptMedia
        from headrace.messages.media import MediaSupport

        args, model = self.args, self.config
        limits = media_args(args)
        reasons: dict[MediaKind, str] = {
            MediaKind.IMAGE: model.vision_unsupported_reason,
            MediaKind.AUDIO: model.audio_unsupported_reason,
        }
        if model.media is None and model.audio is None:
            return PromptMedia(support=MediaSupport(reasons=reasons))
        by_options = unsupported_by_options(args, self.pooling is not None)
        if by_options:
            return PromptMedia(support=MediaSupport(reasons=_more_reasons(model, reasons, by_options)))
        from headrace.multimodal.loader import make_loader

        try:
            files = media_files_of(args)
            loader = make_loader(resolve_model(args.model_path), self.tokenizer, limits, reasons, files)
        except ModelError as error:
            logger.warning("the model's media are not supported: %s", error.message)
            return PromptMedia(support=MediaSupport(reasons=_more_reasons(model, reasons, error.message)))
        return PromptMedia(loader)

    def served(self, ready: ReadyInfo) -> "ServedModel":
        from headrace.server.context import ServedModel

        args, model = self.args, self.config
        media = self.open_media().as_loaded(ready)
        media.close()
        encoded = model.media or model.audio
        return ServedModel(
            name=args.served_name,
            aliases=args.served_names[1:],
            context_length=ready.context_length,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            tool_template=self.tool_template,
            output_format=self.output_format(self.tool_template or self.chat_template),
            ready=ready,
            model_type=model.model_type
            if encoded is None
            else encoded.family,  # at the top of the checkpoint's config.json
            architectures=tuple(model.around.get("architectures") or model.architectures),
            sampling_defaults=sampling_defaults(args, model),
            pooling=self.pooling,
            media_support=media.support,
            reply_limit=reply_limit(args),
        )


def open_tokenizer(args: ServerArgs, *, encodes: bool = True) -> "Tokenizer":
    """The tokenizer of the model, or the one of --tokenizer-path. encodes: see `load_tokenizer`."""
    from headrace.text.tokenizers import load_tokenizer

    if args.skip_tokenizer_init:
        from headrace.frontend.tokenize import NoTokenizer

        return NoTokenizer()
    path = resolve_model(args.tokenizer_name)
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
        return load_tokenizer(resolve_model(args.tokenizer_name), text=text).encode(text)
    except ModelError:
        return []


def _more_reasons(model: "ModelConfig", reasons: "dict[MediaKind, str]", reason: str) -> "dict[MediaKind, str]":
    """The reasons with one for what the model could take."""
    if model.media is not None:
        reasons = reasons | dict.fromkeys((MediaKind.IMAGE, MediaKind.VIDEO), reason)
    return reasons if model.audio is None else reasons | {MediaKind.AUDIO: reason}


def reply_limit(args: ServerArgs) -> int:
    """Most tokens of a chat's reply whose request gives no limit; 0 = as many as fit. Small models, greedy ones most, may not end by themselves."""
    if args.default_max_tokens is not None:
        return args.default_max_tokens
    return SMALL_MODEL_REPLY_TOKENS if known_model(args.model_path) else 0
