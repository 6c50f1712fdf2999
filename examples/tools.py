"""A loop of tool calls: the model calls a function, gets its result, and answers. The cells (`# %%`) also run in a notebook.

    python examples/tools.py

A larger model decides for itself when to call (`tool_choice="auto"`, the default). The small model of this example is made to: `required` binds the
first reply to a call by a grammar.
"""

# %% An engine, and a function with its description
from typing import Any

from headrace import Engine

engine = Engine(model_path="smollm2")

STOCK = {"apples": 12, "pears": 0}


def count_fruit(kind: str) -> str:
    """How much of a kind there is."""
    return f"There are {STOCK[kind]} {kind} in the shop."


FUNCTIONS = {"count_fruit": count_fruit}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "count_fruit",
            "description": "How many pieces of a kind of fruit are in the shop",
            "parameters": {
                "type": "object",
                "properties": {"kind": {"enum": list(STOCK)}},
                "required": ["kind"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]

# %% The loop: as long as there are calls, carry them out and ask again
messages: list[dict[str, Any]] = [{"role": "user", "content": "How many apples are in the shop?"}]
reply = engine.chat(messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0)
for _ in range(4):
    if not reply.tool_calls:
        break
    messages.append(reply.message)
    for call in reply.tool_calls:
        result = FUNCTIONS[call.name](**call.parsed())
        print(f"{call.name}({call.arguments}) -> {result}")
        messages.append(call.result(result))
    reply = engine.chat(messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=32)
print(reply.text)

# %%
engine.shutdown()
