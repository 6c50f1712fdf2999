"""What a test compares every implementation of the kernels with is computed once, for the first of them."""

from collections.abc import Callable, Hashable
from functools import wraps

import torch


def remembered(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The results of `function`, which changes nothing, by the contents of its arguments."""
    results: dict[Hashable, torch.Tensor] = {}

    @wraps(function)
    def result(*arguments: object, **named: object) -> torch.Tensor:
        key = (tuple(map(_contents, arguments)), tuple((name, _contents(value)) for name, value in named.items()))
        if key not in results:
            results[key] = function(*arguments, **named)
        return results[key]

    return result


def _contents(value: object) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return value
    # The sums tell the order, too, which the hash does not.
    flat = value.reshape(-1)
    return value.shape, value.dtype, torch.hash_tensor(flat).item(), flat[::3].double().sum().item()
