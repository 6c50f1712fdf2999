"""Anthropic's routes: messages and their token counts.

- messages.py: the handlers, and a reply from the events of the output. Read it first.
- protocol.py: bodies.
- cache_marks.py: marks of `cache_control` as pins.
- request.py: a body (its blocks and tools) as a conversation and sampling parameters.
"""
