"""OpenAI's Responses API: `/v1/responses`.

- serving.py: the routes. Read it first.
- protocol.py: the body.
- items.py: items of the input as messages.
- tools.py: tools and tool choices.
- request.py: a body as a conversation and sampling parameters.
- truncation.py: conversations that are too long.
- output.py: events of the model's output as items, and as the events of a stream.
- reply.py: the response object and its stream.
- store.py: responses that are kept.
"""
