"""GGUF -> a Hugging Face directory in float32, for converters that read nothing else: export_hf.py MODEL.gguf DIRECTORY.

Runs in bench/compare/.venv. transformers unpacks the quantised tensors.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    gguf, directory = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
