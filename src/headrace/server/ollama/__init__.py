"""Ollama's API under `/api/`.

Read first: protocol.py (bodies, and options as sampling parameters), generation.py (`/api/chat` and `/api/generate`).

- chat_request.py: messages and tools as a conversation.
- embed.py: `/api/embed` and `/api/embeddings`.
- models.py: the routes about models and the server.
"""
