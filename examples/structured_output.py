"""Output that matches a schema, a regular expression or a choice, whatever the model would like to say. The cells (`# %%`) also run in a notebook.

python examples/structured_output.py
"""

# %% An engine
import json

from headrace import Engine

engine = Engine(model_path="smollm2")

# %% JSON that matches a schema
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "kind": {"enum": ["bridge", "tower", "church"]},
    },
    "required": ["name", "year", "kind"],
    "additionalProperties": False,
}
question = [{"role": "user", "content": "Describe the Eiffel Tower as JSON with name, year and kind."}]
building = json.loads(engine.chat(question, json_schema=SCHEMA, temperature=0, max_tokens=64).text)
print(building)

# %% A regular expression: a date
question = [{"role": "user", "content": "When did people first walk on the moon? Answer as YYYY-MM-DD."}]
DATE = "[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
date = engine.chat(question, regex=DATE, temperature=0).text
print(date)

# %% One of several texts: a classifier
reviews = ["I loved every minute of it.", "The worst film that I have ever seen."]
prompts = [f"Review: {review}\nIs the review positive or negative? It is" for review in reviews]
verdicts = [
    reply["text"] for reply in engine.generate(prompts, {"choice": [" positive", " negative"], "temperature": 0})
]
print(verdicts)

# %%
engine.shutdown()
