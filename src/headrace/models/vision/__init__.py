"""Encoders of images on our own kernels: what a model sees with.

Read first: llava.py (the simplest family), and the layers that all towers share, in `models/towers/`.

- Parts: patches.py (from pixels to the first layer)
- Families: llava.py (also Pixtral and Mistral 3), llava_onevision.py (also LLaVA-NeXT), idefics3.py (also SmolVLM), internvl.py, gemma3.py,
  qwen_vl.py (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)
"""
