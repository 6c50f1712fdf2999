"""OpenAI's Responses API: `/v1/responses`.

- serving.py: the routes. Read it first.
- protocol.py: the body.
- items.py: items of the input as messages.
- request.py: a body as a conversation (its tools, and what it loses if it is too long) and sampling parameters.
- reply.py: the response object, its items, and its stream.
- store.py: responses that are kept.
"""
