"""Building blocks of models: functions of tensors whose weights load from, and read back as, Hugging Face tensors.

Read first: weight.py (how layers name, load and return weights), linear.py (with adapters).

embedding.py, norm.py, rotary.py, mlp.py (with mixtures of experts), logits.py, pooler.py (hidden states of a text to one vector).
"""
