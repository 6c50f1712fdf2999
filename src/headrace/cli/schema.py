"""A JSON schema given on the command line or in the chat: a file that holds it, or its JSON.

Runs in the main process, before a model is loaded: what is no schema is refused at once.
"""

from pathlib import Path

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
