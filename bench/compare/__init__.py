"""Headrace beside llama.cpp's server and OpenVINO GenAI on one machine, in turns: `python -m bench.compare`. Run bench/compare/setup first.

- The comparison: __main__.py (its order), peers.py (how servers are started), greedy.py (how they are asked for tokens), ratios.py
- In processes of their own: reference_texts.py (transformers in float32); in bench/compare/.venv: openvino_completions.py (a server around its
  pipeline), export_hf.py
"""
