"""From logits to token ids: parameters, penalties, the sampler, logprobs, custom logit processors.

Read first: params.py (no torch), sampler.py (the order of operations).

grammar_fields.py (what the output must match), grammar_rows.py (masks of grammars), draw.py, typical.py (typical-p), random.py (numbers
from seed and position), penalties.py, device_penalties.py (on a GPU), thinking_budget.py (a limit of reasoning), logprobs.py, logit_processors.py.
"""
