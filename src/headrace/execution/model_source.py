"""The model that the options name: where it lies, and what is opened of it. No other module reads --mmproj, --load-format and
--json-model-override-args, or asks whether a model is a GGUF file.

Reads headers alone: torch is imported with the first tensor. Runs in every process.
"""

from dataclasses import replace
from typing import Any

import msgspec

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.copies import own_mmproj
from headrace.checkpoint.gguf import gguf_file
from headrace.checkpoint.gguf_mmproj import AUTO, media_files
from headrace.checkpoint.model_config import ModelConfig, load_model_config, parse_hf_config
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.pooling import PoolingConfig, read_pooling
from headrace.checkpoint.projector import MediaFiles
from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.checkpoint.source import dummy_checkpoint, open_checkpoint
from headrace.config.checks import check_pooling, encoder_args
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ModelError
from headrace.messages.weights import UpdateFromDisk
from headrace.plain_types import plain_reason


def is_gguf_model(args: ServerArgs) -> bool:
    return gguf_file(resolve_model(args.model_path)) is not None


def open_model(args: ServerArgs) -> Checkpoint:
    """The checkpoint. Raises ModelError, including when its kind does not match --load-format."""
    path = resolve_model(args.model_path)
    mmproj = own_mmproj(path, args.mmproj) if args.names_mmproj else args.mmproj
    if args.load_format == "dummy":
        return dummy_checkpoint(path, mmproj)
    checkpoint = open_checkpoint(path, mmproj)
    wanted = {"auto": checkpoint.kind, "safetensors": "huggingface", "sharded_state": "huggingface", "gguf": "gguf"}[
        args.load_format
    ]
    if checkpoint.kind != wanted:
        raise ModelError(f"--load-format {args.load_format}: {path.name} is a {checkpoint.kind} checkpoint")
    return checkpoint


def args_of_update(args: ServerArgs, update: UpdateFromDisk) -> ServerArgs:
    """The options with another checkpoint of the model. A folder has its vision encoder in it, whatever file --mmproj names."""
    other = replace(args, model_path=update.model_path, load_format=update.load_format)
    try:
        return other if is_gguf_model(other) else replace(other, mmproj=AUTO)
    except ModelError:
        return other  # which whoever opens it will be told


def read_model_config(args: ServerArgs) -> ModelConfig:
    """What the checkpoint says of itself, with the user's overrides; of a folder, config.json alone is read."""
    needs_checkpoint = is_gguf_model(args) or args.names_mmproj
    config = open_model(args).config if needs_checkpoint else load_model_config(resolve_model(args.model_path))
    return override_model(config, args.json_model_override_args)


def read_pooling_config(args: ServerArgs, model: ModelConfig) -> PoolingConfig | None:
    """What the model makes of a text instead of more text; None = it generates. Raises ModelError, and ConfigError for options that do not fit."""
    pooling = read_pooling(resolve_model(args.model_path), model, args.is_embedding)
    if pooling is not None:
        check_pooling(args, is_encoder=model.encoder is not None)
        if args.context_length is not None:
            pooling = msgspec.structs.replace(pooling, max_tokens=args.context_length)
    return pooling


def media_files_of(args: ServerArgs) -> MediaFiles | None:
    """Of a GGUF file with a vision encoder in another one; else None. Raises ModelError."""
    file = gguf_file(resolve_model(args.model_path))
    return None if file is None else media_files(file, args.mmproj)


def with_encoder(args: ServerArgs) -> ServerArgs:
    """The options with those that an encoder sets itself, if the model is one; reads no GGUF file, which takes longer."""
    if is_gguf_model(args):
        return args
    model = read_model_config(args)
    if model.encoder is None:
        return args
    check_pooling(args, is_encoder=True)  # the user's options, before any is changed
    return encoder_args(args, model.max_position_embeddings)


def override_model(model: ModelConfig, overrides: str) -> ModelConfig:
    """`model` with a JSON object (--json-model-override-args) merged into its config.json.

    Raises ConfigError when `overrides` is no JSON object, and ModelError when the result is no model.
    """
    try:
        changes = msgspec.json.decode(overrides.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"--json-model-override-args is not a JSON object: {plain_reason(error)}") from error
    if not changes:
        return model
    changed = parse_hf_config(model.raw | changes, origin="config.json with --json-model-override-args")
    eos = changed.eos_token_ids if "eos_token_id" in changes else model.eos_token_ids
    return msgspec.structs.replace(
        changed,
        eos_token_ids=eos,
        sampling_defaults=model.sampling_defaults,
        media=model.media,
        vision_unsupported_reason=model.vision_unsupported_reason,
        audio=model.audio,
        audio_unsupported_reason=model.audio_unsupported_reason,
        around=model.around,
        quantization=changed.quantization or model.quantization,
    )


def sampling_defaults(args: ServerArgs, model: ModelConfig) -> SamplingDefaults:
    """Sampling parameters of requests that set none: the model's own, or OpenAI's with --sampling-defaults openai."""
    plain = SamplingDefaults(origin="--sampling-defaults openai")
    return plain if args.sampling_defaults == "openai" else model.sampling_defaults
