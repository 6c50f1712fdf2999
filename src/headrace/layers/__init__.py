"""Building blocks of models: functions of tensors whose weights load from, and read back as, Hugging Face tensors.

Read first: weight.py (how layers name, load and return weights), linear.py.

embedding.py, norm.py, rotary.py, mlp.py, moe.py, logits.py, pooler.py (hidden states of a text to one vector), lora.py
(adapters on a linear layer), expert_counts.py (what routers choose).
"""
