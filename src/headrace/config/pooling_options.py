"""Options of models that make vectors: what they cannot be combined with, and what an encoder sets itself."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.server_args import ServerArgs

ENCODER_STEP_TOKENS = 2048
"""Tokens of a step of an encoder, if its longest text is shorter: more are hardly faster per token, and others wait for the step."""

ENCODER_RUNNING = 256
"""Default of --max-running-requests for an encoder: most texts are short, and two steps are prepared at a time."""

_NOT_OF_ENCODERS = {
    "lora_paths": "encoders take no adapters",
    "enable_torch_compile": "its layers are one native call, or not compiled",
    "max_total_tokens": "an encoder has no KV cache",
    "kv_cache_dtype": "an encoder has no KV cache",
    "kv_events_config": "an encoder has no KV cache",
    "cuda_graph_bs": "an encoder has no decode steps",
    "cuda_graph_max_bs": "an encoder has no decode steps",
}
"""Options that an encoder has no use for, and why."""


def check_pooling(args: "ServerArgs", is_encoder: bool) -> None:
    """Raises ConfigError for an option of the user's that a model without outputs has no use for."""
    if is_encoder:
        default: dict[str, Any] = {field.name: field.default for field in fields(args)}
        for name, why in _NOT_OF_ENCODERS.items():
            if getattr(args, name) != default[name]:
                raise ConfigError(f"--{name.replace('_', '-')}: {why}; leave the option out")
    if args.speculative_algorithm != "off":
        raise ConfigError(
            f"--speculative-algorithm {args.speculative_algorithm}: this model makes vectors, and has no tokens to guess; leave the option out"
        )
    if args.model_impl == "transformers":
        raise ConfigError("--model-impl transformers is for models that generate; leave the option out")
    if args.num_ranks > 1 or args.num_nodes > 1:
        raise ConfigError(
            "--tp-size, --pp-size and --nnodes are for models that generate; to use more cores or GPUs for this one, start replicas with --dp-size"
        )


def encoder_args(args: "ServerArgs", context_length: int) -> "ServerArgs":
    """The options with which an encoder is served: its texts are computed whole, there is no KV to cache, and no text to make of tokens.

    context_length: of the model. Raises ConfigError for options that cut texts.
    """
    longest = min(args.context_length or context_length, context_length)
    given = args.chunked_prefill_size
    if given is not None and 0 < given < longest:
        raise ConfigError(
            f"--chunked-prefill-size {given}: each token of this model sees all others, so a text of up to {longest} tokens is computed in one "
            "step; raise it, or lower --context-length"
        )
    step_tokens = max(given or 0, ENCODER_STEP_TOKENS, longest)
    return replace(
        args,
        chunked_prefill_size=step_tokens,
        max_prefill_tokens=max(args.max_prefill_tokens, step_tokens),
        max_running_requests=args.max_running_requests or ENCODER_RUNNING,
        disable_radix_cache=True,
        detokenize_in="main",
    )
