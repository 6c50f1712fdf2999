"""From logits to token ids: parameters, penalties, the sampler, logprobs, custom logit processors.

Read first: params.py (no torch), sampler.py (the order of operations).

grammar_fields.py (what the output must match), grammar_rows.py (masks of grammars), draw.py (numbers from seed and position, typical-p), penalties.py
(all edits of logits, on the host and on a GPU), logprobs.py, logit_processors.py.
"""
