"""Model architectures: the blocks that families share, a registry, and the fallback through transformers.

What one family has alone is in `headrace.families`. Read first: decoder.py (the decoder of most families), encoder.py (the encoder of the BERT
family), spec.py (what a model is to the runner), registry.py (which class serves which model; decoders that pool).

- Vision and audio encoders: media.py (what one is to the runner; positions in three parts), towers.py (their layers), tower_parts.py
- Speculative decoding: eagle3.py
- Any other causal LM: transformers_backend.py, transformers_names.py
- Compiled by torch: piecewise.py (the layers between attention calls)
"""
