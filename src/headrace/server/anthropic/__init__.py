"""Anthropic's routes: messages and their token counts.

- messages.py: the handlers, a reply from the events of the output, marks of `cache_control` as pins. Read it first.
- protocol.py: bodies.
- request.py: a body (its blocks and tools) as a conversation and sampling parameters.
"""
