"""Reads checkpoints (Hugging Face folders, GGUF files, adapters) as a `ModelConfig` and tensors or stored matrices.

Read first: base.py (`Checkpoint`), source.py (what a path is), model_config.py (`ModelConfig`).

- Formats: huggingface.py, safetensors_file.py (folders), gguf.py (the file), gguf_strings.py, gguf_names.py (its config),
  gguf_tensors.py, gguf_checkpoint.py (as a checkpoint), gguf_mmproj.py (the vision encoder in another file), lora.py (peft's adapters)
- config.json: config_keys.py, layer_config.py (windows, rotation), media_config.py (vision and audio encoders), sampling_defaults.py,
  pooling.py (what becomes of hidden states; modules.json)
- Families: family.py (what each says of itself), projector.py (of its vision encoder in a GGUF file), media_tokens.py (what stands for
  an image in a prompt), families.py (finds `headrace.families`; which model types can be served)
- preprocessor_config.py: how images, frames and audio are prepared
- Quantised: weight_formats.py (every weight format, a row each), quantized_formats (how GPTQ, AWQ, ... and ours lie in safetensors, a file
  each), quantized_matrix.py (a weight in plain form)
- Files: files.py (nothing but regular ones is opened; JSON), names.py (models that need no path), hub_cache.py (those of the Hugging
  Face cache), hub_download.py (bringing them there), weight_cache.py (packed weights, for a second start), copies.py (of the weights in
  force, for a restarted scheduler)
"""
