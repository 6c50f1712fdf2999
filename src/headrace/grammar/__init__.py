"""Grammars: what a request's output must match, compiled with llguidance into masks over the vocabulary.

Read first: compiler.py, which takes a `GrammarSpec` (messages/grammar.py) and gives a `CompiledGrammar`.

- Compiling: compiler.py (each text once; what is compiled and refused is kept, within a limit), compile_pool.py (child
  processes that try a grammar, with limits of time and memory), compile_child.py (what such a child runs)
- From a request to the library's text: source.py, json_schema.py, schema_walk.py (also what routes add to a schema),
  closed_objects.py (objects without keys of the model's own), schema_patterns.py (strings), schema_logic.py and schema_rewrite.py
  (keywords that the library does not have), structural_tag.py, gbnf.py, lark.py; refusals.py (why not, in plain words)
- Following an output: matcher.py (`TokenMask`), vocabulary.py (a model's tokens as bytes, and how much work the library may do)
"""
