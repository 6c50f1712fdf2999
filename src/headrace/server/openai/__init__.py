"""The OpenAI-compatible routes.

Read first: base.py (what generation routes share), chat.py, chat_request.py (messages, tools and thinking as a conversation), protocol.py (bodies),
fields.py (fields that several bodies have, and what the output must match).

completions.py, embeddings.py, logprobs.py, models.py, tokenize.py.
"""
