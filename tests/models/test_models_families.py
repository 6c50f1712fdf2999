"""Every family of ours: its logits are transformers' logits, and a row's bits depend on nothing but its own sequence."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from model_harness import BACKENDS, FAMILIES, Runner, open_runner, random_tokens, save_tiny, tiny_config

from headrace.checkpoint.families import all_families
from headrace.models.registry import native_specs

# float32 on both sides, sums in another order: differences of 1e-5 at logits of order 5.
TOLERANCE = 2e-4
PROMPT = random_tokens(70, seed=1)
OTHERS = [random_tokens(37, seed=2), random_tokens(5, seed=3)]

families = pytest.mark.parametrize("family", FAMILIES)
backends = pytest.mark.parametrize("backend", BACKENDS)


@functools.cache
def reference(family: str) -> tuple[Path, torch.Tensor, tempfile.TemporaryDirectory]:
    """A checkpoint and transformers' logits of PROMPT."""
    folder = tempfile.TemporaryDirectory()
    model = save_tiny(tiny_config(family), Path(folder.name))
    with torch.inference_mode():
        return Path(folder.name), model(torch.tensor([PROMPT])).logits[0], folder


@functools.cache
def runner(family: str, backend: str) -> Runner:
    return open_runner(reference(family)[0], backend)


@functools.cache
def whole(family: str, backend: str) -> torch.Tensor:
    return runner(family, backend).chunks(0, PROMPT, [])


def test_every_registered_model_type_has_a_tiny_model():
    of_itself = {model_type for model_type in native_specs() if not all_families().decoders[model_type].is_inner}
    assert of_itself == {model_type for model_type, _ in FAMILIES.values()}  # the others: test_models_vision.py


@families
@backends
def test_prefill_gives_the_logits_of_transformers(family: str, backend: str):
    torch.testing.assert_close(whole(family, backend), reference(family)[1], atol=TOLERANCE, rtol=TOLERANCE)


@families
@backends
def test_chunks_give_the_bits_of_a_whole_prefill(family: str, backend: str):
    chunked = runner(family, backend).chunks(1, PROMPT, [7, 16, 1, 30])

    assert torch.equal(chunked, whole(family, backend))


@families
@backends
def test_decode_gives_the_bits_of_prefill(family: str, backend: str):
    decoded = runner(family, backend).chunks(1, PROMPT, [60] + [1] * 10)

    assert torch.equal(decoded, whole(family, backend))


@families
@backends
def test_a_batch_gives_the_bits_of_each_sequence_alone(family: str, backend: str):
    model = runner(family, backend)
    model.step([(1, 0, OTHERS[0])])
    alone = [model.chunks(3, other, []) for other in OTHERS]

    rows = model.step([(2, 0, OTHERS[1]), (1, 36, OTHERS[0][36:]), (3, 0, PROMPT)])

    assert torch.equal(rows[0], alone[1])
    assert torch.equal(rows[1], alone[0][36:])
    assert torch.equal(rows[2], whole(family, backend))


@backends
def test_bfloat16_weights_and_cache_keep_the_order_of_clear_winners(backend: str):
    bits16 = open_runner(reference("llama")[0], backend, torch.bfloat16).chunks(0, PROMPT, [])
    want = reference("llama")[1]

    # 8 bits of mantissa through three layers: 5 % of the logits' spread.
    assert (bits16 - want).abs().max() < 0.05 * (want.max() - want.min())


@families
def test_weights_can_be_read_back_under_their_hugging_face_names(family: str):
    from headrace.checkpoint.source import open_checkpoint

    stored = dict(open_checkpoint(reference(family)[0]).iter_tensors())
    read = {weight.name: weight.read() for weight in runner(family, BACKENDS[-1]).model.weights()}

    assert read.keys() == stored.keys() - ({"lm_head.weight"} if "tied" in family else set())
    for name, tensor in read.items():
        assert torch.equal(tensor.float(), stored[name].float()), name
