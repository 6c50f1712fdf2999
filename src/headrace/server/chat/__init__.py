"""What every chat API shares: a conversation, its prompt, the call of the engine, and its output as events.

- conversation.py: messages, tools and choices, and their checks. Read it first.
- prompt.py: renders and tokenizes a conversation, also for templates that know no tools.
- media.py: media as parts of messages, and in the prompt.
- written_items.py: documents, and what a vendor's own tools did, as text.
- custom_tools.py: tools that take a text instead of arguments.
- reply_grammar.py: what the output must match.
- thinking.py: a limit of reasoning.
- calls.py: a conversation as a call of the engine.
- choice_stream.py: the output of one choice as events.
- logprobs.py: logprobs of tokens.
"""
