"""The OpenAI-compatible routes.

Read first: base.py (what generation routes share), chat.py, chat_request.py (messages and tools), media_parts.py (media in messages),
protocol.py (bodies).

completions.py, embeddings.py, models.py, tokenize.py, token_details.py (what clients of vLLM ask for beside the text),
structured_outputs.py (what the output must match), thinking.py (how much a chat shall think).
"""
