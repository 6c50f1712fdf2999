"""Grammars: what a request's output must match, compiled with llguidance into masks over the vocabulary.

Read `compiler` first: it takes a `GrammarSpec` (`messages/grammar.py`) and gives a `CompiledGrammar`.
- compiler: compiles once for each text, bounded in bytes, refusals too; what passes in a child is compiled here
- compile_pool: child processes that try a grammar, with limits of time and memory
- compile_child: what such a child runs
- source: from a `GrammarSpec` to the library's own text of it
- json_schema: a JSON schema as the library takes it, and where it is refused
- structural_tag: structural tags as lark
- matcher: a sequence's `TokenMask` over the library's matcher
- vocabulary: the tokens of a model as bytes, and the library's tokenizer made of them
"""
