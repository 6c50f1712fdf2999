"""Ollama's API under `/api/`.

Read first: protocol.py (bodies), generation.py (`/api/chat` and `/api/generate`).

- bodies.py: reads bodies, and notes what nobody knows.
- chat_request.py: messages and tools as a conversation.
- options.py: Ollama's options as sampling parameters.
- reply.py: lines of a stream, and whole replies.
- embed.py: `/api/embed` and `/api/embeddings`.
- models.py: the routes about models and the server.
"""
