"""Matrices in the blocks of GGUF files: the bits of the file, products as float64 gives them, the same bits whatever is computed beside a row."""

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.checkpoint.gguf import BLOCK_TYPES, dequantize
from headrace.checkpoint.quantized_matrix import BlockMatrix
from headrace.kernels import cpu
from headrace.kernels.gguf_packing import ENTRY_BYTES, stored_parts, stored_rows

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "MXFP4": [], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0],
}  # fmt: skip
"""Types, and where a block has its float16 scales."""
TYPES = {block.name: block for block in BLOCK_TYPES.values()}
ISAS = [isa for isa in cpu.load().known_isas() if not cpu.load().why_not_isa(isa)]
FUSED = [isa for isa in ISAS if isa != "baseline"]
"""Those that have a fused multiply-add, whose bits are equal."""


@pytest.fixture(params=ISAS)
def isa(request):
    native, before = cpu.load(), cpu.load().isa()
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)


def matrix(name: str, n: int, k: int, seed: int = 0) -> BlockMatrix:
    """Any bits but for the scales, which are small numbers."""
    rng, kind = np.random.default_rng(seed), TYPES[name]
    num_blocks = k // kind.block_values
    blocks = rng.integers(0, 256, (n, num_blocks, kind.block_bytes), dtype=np.uint8)
    for at in SCALES[name]:
        halves = (rng.standard_normal((n, num_blocks, 1)) * 0.01).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = rng.integers(118, 126, (n, num_blocks))
    return BlockMatrix(kind, torch.from_numpy(blocks.reshape(n, -1)))


def inputs(rows: int, k: int) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))


def product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float64, of x rounded as the kernels round it."""
    values, scales = kernels.quantize_rows(x, group=32)
    return (values.double() * scales.double().repeat_interleave(32, dim=1)) @ weights.double().T


@pytest.mark.parametrize("name", SCALES)
def test_the_bits_of_the_file_are_kept(name):
    n, k = 80, 512
    packed = kernels.pack_blocks([matrix(name, n, k)], None)

    [stored] = stored_parts(packed)
    assert (stored.shape, stored.type) == ((n, k), TYPES[name])
    assert torch.equal(stored.blocks, matrix(name, n, k).blocks)
    assert torch.equal(kernels.unpack_linear(packed), torch.from_numpy(dequantize(stored.blocks.numpy(), name)))
    assert packed.data.nbytes <= 1.02 * matrix(name, 96, k).blocks.nbytes  # rows are padded to 96


def test_a_matrix_of_several_huge_pages_keeps_its_bits():
    weights = matrix("Q5_0", 2080, 4096)
    packed = kernels.pack_blocks([weights], None)

    assert packed.data.nbytes > 2 << 21
    [stored] = stored_parts(packed)
    assert torch.equal(stored.blocks, weights.blocks)


@pytest.mark.parametrize("name", SCALES)
def test_products_are_those_of_float64_and_a_row_has_its_bits_in_any_company(name, isa):
    n, k = 80, 768
    weights = matrix(name, n, k)
    packed = kernels.pack_blocks([weights], inputs(1, n)[0])
    x = inputs(19, k)

    y = kernels.linear(x, packed)

    want = product(x, weights.dequantize()) + inputs(1, n)[0]
    assert float((y - want).abs().max() / want.abs().max()) < 2e-6
    for rows in (1, 2, 5, 7):
        assert torch.equal(torch.cat([kernels.linear(some, packed) for some in x.split(rows)]), y), rows


@pytest.mark.parametrize("name", SCALES)
def test_products_of_the_largest_codes_are_those_of_float64(name, isa):
    weights = matrix(name, 32, 256)
    blocks, scales = weights.blocks.numpy().reshape(32, -1, weights.type.block_bytes), SCALES[name]
    kept = [at + byte for at in scales for byte in (0, 1)] if scales else [0]
    blocks[:, :, [at for at in range(weights.type.block_bytes) if at not in kept]] = 0x77 if name == "MXFP4" else 0xFF
    x = torch.ones(5, 256)
    x[1::2] = -1.0  # values of -127

    y = kernels.linear(x, kernels.pack_blocks([weights], None))

    want = product(x, weights.dequantize())
    assert float((y - want).abs().max() / want.abs().max()) < 2e-6


@pytest.mark.parametrize("name", SCALES)
def test_all_instruction_sets_that_fuse_give_the_same_bits(name):
    packed, x, found = kernels.pack_blocks([matrix(name, 64, 512)], None), inputs(9, 512), []
    native, before = cpu.load(), cpu.load().isa()
    for one in FUSED:
        native.select_isa(one)
        found.append(kernels.linear(x, packed))
    native.select_isa(before)

    assert all(torch.equal(other, found[0]) for other in found)


def test_an_encoder_rounds_attention_as_it_does_beside_other_weights_of_8_bits():
    packed = kernels.pack_blocks([matrix("Q4_K", 96, 256)], None)

    assert kernels.rounds_attention(packed) == cpu.multiplies_bf16()


def test_parts_of_several_types_are_one_product_and_come_back_as_they_were():
    parts = [
        matrix("Q4_K", 64, 256, 1),
        matrix("Q6_K", 32, 256, 2),
        matrix("Q4_K", 32, 256, 3),
        matrix("Q5_0", 40, 256, 4),
    ]
    packed, x = kernels.pack_blocks(parts, None), inputs(3, 256)

    apart = [kernels.linear(x, kernels.pack_blocks([part], None)) for part in parts]
    assert torch.equal(kernels.linear(x, packed), torch.cat(apart, dim=1))
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        stored = stored_rows(packed, slice(begin, end))
        assert stored.type == part.type
        assert torch.equal(stored.blocks, part.blocks)
        begin = end
    with pytest.raises(ValueError, match="have several types"):
        stored_rows(packed, slice(32, 96))


def test_every_byte_is_that_of_the_matrix(monkeypatch):
    """Whatever the memory had before: KV is found by a hash of these bytes."""

    def over(value):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda size, **about: torch.full((size,), value, **about))
            return kernels.pack_blocks([matrix("Q4_K", 64, 256, 1), matrix("Q6_K", 40, 256, 2)], None).data

    assert torch.equal(over(0), over(255))


def test_rows_of_one_part_are_unpacked_alone():
    """The table has no places of the other parts."""
    parts = [matrix("Q4_K", 64, 256, 1), matrix("Q6_K", 40, 256, 2)]
    packed = kernels.pack_blocks(parts, None)
    packed.data[: 2 * ENTRY_BYTES] = 0

    assert torch.equal(stored_rows(packed, slice(64, 104)).blocks, parts[1].blocks)


@pytest.mark.parametrize("name", SCALES)
def test_rows_are_looked_up_as_they_are_dequantised(name):
    table = matrix(name, 100, 512)
    packed = kernels.pack_blocks([table], None)
    ids = torch.tensor([0, 99, 31, 32, 64, 5])

    assert torch.equal(kernels.embedding(ids, packed), table.dequantize()[ids])
    assert torch.equal(kernels.embedding(ids, packed, 2.5), table.dequantize()[ids] * 2.5)
    with pytest.raises(ValueError, match="100"):
        kernels.embedding(torch.tensor([100]), packed)


def test_torch_computes_the_same_from_floats():
    weights, x = matrix("Q5_K", 48, 512), inputs(4, 512)
    with kernels.prefer("torch"):
        packed = kernels.pack_blocks([weights], None)
        y = kernels.linear(x, packed)
        looked_up = kernels.embedding(torch.tensor([3]), packed)

    assert packed.layout == "torch_int8"
    assert torch.allclose(y, product(x, weights.dequantize()).float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(looked_up, weights.dequantize()[3:4])


def test_parts_that_do_not_fill_blocks_are_refused():
    with pytest.raises(ValueError, match="do not make one matrix"):
        kernels.pack_blocks([matrix("Q8_0", 48, 64), matrix("Q8_0", 32, 64)], None)
    with pytest.raises(ValueError, match="do not make one matrix"):
        kernels.pack_blocks([matrix("Q8_0", 32, 64), matrix("Q8_0", 32, 96)], None)


def test_scales_of_mxfp4_at_the_ends_of_the_range():
    weights = matrix("MXFP4", 32, 32)
    weights.blocks[:, 0] = torch.arange(32, dtype=torch.uint8) * 8
    packed = kernels.pack_blocks([weights], None)

    want = weights.dequantize()
    assert torch.equal(kernels.embedding(torch.arange(32), packed), want)
    one = torch.zeros(1, 32)
    one[0, 7] = 127.0
    assert torch.equal(kernels.linear(one, packed)[0], want[:, 7] * 127.0)
