"""Anthropic's routes: messages, their token counts and models.

Read first: messages.py (the handlers), protocol.py (bodies).

- blocks.py: the blocks of its messages.
- request.py: a body as a conversation and sampling parameters.
- tools.py: the tools of a body, and those that are not offered to the model.
- reply.py: a reply and the events of a stream, from the events of the output.
- models.py: what is served, in Anthropic's form.
"""
