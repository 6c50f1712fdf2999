"""Attention backends behind one protocol, and the layout of the KV cache that each of them wants."""
