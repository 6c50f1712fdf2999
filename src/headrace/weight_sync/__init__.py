"""A trainer's process group with engines: how both sides join it, and what a trainer sends through it.

Read first: group.py (the group), sender.py (the trainer's side).

bucket.py (many tensors as one), openrlhf.py (the two calls that OpenRLHF makes).
"""
