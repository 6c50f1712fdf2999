"""What every chat API shares: a conversation, its prompt, the call of the engine, and its output as events.

- conversation.py: messages, tools and choices, and their checks. Read it first.
- parts.py: parts of messages: media, and what is written out as text (documents, what a vendor's own tools did).
- custom_tools.py: tools that take a text instead of arguments.
- prompt.py: renders and tokenizes a conversation, also for templates that know no tools or no media.
- calls.py: a conversation as a call of the engine, and what its output must match.
- choice_stream.py: the output of one choice as events.
"""
