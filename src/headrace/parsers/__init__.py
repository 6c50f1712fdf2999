"""Reading what models write: reasoning, content and tool calls, out of tokens and text, while they are generated.

Read first: base.py, the pieces that go in and the events that come out; then engine.py, the one machine that reads every format.

- Choosing: registry.py (formats by name and by chat template; `OutputFormat`; the tokens that begin and end reasoning)
- The machine: engine.py, program.py (a format bound to a tokenizer), table.py (how a format is written down)
- formats/: one table for each format, by kin
- Formats that checkpoints describe: response_template.py
- Parts of formats: call_readers.py (calls as JSON, in Python's notation, in Gemma's), parameters.py (parameters as text, made JSON by their schemas)
- Making a model write calls: call_grammar.py (grammars in the model's own format)
"""
