"""Text as it grows token by token: incremental decoding and stop matching."""
