"""Model architectures: a file for each family, a registry, and the fallback through transformers.

Read first: decoder.py (the decoder of most families), spec.py (what a family says of itself), registry.py (which class
serves which model).

- Families: llama.py, qwen2.py, qwen3.py, qwen3_moe.py, mixtral.py, gemma3.py
- A head that guesses tokens: eagle3.py
- Any other causal LM: transformers_backend.py, transformers_names.py
- Compiled by torch: piecewise.py (the layers between attention calls)
"""
