"""Weight formats of linear layers.

base.py (`WeightFormat`, the registry), formats.py (a class a format), gptq.py (rounding to int4).
"""

from headrace.layers.quantization import formats
from headrace.layers.quantization.base import IntegerFormat, WeightFormat, integer_format, weight_format

__all__ = ["IntegerFormat", "WeightFormat", "formats", "integer_format", "weight_format"]
