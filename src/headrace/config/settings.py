"""Options from a file (`--config`), from the environment (`HEADRACE_PORT=8000`) and from a Python program (`Engine(max_model_len=512)`).

Owns how their entries become values of `ServerArgs`. The command line wins over the environment, and the environment over the file
(config.cli). Entries may be written as SGLang and vLLM write them. Runs in the main process, before anything else.
"""

import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from headrace.config.other_servers import FALSE, LISTS, TRUE, VALUES, check_unless, find, is_dropped, translate
from headrace.config.server_args import ServerArgs
from headrace.config.server_options import flag
from headrace.errors import ConfigError

PREFIX = "HEADRACE_"
_FIELDS = {f.name: f for f in fields(ServerArgs)}


@dataclass(slots=True)
class Settings:
    """values: by field. origins: where each comes from, for messages. notes: lines to log. unless: as in `Translation`."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unless: list[tuple[str, str, str]] = field(default_factory=list)


_NOT_OPTIONS = ("HEADRACE_CACHE_DIR", "HEADRACE_CPU_ISA")
"""Variables that are read elsewhere."""


def own_options() -> dict[str, bool]:
    """Every option of ServerArgs as typed, and whether it takes a value."""
    own = {flag(name): f.type is not bool for name, f in _FIELDS.items()}
    own |= {flag(f"no_{name}"): False for name, f in _FIELDS.items() if f.default is True}
    return own | {"--model": True, "-m": True}


def variable(name: str) -> str:
    """The environment variable of a field: `max_loras` -> `HEADRACE_MAX_LORAS`."""
    return PREFIX + name.upper()


def from_environment(environ: Mapping[str, str], offered: Collection[str]) -> Settings:
    """The options that variables set; empty ones count as not set. Raises ConfigError, which names the variable.

    offered: fields that the command has; variables of others are not for it.
    """
    found = Settings()
    for name in (name for name in _FIELDS if name in offered):
        text = environ.get(variable(name), "")
        if name == "port" and text.startswith("tcp://"):
            found.notes.append(f"{variable(name)}={text} is Kubernetes' address of a service and not our port: ignored")
        elif text:
            _add(found, flag(name), text, variable(name))
    names = [variable(name) for name in _FIELDS]
    for name in environ:
        if (
            name.startswith(PREFIX)
            and name not in (*names, *_NOT_OPTIONS)
            and (near := difflib.get_close_matches(name, names, 1, 0.9))
        ):
            found.notes.append(f"{name} is not an option; did you mean {near[0]}?")
    return found


def from_file(path: Path) -> Settings:
    """The options in a .toml, .yaml or .yml file. Raises ConfigError, which names the file and the entry."""
    found = Settings()
    for key, value in _read(path).items():
        if value is None:
            continue
        if not _is_known(str(key)):
            raise ConfigError(f"{path}: there is no option {key}{_meant(str(key))}")
        _add(found, flag(str(key)), value, str(path))
    return found


def from_arguments(given: Mapping[str, Any]) -> Settings:
    """The arguments of a Python program: fields of `ServerArgs`, and options as SGLang and vLLM call them. Raises ConfigError."""
    found = Settings()
    if unknown := sorted(name for name in given if not _is_known(name)):
        raise ConfigError(f"unknown option: {', '.join(name + _meant(name) for name in unknown)}")
    for name, value in given.items():
        if name in _FIELDS and not _is_written_otherwise(name, value):
            _set(found, name, value, name)
        elif value is not None:
            _add(found, flag(name), value, name)
    check_unless(found.unless, found.values)
    return found


def _is_known(key: str) -> bool:
    option = flag(key)
    return option in own_options() or find(option) is not None or find("--" + option.removeprefix("--no-")) is not None


def _meant(key: str) -> str:
    known = [name[2:].replace("-", "_") for name in own_options() if name.startswith("--")]
    near = difflib.get_close_matches(key.replace("-", "_"), known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _is_written_otherwise(name: str, value: Any) -> bool:
    """Whether a value of an option of ours is one that other servers have for it."""
    if isinstance(value, list):
        return name in LISTS
    return isinstance(value, str) and (value in VALUES.get(name, ()) or is_dropped(name, value))


def _add(found: Settings, option: str, value: Any, origin: str) -> None:
    try:
        translation = translate(_words(option, value), own_options())
        words = iter(translation.words)
        for word in words:
            name, is_on = _field_of(word)
            f = _FIELDS[name]
            given = is_on if f.type is bool else _typed(f, next(words))
            _set(found, name, given, origin)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.message}") from None
    found.notes += [f"{origin}: {note}" for note in translation.notes]
    found.unless += translation.unless


def _set(found: Settings, name: str, value: Any, origin: str) -> None:
    if name in found.values:
        raise ConfigError(f"{flag(name)} is set twice")
    found.values[name], found.origins[name] = value, origin


def _words(option: str, value: Any) -> list[str]:
    """An entry as words of a command line."""
    takes_value = own_options().get(option)
    if takes_value is False:
        return _switch(option, value)
    f = _FIELDS[_field_of(option)[0]] if takes_value else None
    is_one = f is not None and "comma-separated" not in f.metadata["help"]
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, dict):
        value = json.dumps(value)
    elif isinstance(value, list):
        if f is not None and is_one and f.name not in LISTS:
            raise ConfigError(f"{option} takes one value, not a list")
        value = ",".join(map(str, value))
    elif f is not None and is_one and not isinstance(value, str) and str in (f.type, *get_args(f.type)):
        raise ConfigError(f"{option} must be text, got {value}; put it in quotes")
    return [f"{option}={value}"]


def _switch(option: str, value: Any) -> list[str]:
    text = str(value).lower()
    if text not in TRUE + FALSE or (isinstance(value, int | float) and not isinstance(value, bool)):
        raise ConfigError(f"{option} takes true or false, got {value!r:.80}")
    if text in TRUE:
        return [option]
    name, is_on = _field_of(option)
    if _FIELDS[name].default is True:
        return [flag(f"no_{name}") if is_on else flag(name)]
    return []


def _field_of(option: str) -> tuple[str, bool]:
    """The field of an option, and whether the option turns it on."""
    name = option.lstrip("-").replace("-", "_")
    if name in ("model", "m"):
        return "model_path", True
    return (name, True) if name in _FIELDS else (name.removeprefix("no_"), False)


def _typed(f: Field[Any], text: str) -> Any:
    if get_origin(f.type) is Literal:
        for choice in get_args(f.type):
            if text == str(choice):
                return choice
        raise ConfigError(f"{flag(f.name)} must be one of {', '.join(map(str, get_args(f.type)))}, got {text!r:.80}")
    kinds = get_args(f.type) or (f.type,)
    kind = next(kind for kind in (int, float, str) if kind in kinds)
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{flag(f.name)} must be {what}, got {text!r:.80}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config {path}: the name must end with .toml, .yaml or .yml")
    return _read_yaml(path, text)


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        entries = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if entries is None:
        return {}
    if not isinstance(entries, dict):
        raise ConfigError(f"{path} must hold options, one per line: name: value")
    if isinstance(root, yaml.MappingNode) and len(root.value) != len(entries):
        raise ConfigError(f"{path} sets an option twice")
    return entries
