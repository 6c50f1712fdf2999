"""Reading what models write: reasoning, content and tool calls, out of tokens and text, while they are generated.

Read first: base.py, the pieces that go in and the events that come out; then engine.py, the one machine that reads every format.

- Choosing: registry.py (formats by name and by chat template; `OutputFormat`)
- Limits: reasoning_tokens.py (the tokens that begin and end reasoning)
- The machine: engine.py, program.py (a format bound to a tokenizer), table.py (how a format is written down)
- Formats that checkpoints describe: response_template.py, region_values.py
- Parts of formats: json_text.py (calls as JSON), parameters.py (parameters as text, made JSON by their schemas), python_call.py, gemma_call.py
- Making a model write calls: call_grammar.py, value_grammar.py (grammars in the model's own format)
- formats/: one table for each format
"""
