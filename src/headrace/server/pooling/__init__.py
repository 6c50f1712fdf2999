"""Routes of embedding models, rerankers and classifiers.

Read first: calls.py (one request as calls of the front end that are sent one after the other), kinds.py (which model can do what).

- protocol.py: the fields that all these routes share, and their counts of tokens.
- replies.py: vectors as JSON, and long replies in pieces.
- embed.py, encode.py, classify.py, rerank.py, score.py: the routes; `/v1/embeddings` is in `server/openai/`, Ollama's routes are in `server/ollama/`.
- pairs.py: the score of a query and a document, for each kind of model; judge.py: by a model that generates.
"""
