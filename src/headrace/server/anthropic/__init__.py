"""Anthropic's routes: messages and their token counts.

- messages.py: the handlers. Read it first.
- protocol.py: bodies.
- request.py: a body (its blocks and tools) as a conversation and sampling parameters.
- reply.py: a reply and the events of a stream, from the events of the output.
"""
