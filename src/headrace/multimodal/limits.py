"""What one image or one sound may cost. Owns the numbers. No imports of this project."""

MIB = 1 << 20

MAX_PIXELS = 50_000_000
"""Of an image, and of what it is resized to."""

MAX_VIDEO_PIXELS = 250_000_000
"""Of all frames of a video as they are given: as many as 120 of 1920 x 1080."""

MAX_SIDE = 1 << 16
"""Of an image, in pixels."""

MAX_CHANNELS = 8
"""Of a sound."""

MIN_RATE = 4_000
MAX_RATE = 384_000
"""Samples in a second of a sound's file."""

MAX_LEVEL = 1e12
"""Of a sample, where 1 is full scale. The power of a frame of such samples is about 1e29, which float32 holds: features stay finite."""

SLACK_S = 0.25
"""By which a sound may be longer than is heard at a time, and is cut: encoders of MP3 add some silence to what they are given."""

MIN_HOPS = 4
"""Of a sound, from one frame of its features to the next: fewer may give no token."""

MAX_WAV_CHUNKS = 1000
"""Before the samples in a WAV file."""

MAX_ITEM_BYTES = 128 * MIB
"""Of the values of one item."""

PREPARE_LIMIT_S = 10.0
"""Processor time to decode and prepare one item."""

CHILD_MEMORY_BYTES = 1536 * MIB
"""What a child may allocate beyond what it has when it starts."""

FETCH_LIMIT_S = 10.0
"""From the name of a host to the last byte of a file, redirects included."""

VIDEO_LIMIT_S = 30.0
"""Until all frames of a video are there."""

MAX_VIDEO_BYTES = 64 * MIB
"""Of the files of the frames of one video."""
