"""From logits to token ids: parameters, penalties, the sampler, logprobs, custom logit processors.

Read first: params.py (no torch), sampler.py (the order of operations).

draw.py, random.py (numbers from seed and position), penalties.py, device_penalties.py (on a GPU), grammar_rows.py (masks
of grammars), logprobs.py, logit_processors.py.
"""
