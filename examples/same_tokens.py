"""A reply has the same tokens whatever else the engine serves, also if the process that computes them is killed meanwhile.

python examples/same_tokens.py
python examples/same_tokens.py --kill
"""

# %% A prompt that is sampled alone
import sys
import threading

import psutil

from headrace import Engine

engine = Engine(model_path="smollm2")
story = "Once upon a time, in a village at the foot of a mountain,"
sampling = {"temperature": 1.0, "seed": 7, "max_new_tokens": 128, "ignore_eos": True}
alone = engine.generate(story, sampling)

# %% The same prompt among 31 others, which begin alike: batched, cut into chunks and cached together
prompts = [story, *(f"{story} there lived {i} goats" for i in range(31))]


def kill_the_scheduler() -> None:
    """A `kill -9` of the process that holds the model and the KV cache. The engine starts another one."""
    for process in psutil.Process().children():
        if "scheduler" in process.cmdline():
            print(f"killing process {process.pid}")
            process.kill()


if "--kill" in sys.argv:
    threading.Timer(2.0, kill_the_scheduler).start()
among_others = engine.generate(prompts, sampling)[0]

# %% Token by token
same = among_others["output_ids"] == alone["output_ids"]
print(f"{len(alone['output_ids'])} tokens alone and among 31 others: {'the same' if same else 'DIFFERENT'}")

# %%
engine.shutdown()
