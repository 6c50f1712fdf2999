"""Formats of quantised safetensors checkpoints: how each stores a matrix, and what becomes of it here (docs/quantization.md has the table).

base.py (`QuantizedFormat`, the arithmetic that several share), scaled.py (a tensor and its scales, told by dtypes; `fp8` is no more than
that), and a file for each tool: gptq.py, awq.py, compressed_tensors.py, modelopt.py, bitsandbytes.py, hqq.py, torchao.py, quark.py, own.py. A
new format is a file and a line here.
"""

from collections.abc import Callable
from typing import Any

from headrace.checkpoint.quantized_formats.awq import AwqFormat
from headrace.checkpoint.quantized_formats.base import Parts, QuantizedFormat
from headrace.checkpoint.quantized_formats.bitsandbytes import BitsAndBytesFormat
from headrace.checkpoint.quantized_formats.compressed_tensors import CompressedTensorsFormat
from headrace.checkpoint.quantized_formats.gptq import GptqFormat, auto_round
from headrace.checkpoint.quantized_formats.hqq import HqqFormat
from headrace.checkpoint.quantized_formats.modelopt import ModelOptFormat
from headrace.checkpoint.quantized_formats.own import OwnFormat, own_tensors
from headrace.checkpoint.quantized_formats.quark import QuarkFormat
from headrace.checkpoint.quantized_formats.scaled import Fp8Format
from headrace.checkpoint.quantized_formats.torchao import TorchAoFormat
from headrace.checkpoint.weight_formats import FORMATS, GGUF_METHOD, OWN_METHOD, Scheme
from headrace.errors import ModelError

__all__ = ["Parts", "QuantizedFormat", "keeps_codes", "own_tensors", "stored_format", "stored_scheme"]

_METHODS: dict[str, Callable[[dict[str, Any]], QuantizedFormat]] = {
    OWN_METHOD: OwnFormat,
    "auto-round": auto_round,
    "awq": AwqFormat,
    "bitsandbytes": BitsAndBytesFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fbgemm_fp8": Fp8Format,
    "fp8": Fp8Format,
    "gptq": GptqFormat.gptq,
    "hqq": HqqFormat,
    "modelopt": ModelOptFormat,
    "quark": QuarkFormat,
    "torchao": TorchAoFormat,
}
"""By `quant_method`. Needs no torch: it is imported when a tensor is read."""


def stored_format(quantization: dict[str, Any] | None) -> QuantizedFormat | None:
    """The format of safetensors with this `quantization_config`; None for those that are not quantised, and for GGUF files. Raises ModelError naming
    the setting that is not supported."""
    if quantization is None or quantization.get("quant_method") == GGUF_METHOD:
        return None
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"quantised checkpoints of quant_method {method!s:.80} are not supported; {', '.join(sorted(_METHODS))} are"
        )
    return _METHODS[method](quantization)


def stored_scheme(quantization: dict[str, Any] | None) -> Scheme:
    """How a model of this `quantization_config` computes; "none" when it is not quantised, or its matrices are dequantised. Raises ModelError as
    `stored_format`."""
    if quantization is not None and quantization.get("quant_method") == GGUF_METHOD:
        return "gguf"
    found = stored_format(quantization)
    return "none" if found is None else found.scheme


def keeps_codes(quantization: dict[str, Any] | None, scheme: Scheme) -> bool:
    """Whether a model that computes in `scheme` uses the matrices of a checkpoint with this `quantization_config` as they are stored."""
    return bool(FORMATS[scheme].takes) and stored_scheme(quantization) == scheme
