"""Grammars: what a request's output must match, compiled with llguidance into masks over the vocabulary.

Read first: compiler.py, which takes a `GrammarSpec` (messages/grammar.py) and gives a `CompiledGrammar`.

- Compiling: compiler.py (each text once; what is compiled and refused is kept, within a limit; the child processes that try a grammar, with limits
  of time and memory), compile_child.py (what such a child runs)
- From a request to the library's text: source.py (and why not, in plain words), json_schema.py (also keywords that the library does not have),
  schema_walk.py (also what routes add to a schema), closed_objects.py (objects without keys of the model's own), schema_patterns.py (strings),
  schema_logic.py (what can be shown of schemas), structural_tag.py, gbnf.py, lark.py
- Following an output: matcher.py (`TokenMask`), vocabulary.py (a model's tokens as bytes, and how much work the library may do)
"""
