"""Grammars: what a request's output must match, compiled with llguidance into masks over the vocabulary.

Read compiler.py first: it takes a `GrammarSpec` (`messages/grammar.py`) and gives a `CompiledGrammar`.
- compiler.py: compiles once for each text, bounded in bytes, refusals too; what passes in a child is compiled here
- compile_pool.py: child processes that try a grammar, with limits of time and memory
- compile_child.py: what such a child runs
- source.py: from a `GrammarSpec` to the library's own text of it
- json_schema.py: a JSON schema as the library takes it, and where it is refused
- structural_tag.py: structural tags as lark
- matcher.py: a sequence's `TokenMask` over the library's matcher
- vocabulary.py: the tokens of a model as bytes, and the library's tokenizer made of them
"""
