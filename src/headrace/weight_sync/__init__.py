"""A trainer's process group with engines: how both sides join it, and what a trainer sends through it."""
