"""The same request gives the same answer, to the last bit, however it was computed (deterministic by default)."""
