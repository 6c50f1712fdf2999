"""Child processes that do work which could cost too much memory or time, so that it costs a child its life and not the server's.

Read first: pool.py (the parent's side: children that are started when needed, asked one question at a time, killed when they take too long, and
replaced), child_side.py (what a child does around its work: limits, its end; and the messages over the socket between them).

Knows neither grammars nor images nor templates: `grammar.compiler`, `multimodal.loader` and `text.chat_templates` say what is asked.
"""
