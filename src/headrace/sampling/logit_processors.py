"""Custom logit processors: code of the operator, registered by name at start and selected by name in a request.

Owns the protocol, loading, and the check of a processor's result. Clients send a name, never code. A processor runs in the
worker's thread, once per sampled token of the requests that name it, before anything else edits the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import ConfigError, ExecutionError


@dataclass(frozen=True, slots=True)
class LogitContext:
    """The sequence whose logits a processor gets.

    prompt_ids: int32[num_prompt_tokens]. output_ids: int32[num_outputs]. Read-only, valid during the call.
    """

    rid: str
    prompt_ids: npt.NDArray[np.int32]
    output_ids: npt.NDArray[np.int32]


LogitProcessor = Callable[[LogitContext, torch.Tensor], torch.Tensor]
"""(context, logits float32[V], the processor's own copy) -> float32[V] on the same device."""


def load_processors(spec: str) -> dict[str, LogitProcessor]:
    """Processors by name from "name=module:callable,...".

    Imports the modules. Raises ConfigError for an entry that is malformed, duplicate, or cannot be imported.
    """
    processors: dict[str, LogitProcessor] = {}
    for entry in filter(None, (part.strip() for part in spec.split(","))):
        name, equals, target = (part.strip() for part in entry.partition("="))
        module_name, colon, attribute = (part.strip() for part in target.partition(":"))
        if not (name and equals and module_name and colon and attribute):
            raise ConfigError(f"custom_logit_processors: {entry!r} is not name=module:callable")
        if name in processors:
            raise ConfigError(f"custom_logit_processors: {name!r} appears twice")
        processors[name] = _import_processor(name, module_name, attribute)
    return processors


def run_processor(name: str, processor: LogitProcessor, context: LogitContext, logits: torch.Tensor) -> torch.Tensor:
    """Run a processor on `logits` float32[V] and return its result.

    Raises ExecutionError if that is not float32[V] on the same device; exceptions of the processor pass through.
    """
    result = processor(context, logits)
    if not isinstance(result, torch.Tensor):
        raise ExecutionError(f"the custom logit processor {name!r} did not return a tensor")
    if result.shape != logits.shape or result.dtype != logits.dtype or result.device != logits.device:
        raise ExecutionError(
            f"the custom logit processor {name!r} returned {result.dtype} {list(result.shape)} on {result.device}, "
            f"not {logits.dtype} {list(logits.shape)} on {logits.device}"
        )
    return result.detach()


def _import_processor(name: str, module_name: str, attribute: str) -> LogitProcessor:
    target = f"{module_name}:{attribute}"
    try:
        found: object = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # an operator's module may raise anything while it is imported
        raise ConfigError(
            f"custom_logit_processors: {name!r}: cannot import {target}: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"custom_logit_processors: {name!r}: {target} is not callable")
    return found
