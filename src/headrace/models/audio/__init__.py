"""Encoders of sounds on our own kernels: what a model hears with. The layers that they share with encoders of images are in `models/towers/`.

- Families: qwen2_audio.py
"""
