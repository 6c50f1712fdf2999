"""How tensors of published checkpoints are named, and stacked, in the models of transformers: its own renamings, a base model's prefix that is left
out or added, and the stacks of experts, of which checkpoints store one matrix an expert. Runs in the thread that loads the model.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from headrace.errors import ModelError
from headrace.layers.weight import Kept, Parts, Weight


@dataclass(frozen=True, slots=True)
class Stacking:
    """A rule of transformers: matrices of single experts make one parameter [experts, rows, columns].

    target: what the parameter's name contains. sources: what the matrices' names contain in its place, `*` for the number of the expert,
    in the order in which their rows lie in the parameter.
    """

    target: str
    sources: tuple[str, ...]

    def names(self, parameter: str, num_experts: int) -> Iterator[tuple[int, int, str]]:
        for expert in range(num_experts):
            for number, source in enumerate(self.sources):
                yield expert, number, parameter.replace(self.target, source.replace("*", str(expert)), 1)


@dataclass(frozen=True, slots=True)
class Names:
    """Of one model: its rules, and the names that its weights have here. prefix: of the base model, with a dot."""

    stackings: tuple[Stacking, ...]
    renamings: tuple[Any, ...]
    prefix: str
    known: frozenset[str]

    def rename(self, name: str) -> str:
        """The model's name of a checkpoint's tensor; the checkpoint's where the model has none."""
        renamed = name
        for rule in self.renamings:
            renamed = rule.rename_source_key(renamed)[0]
        inner = renamed.replace("language_model.", "", 1)  # the text part of a multimodal model, too
        found = (renamed, self.prefix + renamed, renamed.removeprefix(self.prefix), name, inner)
        return next((candidate for candidate in found if candidate in self.known), renamed)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of a model's own tensors, a `Keeper`."""

    tensor: torch.Tensor

    def kept(self) -> Kept:
        return {"values": self.tensor.data}

    def restore(self, kept: Kept) -> None:
        self.tensor.data = cast(torch.Tensor, kept["values"])

    def staged(self, parts: Parts) -> Kept:
        (given,) = parts.values()
        assert isinstance(given, torch.Tensor), "a quantised parameter"
        return {"values": given.to(device=self.tensor.device, dtype=self.tensor.dtype, copy=True)}


@dataclass(frozen=True, slots=True)
class ExpertStack(Parameter):
    """A parameter [experts, rows, columns] as the matrices of its experts."""

    name: str
    rule: Stacking

    def weights(self) -> Iterator[Weight]:
        """One a matrix, so that no more than one of them is read at a time."""
        for expert, number, name in self.rule.names(self.name, self.tensor.shape[0]):
            part = f"{expert}.{number}"
            yield Weight(
                name,
                tuple(_slice(self.tensor, part, self.rule).shape),
                functools.partial(self._load, part),
                functools.partial(self._read, part),
                itemsize=self.tensor.element_size(),
                keepers=(self,),
                part=part,
            )

    def staged(self, parts: Parts) -> Kept:
        values = self.tensor.data.clone()
        for part, given in parts.items():
            assert isinstance(given, torch.Tensor), "a quantised expert"
            _slice(values, part, self.rule).copy_(given)
        return {"values": values}

    def _load(self, part: str, given: torch.Tensor) -> None:
        _slice(self.tensor.data, part, self.rule).copy_(given)

    def _read(self, part: str) -> torch.Tensor:
        return _slice(self.tensor.data, part, self.rule)


def _slice(tensor: torch.Tensor, part: str, rule: Stacking) -> torch.Tensor:
    expert, number = map(int, part.split("."))
    return tensor[expert].chunk(len(rule.sources), dim=0)[number]


def stacking_of(name: str, tensor: torch.Tensor, rules: tuple[Stacking, ...]) -> Stacking | None:
    """The rule by which checkpoints store the parameter `name`; None where they store it as it is."""
    if tensor.ndim != 3:
        return None
    return next((rule for rule in rules if rule.target in name), None)


def read_names(model: Any) -> Names:
    """Of a transformers model, which may be on the meta device. Raises ModelError for a conversion that is not done here."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(model)
    parameters = model.state_dict(keep_vars=True)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    stackings = tuple(
        _stacking(rule, model.config.model_type)
        for rule in converters
        if any(target in name for target in rule.target_patterns for name in parameters)
    )
    known = []
    for name, tensor in parameters.items():
        rule = stacking_of(name, tensor, stackings)
        known += [name] if rule is None else [part for _, _, part in rule.names(name, tensor.shape[0])]
    renamings = tuple(rule for rule in rules if isinstance(rule, WeightRenaming))
    return Names(stackings, renamings, f"{model.base_model_prefix}.", frozenset(known))


def _stacking(converter: Any, model_type: str) -> Stacking:
    """The two forms that mixtures have: the experts' matrices one after the other, and two of an expert, rows below rows."""
    steps = [(type(step).__name__, vars(step).get("dim")) for step in converter.operations]
    sources, targets = converter.source_patterns, converter.target_patterns
    form = [("MergeModulelist", 0), ("Concatenate", 1)][: len(steps)]
    if steps != form or len(targets) != 1 or (len(sources) > 1) != (len(steps) > 1):
        done = ", ".join(name for name, _ in steps)
        raise ModelError(
            f"model type {model_type} cannot be served: {targets[0]} is made from stored tensors in a way that is not supported ({done})"
        )
    return Stacking(targets[0], tuple(source.replace("\\.", ".") for source in sources))
