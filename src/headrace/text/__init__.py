"""Text and token ids: tokenizers, chat templates, the detokenizer, incremental decoding and stop matching."""
