"""Random layers in every format of quantised safetensors: the tensors of a layer, written by the published formula of its format, and its weights.

Packing is written from single bits, the other way round from how we read. Scales are such that weights have a size of about 1 / sqrt(k).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Layer:
    """parts: by suffix. weight: float32[n, k]. kept: the scheme whose kernels take its codes; None = it is dequantised. metadata: of the file, by
    suffix of the layer's name."""

    parts: dict[str, torch.Tensor]
    weight: torch.Tensor
    kept: str | None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass
class Method:
    config: dict[str, Any]
    layer: Callable[[int, int, torch.Generator], Layer]


def pack(codes: torch.Tensor, bits: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Codes [..., m], one after the other from the lowest bit on, as [..., ceil(m bits / bits of dtype)]."""
    size = dtype.itemsize * 8
    ones = (codes.numpy().astype(np.int64)[..., None] >> np.arange(bits)) & 1
    ones = ones.reshape(*codes.shape[:-1], -1)
    filled = np.pad(ones, [(0, 0)] * (ones.ndim - 1) + [(0, -ones.shape[-1] % size)]).astype(np.uint8)
    return torch.from_numpy(np.packbits(filled, axis=-1, bitorder="little").copy()).view(dtype)


def draw(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator)


def scales_of(generator: torch.Generator, k: int, codes: float, *shape: int) -> torch.Tensor:
    """Halves for which weights of `codes` are about 1 / sqrt(k)."""
    return ((0.5 + torch.rand(shape, generator=generator)) / codes / k**0.5).half()


def spread(values: torch.Tensor, k: int) -> torch.Tensor:
    return values.float().repeat_interleave(k // values.shape[1], dim=1)


def gptq(bits: int, size: int, *, offset: int = 1, symmetric: bool = True, order: bool = False):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        group = k if size == -1 else size
        codes = draw(generator, 0, 2**bits, k, n)
        middle = 2 ** (bits - 1)
        zeros = torch.full((k // group, n), middle) if symmetric else draw(generator, 1, middle + 1, k // group, n)
        scales = scales_of(generator, k, middle / 2, k // group, n)
        groups = torch.arange(k) // group
        if order:
            groups = groups[torch.randperm(k, generator=generator)]
        weight = scales.float()[groups] * (codes - zeros[groups])
        parts = {
            "qweight": pack(codes.T, bits).T.contiguous(),
            "qzeros": pack(zeros - offset, bits),
            "scales": scales,
            "g_idx": groups.int(),
        }
        kept = None if order or group % 32 or (bits == 8 and not symmetric) else "int4" if bits <= 4 else "int8"
        return Layer(parts, weight.T.contiguous(), kept)

    return make


def gptq_config(bits: int, size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, **others}


def awq_words(values: torch.Tensor) -> torch.Tensor:
    return pack(values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].flatten(1), 4)


def awq(version: str, size: int):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        codes, zeros = draw(generator, 0, 16, n, k), draw(generator, 0, 16, n, k // size)
        scales = scales_of(generator, k, 6, n, k // size)
        weight = spread(scales, k) * (codes - spread(zeros, k))
        unit = {64: 2, 32: 4}.get(size, 1)
        room = -(-k // size // (8 * unit)) * unit * 8 - k // size
        if version == "gemm":
            parts = {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T.contiguous()}
        elif version == "gemv":
            wide = [torch.nn.functional.pad(values, (0, room)) for values in (zeros, scales)]
            parts = {"qweight": pack(codes, 4), "qzeros": pack(wide[0], 4), "scales": wide[1]}
        else:
            added = (scales.float() * zeros).half()
            weight = spread(scales, k) * codes - spread(added, k)
            wide = [torch.nn.functional.pad(values, (0, room)).T.contiguous() for values in (-added, scales)]
            parts = {"qweight": fast_tiles(codes), "qzeros": wide[0], "scales": wide[1]}
        return Layer(parts, weight, "int4" if size % 32 == 0 else None)

    return make


def fast_tiles(codes: torch.Tensor) -> torch.Tensor:
    """AutoAWQ's gemv_fast, place by place: int16[n / 4, k]."""
    n, k = codes.shape
    rows = torch.empty_like(codes)
    for j in range(32):
        eight, pair, odd = j // 8, j % 8 // 2, j % 2
        rows[:, pair * 8 + odd * 4 + eight :: 32] = codes[:, j::32]
    tiles = rows.reshape(n // 4, 4, k // 64, 64).transpose(1, 2).reshape(n // 4, k * 4)
    return pack(tiles, 4, torch.int16)


def ct(kind: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "ignore": ["lm_head", "re:.*router"],
        "config_groups": {"group_0": group},
    }


def ct_packed(bits: int, size: int, *, symmetric: bool = True, order: bool = False):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        group, middle = k if size == -1 else size, 2 ** (bits - 1)
        values = draw(generator, -middle, middle, n, k)
        zeros = torch.zeros(n, k // group).long() if symmetric else draw(generator, -middle, middle, n, k // group)
        scales = scales_of(generator, k, middle / 2, n, k // group).bfloat16()
        groups = torch.arange(k) // group
        parts = {
            "weight_packed": pack(values + middle, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
        }
        if order:
            groups = groups[torch.randperm(k, generator=generator)]
            parts["weight_g_idx"] = groups.int()
        if not symmetric:
            parts["weight_zero_point"] = pack((zeros + middle).T, bits).T.contiguous()
        kept = None if order else "int4" if bits <= 4 else "int8"
        return Layer(parts, scales.float()[:, groups] * (values - zeros[:, groups]), kept)

    return make


def int8(suffix: str = "weight", *, per: str = "row", symmetric: bool = True):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        values = draw(generator, -128, 128, n, k)
        shape = {"row": (n, 1), "matrix": (1,), "group": (n, k // 32)}[per]
        scales = torch.rand(shape, generator=generator).add_(0.5).div_(64 * k**0.5)
        weight = values * (scales if per != "group" else spread(scales, k))
        parts = {"weight": values.to(torch.int8), f"{suffix}_scale": scales, "input_scale": torch.ones(1)}
        if not symmetric:
            zeros = draw(generator, -9, 9, *shape).to(torch.int8)
            parts[f"{suffix}_zero_point"] = zeros
            weight = (values - zeros.int()) * scales
        return Layer(parts, weight, "int8" if symmetric else None)

    return make


def float8(per: str = "matrix", scale: str = "weight_scale"):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        values = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        shape = {"matrix": (), "row": (n, 1), "rows": (n,), "block": (-(-n // 48), -(-k // 32)), "group": (n, k // 16)}
        shape |= {"power blocks": (), "four": (-(-n // 16), 1, -(-k // 16), 1), "mx": (n, k // 32)}
        scales = torch.rand(shape[per], generator=generator).add_(0.5).div_(k**0.5)
        if per in ("mx", "power blocks"):
            exponents = draw(generator, 120, 125, *((n, k // 32) if per == "mx" else (-(-n // 48), -(-k // 32))))
            by_element, scales = 2.0 ** (exponents - 127), exponents.to(torch.uint8)
            if per == "mx":
                by_element = spread(by_element, k)
            else:
                by_element = by_element[torch.arange(n) // 48][:, torch.arange(k) // 32]
                scales = scales.view(torch.float8_e8m0fnu)
        elif per in ("block", "four"):
            rows, columns = (48, 32) if per == "block" else (16, 16)
            flat = scales.reshape(-(-n // rows), -(-k // columns))
            by_element = flat[torch.arange(n) // rows][:, torch.arange(k) // columns]
        else:
            by_element = spread(scales, k) if per == "group" else scales.reshape(-1, 1)
        parts = {"weight": values, scale: scales, "input_scale": torch.ones(1), "k_scale": torch.ones(1)}
        return Layer(parts, values.float() * by_element, None)

    return make


def e2m1(generator: torch.Generator, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes uint8[n, k / 2], values float32[n, k])."""
    codes = draw(generator, 0, 16, n, k)
    return pack(codes, 4, torch.uint8), E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def mxfp4(suffix: str):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        packed, values = e2m1(generator, n, k)
        exponents = draw(generator, 119, 124, n, k // 32)
        weight = values * spread(2.0 ** (exponents - 127), k)
        return Layer({suffix: packed, "weight_scale": exponents.to(torch.uint8)}, weight, "int8")

    return make


def nvfp4(suffix: str, whole: str):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        packed, values = e2m1(generator, n, k)
        scales = torch.rand(n, k // 16, generator=generator).add_(0.5).mul_(64).to(torch.float8_e4m3fn)
        factor = torch.tensor(1 / (160 * k**0.5))
        stored = 1 / factor if whole == "weight_global_scale" else factor
        weight = values * spread(scales.float() * (1 / stored if whole == "weight_global_scale" else stored), k)
        return Layer({suffix: packed, "weight_scale": scales, whole: stored.reshape(1)}, weight, None)

    return make


def modelopt_awq(*, smoothed: bool):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        values = draw(generator, -8, 8, n, k)
        scales = scales_of(generator, k, 4, n, k // 32)
        pairs = (values & 15).reshape(n // 2, 2, k)
        parts = {"weight": (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8), "weight_scale": scales}
        weight = values * spread(scales, k)
        if smoothed:
            parts["pre_quant_scale"] = torch.rand(k, generator=generator).add_(0.5)
            weight = weight * parts["pre_quant_scale"]
        return Layer(parts, weight, None if smoothed else "int4")

    return make


def bnb_4bit(kind: str, *, nested: bool):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        codes, size = draw(generator, 0, 16, n * k), 64
        table = NF4 if kind == "nf4" else torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]).div(12)
        table = table if kind == "nf4" else torch.cat((table, -table))
        blocks = -(-n * k // size)
        scales = torch.rand(blocks, generator=generator).add_(0.5).div_(k**0.5)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [n, k]}
        parts = {"weight.absmax": scales, "weight.quant_map": table.clone()}
        if nested:
            map8, codes8 = torch.rand(256, generator=generator), draw(generator, 0, 256, blocks)
            nested_scales = torch.rand(-(-blocks // 256), generator=generator).div_(k**0.5)
            scales = map8[codes8] * nested_scales.repeat_interleave(256)[:blocks] + 0.01
            parts |= {"weight.absmax": codes8.to(torch.uint8), "weight.nested_absmax": nested_scales}
            parts["weight.nested_quant_map"] = map8
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.01}
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).to(
            torch.uint8
        )
        parts["weight"] = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).reshape(-1, 1)
        weight = table[codes] * scales.repeat_interleave(size)[: n * k]
        return Layer(parts, weight.reshape(n, k), None)

    return make


def bnb_int8(n: int, k: int, generator: torch.Generator) -> Layer:
    values, largest = draw(generator, -127, 128, n, k), torch.rand(n, generator=generator).add_(0.5).div_(k**0.5)
    parts = {"weight": values.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Layer(parts, values * (largest / 127)[:, None], "int8")


def hqq(bits: int, axis: int, size: int = 32):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        groups = n * k // size
        shape = (groups, size) if axis == 1 else (size, groups)
        each = (groups, 1) if axis == 1 else (1, groups)
        codes = draw(generator, 0, 2**bits, *shape)
        scales = scales_of(generator, k, 2**bits / 4, *each)
        zeros = (torch.rand(each, generator=generator) * (2**bits - 1)).half()
        number, dtype = {8: (1, torch.uint8), 4: (2, torch.uint8), 3: (10, torch.int32), 2: (4, torch.uint8)}[bits]
        step = -(-shape[0] // number)
        rows = torch.nn.functional.pad(codes, (0, 0, 0, step * number - shape[0])).reshape(number, step, -1)
        words = sum(row << bits * (number - 1 - place) for place, row in enumerate(rows))
        parts = {"W_q": words.to(dtype), "scale": scales, "zero": zeros, "shape": torch.tensor([n, k])}
        parts |= {name: torch.tensor(value, dtype=torch.int32) for name, value in (("nbits", bits), ("axis", axis))}
        parts |= {"group_size": torch.tensor(size, dtype=torch.int32), "packing": torch.zeros(7, dtype=torch.uint8)}
        weight = (codes - zeros.float()) * scales.float()
        return Layer(parts, weight.reshape(n, k), "int4" if axis == 1 and bits <= 4 else None)

    return make


def hqq_config(bits: int, axis: int) -> dict[str, Any]:
    params = {"nbits": bits, "group_size": 32, "axis": axis}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}, "skip_modules": ["lm_head"]}


def torchao(kind: str):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        metadata = {"weight": json.dumps({"_type": kind, "_data": {"block_size": [1, 32]}})}
        if kind == "Int4Tensor":
            values = draw(generator, -8, 8, n, k)
            scales, zeros = (scales_of(generator, k, 4, k // 32, n) for _ in range(2))
            weight = values * spread(scales.T, k) + spread(zeros.T, k)
            parts = {"qdata": pack(values & 15, 4, torch.uint8).view(torch.int8), "scale": scales, "zero_point": zeros}
            kept = "int4"
        elif kind == "Float8Tensor":
            layer = float8("row")(n, k, generator)
            parts, weight, kept = (
                {"qdata": layer.parts["weight"], "scale": layer.parts["weight_scale"]},
                layer.weight,
                None,
            )
        else:
            layer = int8(per="row" if kind == "Int8Tensor" else "group")(n, k, generator)
            parts, weight, kept = (
                {"qdata": layer.parts["weight"], "scale": layer.parts["weight_scale"]},
                layer.weight,
                "int8",
            )
        return Layer({f"_weight_{name}": part for name, part in parts.items()}, weight, kept, metadata)

    return make


def torchao_config(name: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": {"group_size": 32}}}}


def quark(dtype: str, *, reorder: bool = True):
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        low = -8 if dtype == "int4" else 0
        values = draw(generator, low, low + 16, n, k)
        zeros = torch.zeros(n, k // 32).long() if dtype == "int4" else draw(generator, 0, 16, n, k // 32)
        scales = scales_of(generator, k, 6, k // 32, n)
        words = awq_words if reorder else lambda codes: pack(codes, 4)
        parts = {"weight": words(values.T & 15), "weight_scale": scales, "weight_zero_point": words(zeros.T)}
        return Layer(parts, spread(scales.T, k) * (values - spread(zeros, k)), "int4")

    return make


def quark_config(dtype: str, scheme: str, **others: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "group_size": 32, "symmetric": dtype != "uint4", **others}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "exclude": ["lm_head"],
        "export": {"pack_method": others.get("pack", "reorder"), "kv_cache_group": []},
    }


def method(name: str, **config: Any) -> dict[str, Any]:
    return {"quant_method": name, **config}


METHODS: dict[str, Method] = {
    **{f"gptq-{bits}": Method(gptq_config(bits, 32, sym=True), gptq(bits, 32)) for bits in (2, 3, 4, 8)},
    "gptq-2-asymmetric": Method(gptq_config(2, 64), gptq(2, 64, symmetric=False)),
    "gptq-3-asymmetric": Method(gptq_config(3, 32), gptq(3, 32, symmetric=False)),
    "gptq-8-asymmetric": Method(gptq_config(8, 32, sym=False), gptq(8, 32, symmetric=False)),
    # Layers whose bits and groups the config does not say.
    "gptq-dynamic": Method(gptq_config(4, 128, dynamic={"+:.*": {"bits": 8}}), gptq(3, 32)),
    "auto-round-extra": Method(
        method("auto-round", bits=4, group_size=128, extra_config={"model.*": {"group_size": 32}}), gptq(2, 32)
    ),
    "auto-round-awq-extra": Method(
        method(
            "auto-round",
            bits=4,
            group_size=128,
            packing_format="auto_round:auto_awq",
            extra_config={"lm_head": {}, "a": 1},
        ),
        awq("gemm", 32),
    ),
    "gptq-rows": Method(gptq_config(4, -1), gptq(4, -1)),
    "gptq-16": Method(gptq_config(4, 16), gptq(4, 16)),
    "gptq-v2": Method(gptq_config(4, 32, checkpoint_format="gptq_v2"), gptq(4, 32, offset=0, symmetric=False)),
    "gptq-ordered": Method(gptq_config(4, 32, desc_act=True), gptq(4, 32, symmetric=False, order=True)),
    "awq": Method(method("awq", bits=4, group_size=32), awq("gemm", 32)),
    "awq-16": Method(method("awq", bits=4, group_size=16), awq("gemm", 16)),
    "awq-gemv": Method(method("awq", w_bit=4, q_group_size=32, version="GEMV"), awq("gemv", 32)),
    "awq-gemv-fast": Method(method("awq", bits=4, group_size=64, version="gemv_fast"), awq("gemv_fast", 64)),
    "auto-round": Method(
        method("auto-round", bits=4, group_size=32, packing_format="auto_round:auto_gptq"), gptq(4, 32)
    ),
    "auto-round-asymmetric": Method(
        method("auto-round", bits=4, group_size=32, sym=False, packing_format="auto_round:gptqmodel"),
        gptq(4, 32, offset=0, symmetric=False),
    ),
    "auto-round-awq": Method(
        method("auto-round", bits=4, group_size=32, packing_format="auto_round:auto_awq"), awq("gemm", 32)
    ),
    "ct-4": Method(ct("pack-quantized", 4, strategy="group", group_size=32), ct_packed(4, 32)),
    "ct-4-asymmetric": Method(
        ct("pack-quantized", 4, strategy="group", group_size=32, symmetric=False), ct_packed(4, 32, symmetric=False)
    ),
    "ct-4-rows": Method(ct("pack-quantized", 4, strategy="channel"), ct_packed(4, -1)),
    "ct-4-ordered": Method(
        ct("pack-quantized", 4, strategy="group", group_size=32, actorder="group"), ct_packed(4, 32, order=True)
    ),
    "ct-3": Method(ct("pack-quantized", 3, strategy="group", group_size=32), ct_packed(3, 32)),
    "ct-8-packed": Method(ct("pack-quantized", 8, strategy="channel"), ct_packed(8, -1)),
    "ct-int8": Method(ct("int-quantized", 8, strategy="channel"), int8()),
    "ct-int8-matrix": Method(ct("int-quantized", 8, strategy="tensor"), int8(per="matrix")),
    "ct-int8-groups": Method(ct("int-quantized", 8, strategy="group", group_size=32), int8(per="group")),
    "ct-int8-asymmetric": Method(ct("int-quantized", 8, strategy="channel", symmetric=False), int8(symmetric=False)),
    "ct-fp8": Method(ct("float-quantized", 8, type="float", strategy="tensor"), float8()),
    "ct-fp8-rows": Method(ct("float-quantized", 8, type="float", strategy="channel"), float8("row")),
    "ct-fp8-blocks": Method(
        ct("float-quantized", 8, type="float", strategy="block", block_structure=[48, 32]), float8("block")
    ),
    "ct-fp8-groups": Method(ct("float-quantized", 8, type="float", strategy="group", group_size=16), float8("group")),
    "ct-mxfp8": Method(ct("mxfp8-quantized", 8, type="float", strategy="group", group_size=32), float8("mx")),
    "ct-nvfp4": Method(
        ct("nvfp4-pack-quantized", 4, type="float", strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale"),
    ),
    "ct-mxfp4": Method(
        ct("mxfp4-pack-quantized", 4, type="float", strategy="group", group_size=32), mxfp4("weight_packed")
    ),
    "fp8": Method(method("fp8", activation_scheme="static"), float8()),
    "fp8-blocks": Method(method("fp8", weight_block_size=[48, 32]), float8("block", "weight_scale_inv")),
    "fp8-power-blocks": Method(method("fp8", weight_block_size=[48, 32]), float8("power blocks", "weight_scale_inv")),
    "fbgemm-fp8": Method(method("fbgemm_fp8"), float8("row")),
    "modelopt-fp8": Method(method("modelopt", quant_algo="FP8"), float8()),
    "modelopt-fp8-rows": Method(method("modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), float8("rows")),
    "modelopt-fp8-blocks": Method(method("modelopt", quant_algo="FP8_PB_WO"), float8("four")),
    "modelopt-nvfp4": Method(method("modelopt", quant_algo="NVFP4"), nvfp4("weight", "weight_scale_2")),
    "modelopt-mxfp4": Method(method("modelopt", quant_algo="MXFP4"), mxfp4("weight")),
    "modelopt-awq": Method(method("modelopt", quant_algo="W4A16_AWQ"), modelopt_awq(smoothed=False)),
    "modelopt-awq-smoothed": Method(method("modelopt", quant_algo="W4A16_AWQ"), modelopt_awq(smoothed=True)),
    "modelopt-int8": Method(method("modelopt", quant_algo="W8A8_SQ_PER_CHANNEL"), int8()),
    "bnb-nf4": Method(method("bitsandbytes", load_in_4bit=True), bnb_4bit("nf4", nested=False)),
    "bnb-nf4-nested": Method(method("bitsandbytes", load_in_4bit=True), bnb_4bit("nf4", nested=True)),
    "bnb-fp4": Method(
        method("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="fp4"), bnb_4bit("fp4", nested=False)
    ),
    "bnb-int8": Method(method("bitsandbytes", load_in_8bit=True), bnb_int8),
    **{f"hqq-{bits}": Method(hqq_config(bits, 1), hqq(bits, 1)) for bits in (2, 3, 4, 8)},
    "hqq-columns": Method(hqq_config(4, 0), hqq(4, 0)),
    "torchao-int4": Method(torchao_config("Int4WeightOnlyConfig"), torchao("Int4Tensor")),
    "torchao-int8": Method(torchao_config("Int8WeightOnlyConfig"), torchao("Int8Tensor")),
    "torchao-intx": Method(
        torchao_config("Int8DynamicActivationIntxWeightConfig"), torchao("IntxUnpackedToInt8Tensor")
    ),
    "torchao-float8": Method(torchao_config("Float8DynamicActivationFloat8WeightConfig"), torchao("Float8Tensor")),
    "quark-uint4": Method(quark_config("uint4", "per_group"), quark("uint4")),
    "quark-int4": Method(quark_config("int4", "per_group", pack="order"), quark("int4", reorder=False)),
    "quark-int8": Method(quark_config("int8", "per_channel"), int8()),
    "quark-fp8": Method(quark_config("fp8_e4m3", "per_tensor"), float8()),
    "quark-mxfp4": Method(quark_config("fp4", "per_group"), mxfp4("weight")),
}
