"""Reads checkpoints (Hugging Face folders, GGUF files, adapters) as a `ModelConfig` and tensors or stored matrices.

Read first: base.py (`Checkpoint`), source.py (what a path is), model_config.py (`ModelConfig`).

- Formats: huggingface.py, safetensors_file.py (folders), gguf.py (the file), gguf_names.py,
  gguf_checkpoint.py (as a checkpoint), lora.py (peft's adapters)
- config.json: config_keys.py, rope_config.py, layer_types.py, families.py (finds `headrace.families`; which can be served, by name),
  family.py (what each says of itself), foreign_config.py
  (families that we have no defaults for), encoder_config.py (the BERT family), sampling_defaults.py
- Models that see and hear: media_config.py (their eyes in config.json), audio_config.py (their ears), media_keys.py (what both have),
  image_processors.py (how they want an image), audio_processors.py (how they want a sound)
- Embedding models: pooling.py (what becomes of hidden states; modules.json)
- Quantised: weight_formats.py (every weight format, a row each), quantization_settings.py (which are served),
  quantized_formats.py (GPTQ, AWQ, ours), quantized_matrix.py (a weight in plain form), rotation.py, gguf_quantized.py
- Files: regular_file.py (nothing else is opened), json_file.py, names.py (models that need no path), hub_cache.py (those
  of the Hugging Face cache), hub_download.py (bringing them there), weight_cache.py (packed weights, for a second start)
"""
