"""Loading the operator's logit processors."""

import sys
from types import ModuleType

import pytest
import torch

from headrace.errors import ConfigError
from headrace.sampling.logit_processors import load_processors


@pytest.fixture
def module(monkeypatch):
    module = ModuleType("processors_of_this_test")
    module.double = lambda context, logits: logits * 2
    module.number = 3
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_processors_are_loaded_by_name(module):
    loaded = load_processors(f" a = {module.__name__}:double, b={module.__name__}:double ,")
    assert list(loaded) == ["a", "b"]
    assert loaded["a"](None, torch.ones(2)).tolist() == [2.0, 2.0]
    assert load_processors("") == {}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a", "is not name=module:callable"),
        ("a=", "is not name=module:callable"),
        ("a=module", "is not name=module:callable"),
        ("=m:f", "is not name=module:callable"),
        ("a=no_such_module_here:f", "cannot import"),
        ("a=processors_of_this_test:absent", "cannot import"),
        ("a=processors_of_this_test:number", "is not callable"),
        ("a=processors_of_this_test:double,a=processors_of_this_test:double", "twice"),
    ],
)
def test_a_bad_entry_is_refused_with_its_reason(module, spec, message):
    with pytest.raises(ConfigError, match=message):
        load_processors(spec)
