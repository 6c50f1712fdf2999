"""Weight formats of linear layers, one class a file; each registers itself when it is imported here.

Read first: base.py (`WeightFormat`, the registry).

- Formats: floats.py, bfloat16.py, fp8.py, int16.py, int8.py, int8_rotated.py, int8_fast.py, int4.py
- Rounding to int4: int4_grid.py, gptq.py
"""

from headrace.layers.quantization import bfloat16, floats, fp8, int4, int8, int8_fast, int8_rotated, int16
from headrace.layers.quantization.base import IntegerFormat, WeightFormat, integer_format, weight_format

__all__ = [
    "IntegerFormat",
    "WeightFormat",
    "bfloat16",
    "floats",
    "fp8",
    "int4",
    "int8",
    "int8_fast",
    "int8_rotated",
    "int16",
    "integer_format",
    "weight_format",
]
