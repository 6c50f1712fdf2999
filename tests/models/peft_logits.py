"""Logits of models with peft's adapters, by transformers and peft alone: run as a program by the tests, with peft on its path.

Reads lines of JSON (`model`, `adapter`: folders; `tokens`; `to`: the safetensors file to write), and answers each with a line.
"""

import json
import sys

import peft
import torch
import transformers
from safetensors.torch import save_file

for line in sys.stdin:
    asked = json.loads(line)
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, asked["adapter"]).eval()
    with torch.inference_mode():
        save_file({"logits": adapted(torch.tensor([asked["tokens"]])).logits[0].contiguous()}, asked["to"])
    print("done", flush=True)
