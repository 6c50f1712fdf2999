"""The version of this package, for those that name it; `headrace.__version__` is the same."""

VERSION = "0.1.0"
