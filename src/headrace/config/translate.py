"""Options as other servers write them, translated to ours: words of a command line, and entries of a file.

Owns the reading of `config.other_servers`. Pure: what is to be logged is returned.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.config.other_servers import CHECKPOINT_FORMATS, COUNTS, LISTS, VALUES, Alias, Already, Refused, find
from headrace.errors import ConfigError

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(slots=True)
class Translation:
    """words: ours. notes: lines to log. unless: (option, field, value) of accepted options that a value of ours contradicts. names: further words of
    --served-model-name."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unless: list[tuple[str, str, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def has_model(self) -> bool:
        """Whether an option names the model."""
        return not {"--model-path", "--model", "-m"}.isdisjoint(self.words)

    def free_last_name(self) -> None:
        """The last of several words of --served-model-name is the command's argument: `serve --served-model-name a MODEL`."""
        if self.names:
            at = self.words.index(_flag("served_model_name")) + 1
            self.words[at] = self.words[at].removesuffix("," + self.names[-1])
            self.words.append(self.names.pop())

    def check(self, chosen: Mapping[str, Any]) -> None:
        """Raises ConfigError when an option that was accepted as already so is contradicted. chosen: our fields."""
        for option, name, value in self.unless:
            if str(chosen.get(name)).lower() == value:
                given = _flag(name) if value == "true" else f"{_flag(name)} {value}"
                raise ConfigError(f"{option} cannot be combined with {given}")


def translate(words: Sequence[str], own: Mapping[str, bool], takes_word: bool = False) -> Translation:
    """The words of a command line in our options.

    own: our options as typed, and whether each takes a value. takes_word: the command has an argument that is no option, such as a model. Unknown
    options stay as they are. Raises ConfigError for an option that is known not to be supported.
    """
    done = Translation()
    rest = _Words(words)
    has_word = False
    for word in rest:
        if word == "--":
            done.words += [word, *rest]
            break
        if not word.startswith("-") or word == "-":
            done.words.append(word)
            has_word = True
            continue
        name, equals, value = word.partition("=")
        if name not in own and name.startswith("--"):
            name = name.replace("_", "-")
        if name in own:
            _own(name, value if equals else None, own[name], rest, done)
        elif not _translated(name, value if equals else None, rest, own, done):
            done.words.append(word)
    if takes_word and not has_word and not done.has_model:
        done.free_last_name()
    return done


class _Words:
    """The words of a command line, read one by one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._at = 0

    def __iter__(self) -> Iterator[str]:
        while self._at < len(self._words):
            self._at += 1
            yield self._words[self._at - 1]

    def take(self, pattern: str = ".*") -> str | None:
        """The next word, if there is one and it matches."""
        if self._at < len(self._words) and re.fullmatch(pattern, self._words[self._at], re.DOTALL):
            self._at += 1
            return self._words[self._at - 1]
        return None


def _own(name: str, value: str | None, takes_value: bool, rest: _Words, done: Translation) -> None:
    if not takes_value:
        done.words.append(name if value is None else f"{name}={value}")
        return
    value = rest.take() if value is None else value
    if value is None:
        done.words.append(name)
        return
    _set(name.lstrip("-").replace("-", "_"), name, value, rest, done)


def _set(field_name: str, option: str, value: str, rest: _Words, done: Translation) -> None:
    """Append one of our options with a value, as we write it."""
    if field_name == "quantization" and value in CHECKPOINT_FORMATS:
        done.notes.append(f"{option} {value}: checkpoints are served in the format that they have")
        return
    if field_name in LISTS:
        value = _joined(option, value)
        while (more := rest.take(LISTS[field_name])) is not None:
            value += "," + more
            if field_name == "served_model_name":
                done.names.append(more)
    value = VALUES.get(field_name, {}).get(value, value)
    done.words += [option, value]


def _joined(option: str, text: str) -> str:
    """A JSON list of texts or numbers with commas between them; any other text as it is."""
    if not text.startswith("["):
        return text
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON: {error}") from error
    if not all(isinstance(item, str | int) for item in items):
        raise ConfigError(f"{option} takes a list of texts or numbers, got {text:.80}")
    return ",".join(map(str, items))


def _translated(name: str, value: str | None, rest: _Words, own: Mapping[str, bool], done: Translation) -> bool:
    """Translate an option that is not ours; False if it is unknown or not for this command."""
    entry, asked = find(name), True
    if entry is None and name.startswith("--no-"):
        entry, asked = find("--" + name.removeprefix("--no-")), False
    match entry:
        case Refused():
            if asked:
                raise ConfigError(f"{name} is not an option here: {entry.says}")
        case Alias() if all(_flag(field_name) in own for field_name in entry.sets):
            _alias(entry, name, value, asked, rest, done)
        case Already():
            _already(entry, name, value, asked, rest, done)
        case _:
            return False
    return True


def _alias(entry: Alias, name: str, value: str | None, asked: bool, rest: _Words, done: Translation) -> None:
    if entry.is_switch:
        if not _is_on(name, value, rest, asked):
            return
        value = ""
    elif value is None:
        value = rest.take()
    if value is None:
        raise ConfigError(f"{name} needs a value")
    if COUNTS.intersection(entry.sets):
        value = _count(value)
    for field_name, fixed in entry.sets.items():
        if fixed == "true":
            done.words.append(_flag(field_name))
        else:
            _set(field_name, _flag(field_name), value if fixed is None else fixed, rest, done)
    if entry.says:
        done.notes.append(f"{name}: {entry.says}")


def _count(text: str) -> str:
    """`25.6k` -> `25600`, `2K` -> `2048`; any other text as it is."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text):
        step = 1000 if found[2].islower() else 1024
        return str(int(float(found[1]) * step ** ("kmg".index(found[2].lower()) + 1)))
    return text


def _already(entry: Already, name: str, value: str | None, asked: bool, rest: _Words, done: Translation) -> None:
    if entry.values:
        value = rest.take() if value is None else value
        if value is None:
            raise ConfigError(f"{name} needs a value")
        if value not in entry.values:
            raise ConfigError(f"{name} {value:.80} is not possible here: {entry.otherwise}")
        done.notes.append(f"{name} {value}: {entry.says}")
    elif _is_on(name, value, rest, asked):
        done.notes.append(f"{name}: {entry.says}")
    elif entry.unless is None:
        raise ConfigError(f"{name}{f'={value}' if value else ''} is not possible here: {entry.otherwise or entry.says}")
    else:
        field_name, opposite = entry.unless
        done.words += {"true": [_flag(field_name)], "false": [_flag(f"no_{field_name}")]}.get(
            opposite, [_flag(field_name), opposite]
        )
        return
    if entry.unless is not None:
        done.unless.append((name, *entry.unless))


def _is_on(name: str, value: str | None, rest: _Words, asked: bool) -> bool:
    """Whether a switch is turned on: `--x`, `--x=true`, `--x True`, and not `--no-x`."""
    if value is None:
        value = rest.take("[Tt]rue|[Ff]alse") or "true"
    if value.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"{name} takes true or false, got {value!r:.80}")
    return asked == (value.lower() in _TRUE)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
