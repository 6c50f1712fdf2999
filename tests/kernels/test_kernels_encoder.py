"""An encoder's layers in one native call give the bits of the ops one by one."""

import pytest
import torch

from headrace import kernels
from headrace.checkpoint.weight_formats import names_on_cpu
from headrace.kernels import EncoderLayerSpec, EncoderSpec, FusedEncoder, cpu
from headrace.kernels.encoder import why_not
from headrace.layers.quantization import integer_format

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

HIDDEN, HEADS, HEAD_DIM, INNER = 72, 3, 24, 130
LENGTHS = [9, 1, 70, 33]
ACTIVATIONS = {"gelu": kernels.gelu, "gelu_tanh": kernels.gelu_tanh, "relu": torch.relu}
GATES = {"gelu": kernels.gelu_mul, "gelu_tanh": kernels.gelu_tanh_mul, "silu": kernels.silu_mul}
ISAS = [isa for isa, reason in cpu.isas() if not reason]


def pack(n: int, k: int, scheme: str) -> kernels.PackedLinear:
    weight, bias = torch.randn(n, k) / k**0.5, torch.randn(n) / 4
    if scheme in ("float32", "bf16"):
        return kernels.pack_linear(weight.to(torch.bfloat16 if scheme == "bf16" else torch.float32), bias)
    if scheme == "bfloat16":
        return kernels.pack_linear(weight, bias, rounded=True)
    return kernels.pack_linear(integer_format(scheme).quantize(weight), bias)


def norm(bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    return 1 + torch.randn(HIDDEN) / 8, torch.randn(HIDDEN) / 8 if bias else None


def encoder(
    *,
    scheme: str = "float32",
    pre_norm: bool = False,
    gated: bool = False,
    activation: str = "gelu",
    rotated: bool = False,
) -> EncoderSpec:
    """Three layers: the second with a window, and the first of a pre-norm encoder without a norm, as in ModernBERT."""
    torch.manual_seed(1)
    width = HEADS * HEAD_DIM
    angles = torch.arange(80)[:, None] * 100.0 ** -(torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    layers = tuple(
        EncoderLayerSpec(
            qkv=pack(3 * width, HIDDEN, scheme),
            out=pack(HIDDEN, width, scheme),
            up=pack((1 + gated) * INNER, HIDDEN, scheme),
            down=pack(HIDDEN, INNER, scheme),
            attention_norm=None if pre_norm and index == 0 else norm(bias=not pre_norm),
            mlp_norm=norm(bias=not pre_norm),
            window=5 if index == 1 else 0,
            rope=(angles.cos(), angles.sin()) if rotated else None,
        )
        for index in range(3)
    )
    return EncoderSpec(
        layers, pre_norm, norm(bias=False) if pre_norm else None, 1e-6, HEADS, HEAD_DIM, 0.2, activation, gated
    )


def layer_by_layer(
    spec: EncoderSpec, x: torch.Tensor, positions: torch.Tensor, row_starts: torch.Tensor
) -> torch.Tensor:
    def normed(x, with_, residual=None):
        return kernels.layer_norm(x, *with_, spec.eps, residual)

    x = x.clone()
    activate = (GATES if spec.gated else ACTIVATIONS)[spec.activation]
    for layer in spec.layers:
        inner = normed(x, layer.attention_norm) if spec.pre_norm and layer.attention_norm else x
        q, k, v = kernels.linear(inner, layer.qkv).view(len(x), 3, HEADS, HEAD_DIM).unbind(1)
        if layer.rope is not None:
            kernels.rotary(q, k, positions, *layer.rope)
        attended = kernels.packed_attention(
            q, k, v, row_starts, spec.scale, window=layer.window, rounded=kernels.rounds_attention(layer.qkv)
        )
        added = kernels.linear(attended.flatten(1), layer.out)
        if spec.pre_norm:
            x += added
            x += kernels.linear(activate(kernels.linear(normed(x, layer.mlp_norm), layer.up)), layer.down)
        else:
            x = normed(added, layer.attention_norm, x)
            x = normed(kernels.linear(activate(kernels.linear(x, layer.up)), layer.down), layer.mlp_norm, x)
    return x if spec.final_norm is None else normed(x, spec.final_norm)


def texts(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, positions and row_starts."""
    hidden = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in [0, *lengths]]).int()
    return hidden, positions, torch.tensor([0, *lengths]).cumsum(0).int()


def expect_same_bits(spec: EncoderSpec, lengths: list[int] = LENGTHS) -> None:
    inputs = texts(lengths)
    want = layer_by_layer(spec, *inputs)

    got = FusedEncoder(spec)(*inputs)

    assert got is inputs[0]
    assert torch.equal(got, want)
    assert got.isfinite().all()
    assert got.std() > 0.1


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["float32", "bf16", "bfloat16", *names_on_cpu()])
def test_one_call_for_all_layers_gives_the_bits_of_the_ops(native, scheme, threads):
    kernels.set_num_threads(threads)
    expect_same_bits(encoder(scheme=scheme))
    expect_same_bits(encoder(scheme=scheme, pre_norm=True, gated=True, rotated=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", ["float32", "bfloat16", "int16", "int8-fast"])
def test_every_instruction_set_gives_the_bits_of_its_ops(native, scheme, isa):
    cpu.select_isa(isa)
    expect_same_bits(encoder(scheme=scheme))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("rotated", [False, True], ids=["positions", "rope"])
def test_every_kind_of_encoder_gives_the_bits_of_its_ops(native, gated, pre_norm, rotated):
    for activation in GATES if gated else ACTIVATIONS:
        spec = encoder(pre_norm=pre_norm, gated=gated, activation=activation, rotated=rotated)
        assert why_not(spec) == ""
        expect_same_bits(spec)


@pytest.mark.parametrize(
    "lengths",
    [[], [0], [1], [3] * 90, [500], [1, 300, 2], [20] * 40, [7, 64, 0, 30] * 12],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths, default=0)}",
)
def test_any_number_of_texts_of_any_length_is_allowed(native, lengths):
    kernels.set_num_threads(2)
    spec = encoder(scheme="int8")
    inputs = texts(lengths)
    want = layer_by_layer(spec, *inputs)
    assert torch.equal(FusedEncoder(spec)(*inputs), want)


@pytest.mark.parametrize("scheme", ["float32", "bfloat16", "int16", "int8-fast"])
def test_a_text_has_the_same_bits_alone_and_among_others(native, scheme):
    spec = encoder(scheme=scheme)
    run = FusedEncoder(spec)
    hidden, positions, row_starts = texts([20, 7, 150, 64, 1])
    together = run(hidden.clone(), positions, row_starts)
    for begin, end in zip(row_starts.tolist(), row_starts.tolist()[1:], strict=False):
        alone = run(hidden[begin:end].clone(), positions[begin:end], torch.tensor([0, end - begin]).int())
        assert torch.equal(alone, together[begin:end])


def test_every_phase_takes_some_time(native):
    kernels.set_num_threads(1)
    run = FusedEncoder(encoder(rotated=True))
    run(*texts(LENGTHS))
    assert all(seconds > 0 for phase, seconds in run.phase_seconds().items() if phase != "wait")
    assert not any(run.phase_seconds().values())


def test_what_does_not_fit_is_refused(native):
    run = FusedEncoder(encoder(rotated=True))
    hidden, positions, row_starts = texts([10, 5])
    before = hidden.clone()
    with pytest.raises(ValueError, match="position 80"):
        run(hidden, torch.full((15,), 80).int(), row_starts)
    with pytest.raises(ValueError, match="row_starts"):
        run(hidden, positions, torch.tensor([0, 14]).int())
    with pytest.raises(ValueError, match="hidden"):
        run(hidden[:, :70], positions, row_starts)
    assert torch.equal(hidden, before)


def test_encoders_that_have_no_fused_call_say_why(native):
    assert "silu" in why_not(encoder(activation="silu"))
    assert "relu with a gate" in why_not(encoder(activation="relu", gated=True))
    with pytest.raises(ValueError, match="silu"):
        FusedEncoder(encoder(activation="silu"))
    with kernels.prefer("torch"):
        spec = encoder()
    assert "layout torch" in why_not(spec)
    short = encoder()
    wrong = EncoderSpec(short.layers, short.pre_norm, None, 1e-6, HEADS + 1, HEAD_DIM, 0.2, "gelu", False)
    with pytest.raises(ValueError, match="qkv of layer 0"):
        FusedEncoder(wrong)
