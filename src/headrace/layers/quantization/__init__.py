"""Quantisers of linear layers, one file per scheme: a float weight becomes a `QuantizedMatrix`."""

from headrace.layers.quantization.schemes import bytes_per_weight, join, quantize

__all__ = ["bytes_per_weight", "join", "quantize"]
