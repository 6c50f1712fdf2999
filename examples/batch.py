"""Many prompts at once: the engine computes them together, and each gets what it would get alone. The cells (`# %%`) also run in a notebook.

python examples/batch.py
"""

# %% An engine
import asyncio
import time

from headrace import Engine

engine = Engine(model_path="smollm2")

# %% A list of prompts: a list of replies in the same order
COUNTRIES = ["France", "Italy", "Japan", "Egypt", "Canada", "Poland", "Spain", "Kenya"]
prompts = [f"The capital of {country} is" for country in COUNTRIES]
start_s = time.perf_counter()
replies = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 4, "stop": "."})
for prompt, reply in zip(prompts, replies, strict=True):
    print(prompt + reply["text"])
print(f"{len(prompts)} prompts in {time.perf_counter() - start_s:.2f} s")

# %% Several samples of one prompt, and the likelihood of each
samples = engine.generate(
    "My favourite colour is", {"n": 4, "temperature": 0.8, "seed": 7, "max_new_tokens": 4}, return_logprob=True
)
for sample in samples:
    logprob = sum(row[0] for row in sample["meta_info"]["output_token_logprobs"])
    print(f"{logprob:7.2f} {sample['text']!r}")


# %% Calls from asyncio share the engine, too
async def ask_all() -> list[str]:
    """A chat about each country, all at once."""
    chats = [
        engine.async_chat([{"role": "user", "content": f"Is {country} in Europe?"}], temperature=0, max_tokens=8)
        for country in COUNTRIES
    ]
    return [reply.text for reply in await asyncio.gather(*chats)]


# In a notebook: answers = await ask_all()
answers = asyncio.run(ask_all())
print(answers)

# %%
engine.shutdown()
