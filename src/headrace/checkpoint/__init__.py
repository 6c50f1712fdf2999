"""Reading checkpoints: names, metadata, weights of Hugging Face folders and GGUF files."""
