"""What one image may cost. Owns the numbers. No imports of this project."""

MIB = 1 << 20

MAX_PIXELS = 50_000_000
"""Of an image, and of what it is resized to."""

MAX_SIDE = 1 << 16
"""Of an image, in pixels."""

MAX_ITEM_BYTES = 128 * MIB
"""Of the values of one image."""

PREPARE_LIMIT_S = 10.0
"""Processor time to decode and prepare one image."""

CHILD_MEMORY_BYTES = 1536 * MIB
"""What a child may allocate beyond what it has when it starts."""

FETCH_LIMIT_S = 10.0
"""From the name of a host to the last byte of an image, redirects included."""
