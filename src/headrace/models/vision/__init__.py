"""Encoders of images, of our own kernels: what a model sees with.

blocks: the layers that all towers share. patches: from pixels to the first layer's input, and tables of positions. tower: layers over the patches of
several images, packed without padding. llava (also Pixtral and Mistral 3), idefics3 (also SmolVLM), gemma3, qwen_vl: the families, each from values
of images to rows of the text model. registry: which family has which encoder.
"""
