"""The native call for all layers over two ranks, here threads: each has half of the heads and of the intermediate size."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rank_harness import LIMIT_S, new_group

from headrace.distributed.one_host import SharedMemoryGroup
from headrace.errors import ExecutionError
from headrace.kernels import DecoderLayerSpec, DecoderSpec, FusedDecoder, cpu, kv_cache_shapes, pack_linear

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM, NUM_LAYERS = 48, 96, 8, 2, 16, 3
NUM_TOKENS = 21
# float32 sums of at most some hundred terms of order 1, in another order.
TOLERANCE = 1e-5


def layers():
    """Matrices and norms of each layer: q, k, v, o, gate, up, down, and four norms."""
    generator = torch.Generator().manual_seed(1)

    def matrix(n, k):
        return torch.randn(n, k, generator=generator) / k**0.5

    q_size, kv_size = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for _ in range(NUM_LAYERS):
        matrices = [matrix(q_size, HIDDEN), matrix(kv_size, HIDDEN), matrix(kv_size, HIDDEN), matrix(HIDDEN, q_size)]
        matrices += [matrix(INTERMEDIATE, HIDDEN), matrix(INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE)]
        yield matrices, [1 + 0.2 * torch.randn(HIDDEN, generator=generator) for _ in range(4)]


def decoder(rank, size, group=None, **options):
    """A rank's decoder, and what it is called with: three steps of a sequence each."""
    angles = torch.arange(64).float()[:, None] / 100 ** torch.linspace(0, 1, HEAD_DIM // 2)

    def rows(x):
        return x.chunk(size)[rank]

    def columns(x):
        return x.chunk(size, dim=1)[rank]

    specs = [
        DecoderLayerSpec(
            attention_norm=norms[0],
            qkv=pack_linear(torch.cat([rows(q), rows(k), rows(v)])),
            head_norms=None,
            cos=angles.cos(),
            sin=angles.sin(),
            scale=HEAD_DIM**-0.5,
            window=0,
            softcap=0.0,
            out=pack_linear(columns(o)),
            after_attention=norms[1],
            mlp_norm=norms[2],
            gate_up=pack_linear(torch.cat([rows(gate), rows(up)])),
            activation="silu",
            down=pack_linear(columns(down)),
            after_mlp=norms[3],
        )
        for (q, k, v, o, gate, up, down), norms in layers()
    ]
    spec = DecoderSpec(tuple(specs), torch.ones(HIDDEN), 1e-5, Q_HEADS // size, KV_HEADS // size, HEAD_DIM)
    shapes = kv_cache_shapes(4, spec.num_kv_heads, HEAD_DIM, torch.float32)
    caches = [[torch.zeros(shape) for _ in specs] for shape in shapes]
    return FusedDecoder(spec, *caches, group=group, **options)


def run(fused):
    """Hidden states of a prompt, of it without anything read, and of a token after it; and the seconds of each phase."""

    def int32(*values):
        return torch.tensor(values, dtype=torch.int32)

    hidden = torch.randn(NUM_TOKENS + 1, HIDDEN, generator=torch.Generator().manual_seed(2))
    pages = int32([2, 0])
    prompt = range(NUM_TOKENS)
    slots = [pages[0, i // 16].item() * 16 + i % 16 for i in range(NUM_TOKENS + 1)]
    whole = (int32(*prompt), int32(*slots[:-1]), pages, int32(NUM_TOKENS), int32(0, NUM_TOKENS))
    first = fused(hidden[:-1].clone(), *whole)
    nothing = fused(hidden[:-1].clone(), *whole, int32(0, 0))
    last = (int32(NUM_TOKENS), int32(slots[-1]), pages, int32(NUM_TOKENS + 1), int32(0, 1))
    assert nothing.shape == (0, HIDDEN)
    return torch.cat([first, fused(hidden[-1:].clone(), *last)]), fused.phase_seconds()


def test_two_ranks_have_the_hidden_states_of_one():
    want, alone = run(decoder(0, 1))
    with new_group(2) as (leader, fd), ThreadPoolExecutor(1) as other:
        follower = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)
        theirs = other.submit(lambda: run(decoder(1, 2, follower)))
        got, seconds = run(decoder(0, 2, leader))
        same, _ = theirs.result(LIMIT_S)

    assert torch.equal(got, same)
    assert (got - want).abs().max() < TOLERANCE
    assert not torch.equal(got, want)  # it was split
    assert seconds["reduce"] > 0
    assert alone["reduce"] == 0


def run_on_two(**options):
    """The hidden states of both ranks, and the sums that the first has begun without waiting."""
    with new_group(2) as (leader, fd), ThreadPoolExecutor(1) as other:
        follower = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)
        theirs = other.submit(lambda: run(decoder(1, 2, follower, **options)))
        ours, _ = run(decoder(0, 2, leader, **options))
        return ours, theirs.result(LIMIT_S)[0], leader.num_begun


def test_a_prompt_in_two_halves_has_the_same_bits():
    whole, _, none_begun = run_on_two()
    got, same, num_begun = run_on_two(halves_from=2)

    assert torch.equal(got, whole)
    assert torch.equal(same, whole)
    # Two halves of a prompt with two sums a layer; where nothing is read, the last layer ends before them; one token is not cut.
    assert (none_begun, num_begun) == (0, 2 * (2 * NUM_LAYERS) + 2 * (2 * NUM_LAYERS - 2))


def test_a_broken_group_ends_the_call():
    with new_group(2) as (leader, _):
        fused = decoder(0, 2, leader)
        leader.break_up("rank 1 died")
        with pytest.raises(ExecutionError, match="rank 1 died"):
            run(fused)
