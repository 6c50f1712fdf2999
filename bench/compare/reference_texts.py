"""What every class is compared with: greedy tokens of transformers in float32, one prompt at a time: reference_texts.py MODEL_DIR.

stdin: JSON list of lists of token ids. stdout: JSON object of `ids`, the NUM_TOKENS tokens that follow each, also after an end of
the sequence, and `logprobs` of them in nats. Runs in Headrace's .venv.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.benchmark.agreement import NUM_TOKENS


def continue_greedily(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """NUM_TOKENS most likely tokens, one after the other, and their logprobs."""
    ids, logprobs = list[int](), list[float]()
    given, cache = prompt, None
    while len(ids) < NUM_TOKENS:
        out = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
        logprob, token = out.logits[0, -1].log_softmax(-1).max(-1)
        ids.append(int(token))
        logprobs.append(float(logprob))
        given, cache = ids[-1:], out.past_key_values
    return ids, logprobs


def main() -> None:
    """Read prompts, write continuations. One thread: two that wait for each other take minutes beside other processes."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        answers = [continue_greedily(model, prompt) for prompt in json.load(sys.stdin)]
    json.dump({"ids": [ids for ids, _ in answers], "logprobs": [logprobs for _, logprobs in answers]}, sys.stdout)


if __name__ == "__main__":
    main()
