"""Greedy texts of the 16-bit class's reference: transformers in float32, one prompt at a time: reference_texts.py MODEL_DIR.

stdin: JSON list of lists of token ids. stdout: JSON list of lists of the tokens that follow. Runs in Headrace's .venv.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

NUM_TOKENS = 32


def main() -> None:
    """Read prompts, write continuations of at most NUM_TOKENS tokens, ended by the end-of-sequence token."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True)
    texts = []
    for prompt in json.load(sys.stdin):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
        texts.append(out[0, len(prompt) :].tolist())
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
