"""Routes of embedding models, rerankers and classifiers.

Read first: protocol.py (what all share: fields of requests, which model can do what, vectors as JSON), calls.py (one request as calls of the
front end that are sent one after the other).

- embed.py, encode.py (and classify), rerank.py, score.py: the routes; `/v1/embeddings` is in `server/openai/`, Ollama's are in `server/ollama/`.
- pairs.py: the score of a query and a document, for each kind of model.
"""
