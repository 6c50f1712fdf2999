"""Every family keeps, after an update tensor by tensor, exactly what it keeps when it is loaded from those tensors."""

import model_harness
import pytest
import torch
from model_harness import CPU, FAMILIES, MAX_POSITIONS, save_tiny, tiny_config
from safetensors.torch import save_file
from weights_harness import tensors_of

from headrace.attention.torch_native import TorchNativeAttention
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError
from headrace.execution.load_weights import load_model
from headrace.execution.update_weights import ModelWeights
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for


def load(folder, quantization="none", impl="auto"):
    checkpoint = open_checkpoint(folder)
    spec = model_class_for(checkpoint.config, impl)
    placement = Placement(CPU, torch.float32, MAX_POSITIONS, quantization)
    return checkpoint, spec, load_model(checkpoint, spec, placement)


def kept(model):
    keepers = list({id(keeper): keeper for weight in model.weights() for keeper in weight.keepers}.values())
    return [keeper.kept() for keeper in keepers]


def check_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, name


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("name", [*FAMILIES, "llama through transformers"])
def test_every_family_can_be_updated(name, quantization, tmp_path, monkeypatch):
    impl = "transformers" if name not in FAMILIES else "auto"
    for folder, seed in (("old", 1), ("new", 2)):
        monkeypatch.setattr(model_harness.randomise, "__defaults__", (seed,))
        save_tiny(tiny_config(name if name in FAMILIES else "llama"), tmp_path / folder)
    checkpoint, spec, model = load(tmp_path / "old", quantization, impl)
    _, _, fresh = load(tmp_path / "new", quantization, impl)
    before, want = kept(model), kept(fresh)
    weights = ModelWeights(model, TorchNativeAttention(), None, spec.renaming(checkpoint.config), spec.ignored, None)
    new = tensors_of(tmp_path / "new")
    switches = []
    for tensor_name, tensor in new.items():
        switches.append(weights._updated([(tensor_name, tensor)]))
        check_same(kept(model), before) if len(switches) == 1 else None
        switches[-1].install()
    check_same(kept(model), want)
    with pytest.raises(ModelError):
        weights._updated([(tensor_name, tensor[:0])])


def test_a_scale_that_rounds_to_a_power_of_two_is_packed_the_same_again(tmp_path):
    """What is not replaced is packed again with what is; the factor of a row must not depend on how often."""
    save_tiny(tiny_config("llama"), tmp_path)
    tensors = tensors_of(tmp_path)
    gate = "model.layers.0.mlp.gate_proj.weight"
    tensors[gate][0] = 0.0
    tensors[gate][0, :16] = torch.linspace(-1.0, 1.0, 16) * (1.0 - 2.0**-13)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, spec, model = load(tmp_path, "int4")
    want = kept(model)
    weights = ModelWeights(model, TorchNativeAttention(), None, lambda name: name, spec.ignored, None)
    for name in (gate, gate.replace("gate", "up")):
        weights._updated([(name, tensors[name])]).install()
        check_same(kept(model), want)


def test_experts_are_packed_again(tmp_path):
    save_tiny(tiny_config("mixtral"), tmp_path / "old")
    _, spec, model = load(tmp_path / "old")
    weights = ModelWeights(model, TorchNativeAttention(), None, lambda name: name, spec.ignored, None)
    moe = model._blocks[0]._mlp
    x = torch.ones(2, 48)
    before = moe(x)
    tensors = tensors_of(tmp_path / "old")
    experts = [(name, tensor * 2) for name, tensor in tensors.items() if ".experts." in name]
    weights._updated(experts).install()
    assert not torch.equal(moe(x), before)
