"""Grammars that were made, or have happened, to take all that they can get: parameters of `/generate` by name."""

import json
from typing import Any

RECURSIVE = {"$ref": "#/$defs/node", "$defs": {"node": {"$ref": "#/$defs/node"}}}

HOSTILE: dict[str, dict[str, Any]] = {
    "5,000 properties": {
        "json_schema": {"type": "object", "properties": {f"property_{i}": {"type": "integer"} for i in range(5000)}}
    },
    "50,000 strings": {"json_schema": {"enum": [f"value {i}" for i in range(50_000)]}},
    "exponential automaton": {"regex": ".*a.{20}"},
    "long strings": {"json_schema": {"type": "string", "maxLength": 1_000_000}},
    "optional then required": {"regex": "(a?){3000}a{3000}"},
    "nested quantifiers": {"regex": "((a{0,100}){0,100}){0,100}"},
    "reference to itself": {"json_schema": RECURSIVE},
    "ambiguous": {"lark": 'start: s\ns: s s | "a" |'},
    "3,000 levels": {"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000},
    "a million alternatives": {"regex": "|".join(f"{i:x}" for i in range(100_000))},
    "deep brackets": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "left recursion": {"ebnf": 'root ::= root root | "a" | ""'},
    "many choices": {"choice": [f"choice {i} of many" for i in range(20_000)]},
    "all of all": {"json_schema": {"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(500)]}},
}
"""Each takes less than the 1 MiB of text that a grammar may have."""

assert all(len(json.dumps(params)) < 1 << 20 for params in HOSTILE.values())
