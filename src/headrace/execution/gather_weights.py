"""Whole weights from the parts of all ranks: each follower writes its parts to a file, and the leader puts them together.

Owns the files' form: safetensors, with the place of each part in the metadata. Runs in the threads of weight operations, beside the steps.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.errors import ExecutionError
from headrace.execution.update_weights import tensor_in_file
from headrace.layers.weight import Weight
from headrace.messages.safetensors_bytes import safetensors_parts


def write_parts(weights: Iterable[Weight], file: Path) -> None:
    """Write what this rank keeps of these weights. Raises ExecutionError if there is no room."""
    here = [weight for weight in weights if not weight.is_elsewhere]
    parts = [(weight.name, weight.read().detach().cpu().contiguous()) for weight in here]
    places = {weight.name: json.dumps([[part.start, part.stop] for part in weight.own]) for weight in here}
    try:
        with file.open("xb") as out:
            for data in safetensors_parts(parts, places):
                out.write(data)
    except OSError as error:
        raise ExecutionError(f"a rank could not write its part of the weights: {error.strerror}") from error


def read_whole(weight: Weight, files: Sequence[SafetensorsFile]) -> torch.Tensor:
    """A weight, whole. weight: the leader's part of it; files: of the followers."""
    own = weight.read().detach().cpu()
    if weight.own_shape == weight.shape:
        return own
    parts = [] if weight.is_elsewhere else [(weight.own, own)]
    for file in files:
        if weight.name in file.entries:
            place = tuple(slice(start, stop) for start, stop in json.loads(file.metadata[weight.name]))
            parts.append((place, tensor_in_file(file, file.entries[weight.name])))
    whole = torch.empty(weight.shape, dtype=parts[0][1].dtype)
    for place, part in parts:
        whole[place] = part
    return whole
