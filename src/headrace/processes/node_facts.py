"""What must be the same on all hosts of --nnodes: the version, the options that change what is computed, and the model's files."""

import dataclasses
import sys

from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.weight_cache import content_of, files_fingerprint
from headrace.config.server_args import ServerArgs
from headrace.errors import ModelError
from headrace.version import VERSION

_GROUPS = frozenset({"Model", "Adapters", "Memory and schedule", "Kernels"})
_OF_EACH_HOST = frozenset({
    "model_path", "tokenizer_path", "served_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "sampling_defaults",
    "disable_weight_cache", "lora_paths", "num_threads", "numa_bind", "mem_fraction_static", "skip_tokenizer_init",
})  # fmt: skip
"""Paths, shares of a machine, and what only node 0 reads."""
_OF_ALL = ("tp_size", "ep_size", "pp_size", "nnodes", "rank_timeout_s")


def node_facts(args: ServerArgs) -> dict[str, str]:
    """By the name that people know it by. Raises ModelError if the model cannot be read."""
    options = [
        field.name
        for field in dataclasses.fields(args)
        if field.name in _OF_ALL or (field.metadata["group"] in _GROUPS and field.name not in _OF_EACH_HOST)
    ]
    return {
        "the version of Headrace": VERSION,
        "the byte order": sys.byteorder,
        **{f"--{name.replace('_', '-')}": str(getattr(args, name)) for name in options},
        "the model (a hash of its files)": _model(args),
    }


def _model(args: ServerArgs) -> str:
    """Of its weights and its config, or of the config alone if the weights are random."""
    from headrace.checkpoint.source import dummy_checkpoint, open_checkpoint

    path = resolve_model(args.model_path)
    is_random = args.load_format == "dummy"
    checkpoint = dummy_checkpoint(path) if is_random else open_checkpoint(path)
    try:
        files = () if is_random else checkpoint.files()
        return content_of(files_fingerprint(files, {"config": checkpoint.config.as_file()}))
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    finally:
        checkpoint.release()
