"""Attention backends behind one protocol, and the KV cache layout of each."""
