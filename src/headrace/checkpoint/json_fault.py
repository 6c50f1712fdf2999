"""What is wrong with a file that should hold JSON, told without a byte of it.

Messages of the control routes reach clients, and a client may name a path: what they say about a file must not be a way to read it.
"""

import json


def json_fault(error: ValueError | RecursionError) -> str:
    """In words, for what `json.loads` raised. No content of the file."""
    match error:
        case json.JSONDecodeError():
            return f"{error.msg.lower()} at line {error.lineno}, column {error.colno}"
        case UnicodeDecodeError():
            return f"it is not UTF-8 at byte {error.start}"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return "it holds a value that is out of range"
