"""What is given on the command line as JSON or as a file that holds it: a JSON schema, a list of tools.

Runs in the main process, before a model is loaded: what is neither is refused at once.
"""

import json
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, RequestError
from headrace.sampling.grammar_fields import GrammarFields


def read_schema(given: str) -> str:
    """The schema as JSON. given: its JSON (an object, `true` or `false`), else the path of a file.

    Raises ConfigError for a file that cannot be read and for JSON that is no schema. Whether it can be followed is found out when it is used.
    """
    is_json = given.lstrip().startswith("{") or given in ("true", "false")
    source = "the schema" if is_json else given
    try:
        text = given if is_json else Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the schema {given} cannot be read: {reason}") from None
    try:
        spec = GrammarFields(json_schema=text).grammar_spec()
    except RequestError as error:
        raise ConfigError(error.message.replace("json_schema", source, 1)) from None
    if spec is None:
        raise ConfigError(f"{source} is empty")
    return spec.text


def read_tools(given: str) -> list[dict[str, Any]]:
    """The tools as OpenAI's API takes them. given: their JSON, a list, else the path of a file.

    A tool is `{"type": "function", "function": {"name", "description", "parameters"}}`, or its `function` alone. Raises ConfigError.
    """
    from headrace.server.openai.chat_request import tools_of

    is_json = given.lstrip().startswith("[")
    source = "the list of tools" if is_json else given
    try:
        listed = json.loads(given if is_json else Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the tools in {given} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from None
    if not isinstance(listed, list) or not listed or not all(isinstance(tool, dict) for tool in listed):
        raise ConfigError(f"{source} must be a list of tools, each an object with a name and parameters")
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed]
    try:
        tools_of(tools)
    except RequestError as error:
        raise ConfigError(f"{source}: {error.message}") from None
    return tools
