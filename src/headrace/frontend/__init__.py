"""The client side of the engine: tokenizers, chat templates, managers."""
