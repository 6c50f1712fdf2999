"""A conversation with a model: a reply, the next turn, and a stream. The cells (`# %%`) also run in a notebook.

python examples/chat.py
"""

# %% An engine: the model in this process and its children. In a terminal and in a notebook a bar shows the loading.
from headrace import Engine

engine = Engine(model_path="smollm2")
print(engine)

# %% A reply
messages = [{"role": "user", "content": "Name the capital of France. Answer in one sentence."}]
reply = engine.chat(messages, temperature=0, max_tokens=24)
print(reply.text)
print(f"({reply.finish_reason}, {reply.usage.completion_tokens} tokens)")

# %% The next turn: the model sees the conversation so far
messages += [reply.message, {"role": "user", "content": "Name one of its museums."}]
text = ""
for delta in engine.chat(messages, temperature=0, max_tokens=24, stream=True):
    text += delta.text
    print(delta.text, end="", flush=True)
print()

# %% What the model has seen, in tokens
ids = engine.tokenizer.encode(text)
print(len(ids), "tokens, the first:", [engine.tokenizer.decode([token_id]) for token_id in ids[:5]])

# %% The end; it also comes by itself when Python exits
engine.shutdown()
