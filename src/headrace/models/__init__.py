"""Model architectures: the blocks that families share, a registry, and the fallback through transformers.

What one family has alone is in `headrace.families`. Read first: decoder.py (the decoder of most families), encoder.py (the encoder of the
others), spec.py (what a family says of itself), registry.py (which class serves which model).

- Models that see or hear: media.py (what an encoder of images or sounds is to the runner), senses.py (a family of decoders with one),
  places.py (positions of images in three parts); towers/ has what encoders share
- A head that guesses tokens: eagle3.py
- Decoders that do not write: pooled_decoder.py
- Any other causal LM: transformers_backend.py, transformers_names.py
- Compiled by torch: piecewise.py (the layers between attention calls)
"""
