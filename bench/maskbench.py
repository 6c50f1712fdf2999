"""MaskBench (guidance-ai/jsonschemabench): which JSON schemas are accepted, are their masks right, and how long do they take.

    .venv/bin/python -m bench.maskbench FOLDER [--model smollm2] [--sample N] [--coerce] [--output FILE]

FOLDER is a checkout's `maskbench/data`. Each schema is compiled as a request's would be (one thread, no cache). Each of its instances is then
written as `json.dumps` does, and its tokens are followed one by one, with a mask before each. Printed for each group: schemas accepted, valid
instances refused, invalid ones let through. `--coerce` says `"x-guidance": {"coerce_one_of": true}` in every schema.

JSON has no order of properties and several ways to write a number, and a grammar has one: a valid instance counts as accepted if it is in some order
of its properties, with its numbers with or without an exponent. In it, a number with a fraction of 0 is written without. An invalid instance is let
through if it is as `json.dumps` writes it, or without exponents. Instances that are invalid only by a `format` that the grammar takes for an
annotation are counted apart.
"""

import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance

from bench.program import parser_of, write_report
from headrace.benchmark.figures import percentile
from headrace.checkpoint.names import resolve_model
from headrace.errors import RequestError
from headrace.grammar.compile_child import probe
from headrace.grammar.matcher import LibraryError, MatcherTokens, Template
from headrace.grammar.schema_walk import subschemas
from headrace.grammar.source import explain, library_text
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec
from headrace.text.tokenizers import Tokenizer, load_tokenizer

MADE_UP = ("Handwritten", "Synthesized")
"""Groups of schemas that were written to be hard. The others are from the world."""

SLOW_S = 0.5
MAX_ATTEMPTS = 20_000
"""Of finding an order of properties: pieces of text that are tried."""


@dataclass(slots=True)
class Group:
    """What became of one group. refused_valid, accepted_invalid: "file#test". accepted_by_format: as the module says.
    slow: files that took more than half a second to compile, the refused ones too."""

    schemas: int = 0
    accepted: int = 0
    valid: int = 0
    invalid: int = 0
    refused_valid: list[str] = field(default_factory=list)
    accepted_invalid: list[str] = field(default_factory=list)
    accepted_by_format: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Times:
    """Milliseconds. compile: from the request's text to a matcher; first_mask: with the lexer's first states; probe: the short outputs that a
    compile child tries; mask: each later one."""

    compile: list[float] = field(default_factory=list)
    first_mask: list[float] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)


class Bench:
    """Compiles schemas and follows instances over one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
        self._tokens = MatcherTokens(vocabulary, partial(tokenizer.encode, add_special_tokens=False))
        self._words = self._tokens.empty_mask()
        self.times = Times()

    def compile(self, schema: Any) -> llguidance.LLMatcher:
        """A matcher whose first mask was computed. Raises RequestError for a schema that is refused."""
        spec = GrammarSpec("json_schema", json.dumps(schema), "json_schema")
        begin = time.perf_counter()
        text = library_text(spec)
        matcher = llguidance.LLMatcher(self._tokens.library, text, log_level=0, limits=self._tokens.limits)
        built = time.perf_counter()
        if not matcher.is_error():
            self._fill(matcher)
        if matcher.is_error():
            raise explain(spec, matcher.get_error())
        self.times.compile.append((built - begin) * 1e3)
        self.times.first_mask.append((time.perf_counter() - built) * 1e3)
        self._probe(spec, text)
        return matcher

    def _probe(self, spec: GrammarSpec, text: str) -> None:
        """What a compile child does then, with a matcher of its own. Raises RequestError."""
        try:
            template = Template(self._tokens, text)
            begin = time.perf_counter()
            probe(self._tokens, template)
        except LibraryError as err:
            raise explain(spec, err.words) from None
        self.times.probe.append((time.perf_counter() - begin) * 1e3)

    def accepts(self, template: llguidance.LLMatcher, text: str) -> bool:
        """Whether the masks allow each token of a text, and then its end. Raises RuntimeError when the matcher fails."""
        matcher = template.deep_copy()
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            begin = time.perf_counter()
            self._fill(matcher)
            self.times.mask.append((time.perf_counter() - begin) * 1e3)
            if matcher.is_error():
                raise RuntimeError(matcher.get_error())
            if not int(self._words[token // 32]) >> token % 32 & 1:
                return False
            if not matcher.consume_token(token):
                raise RuntimeError(f"the mask allows token {token}, the matcher does not: {matcher.get_error()}")
        return matcher.is_accepting()

    def _fill(self, matcher: llguidance.LLMatcher) -> None:
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)


def written(value: Any) -> str:
    """As JSON on one line, numbers with a fraction of 0 without it, and without exponents."""
    return without_exponents(_whole(value))


def without_exponents(value: Any) -> str:
    """As JSON on one line."""
    if isinstance(value, dict):
        items = (f"{json.dumps(name, ensure_ascii=False)}: {without_exponents(item)}" for name, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(without_exponents, value)) + "]"
    shown = json.dumps(value, ensure_ascii=False)
    return f"{Decimal(shown):f}" if isinstance(value, float) and "e" in shown else shown


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


class OrderSearch:
    """Looks for an order of properties in which the grammar takes a value: key by key, those first that the schema lists first."""

    def __init__(self, tokenizer: Tokenizer, matcher: llguidance.LLMatcher, schema: Any) -> None:
        self._tokenizer = tokenizer
        self._template = matcher
        self._matcher = matcher
        lists = [[*names(part.get("properties")), *names(part.get("required"))] for _, part in subschemas(schema)]
        self._known: Sequence[Sequence[str]] = [list(dict.fromkeys(order)) for order in lists if order]
        self._in_text = [list(dict.fromkeys(name for order in self._known for name in order))]
        self._steps = 0

    def finds(self, value: Any) -> bool:
        """Whether there is one, within a bounded number of attempts: by the schema that has most of the names, then in the order of the text."""
        sys.setrecursionlimit(100_000)
        return any(self._finds(value, known) for known in (self._known, self._in_text))

    def _finds(self, value: Any, known: Sequence[Sequence[str]]) -> bool:
        self._known, self._steps, self._matcher = known, 0, self._template.deep_copy()
        return self._take(value, self._matcher.is_accepting)

    def _take(self, value: Any, then: Callable[[], bool]) -> bool:
        if isinstance(value, dict):
            return self._text("{", lambda: self._properties(value, _by_overlap(list(value), self._known), "", then))
        if isinstance(value, list):
            return self._text("[", lambda: self._items(value, 0, then))
        texts = dict.fromkeys((json.dumps(value, ensure_ascii=False), written(value)))
        return any(self._text(text, then) for text in texts)

    def _properties(self, value: dict[str, Any], left: list[str], comma: str, then: Callable[[], bool]) -> bool:
        if not left:
            return self._text("}", then)
        for name in left:
            rest = [other for other in left if other != name]
            key = f"{comma}{json.dumps(name, ensure_ascii=False)}: "
            if self._text(key, partial(self._take, value[name], partial(self._properties, value, rest, ", ", then))):
                return True
        return False

    def _items(self, value: list[Any], at: int, then: Callable[[], bool]) -> bool:
        if at == len(value):
            return self._text("]", then)
        following = partial(self._take, value[at], lambda: self._items(value, at + 1, then))
        return self._text(", ", following) if at else following()

    def _text(self, text: str, then: Callable[[], bool]) -> bool:
        self._steps += 1
        if self._steps > MAX_ATTEMPTS:
            return False
        self._matcher.compute_bitmask()  # which renews the fuel
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        taken = self._matcher.try_consume_tokens(ids)
        if taken == len(ids) and then():
            return True
        self._matcher.rollback(taken)
        return False


def names(value: Any) -> list[str]:
    """The names in a `properties` or a `required`."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, dict | list) else []


def _by_overlap(keys: list[str], known: Sequence[Sequence[str]]) -> list[str]:
    """Take the known order that has the most of the keys, then the one that has the most of the rest, and so on."""
    left = list(keys)
    found: list[str] = []
    while left:
        best = max(known, key=lambda order: len(set(order) & set(left)), default=())
        taken = [name for name in best if name in left]
        if not taken:
            break
        found += taken
        left = [name for name in left if name not in taken]
    return found + left


def follow(bench: Bench, matcher: llguidance.LLMatcher, schema: Any, test: dict[str, Any]) -> bool:
    """Whether an instance is accepted; a valid one in any order of its properties."""
    if not test["valid"]:
        # In draft 4, 1.0 is no integer: the fraction stays.
        texts = dict.fromkeys((json.dumps(test["data"], ensure_ascii=False), without_exponents(test["data"])))
        return any(bench.accepts(matcher, text) for text in texts)
    if bench.accepts(matcher, written(test["data"])):
        return True
    return OrderSearch(bench.tokenizer, matcher, schema).finds(_whole(test["data"]))


def valid_without_formats(schema: Any, value: Any) -> bool:
    """Whether an instance is valid when formats are annotations."""
    try:
        return bool(jsonschema_rs.validator_for(schema, validate_formats=False).is_valid(value))
    except (ValueError, jsonschema_rs.ReferencingError):
        return False


def group_of(path: Path) -> str:
    """The group that a file belongs to, by its name."""
    name = path.name.partition("---")[0]
    return "BFCL" if name.startswith("BFCL") else "JME" if name.startswith("JME") else name


def run_file(bench: Bench, path: Path, group: Group, coerce: bool) -> str | None:
    """One schema with its instances. Returns why it was refused."""
    case = json.loads(path.read_text())
    schema = case["schema"]
    asked = {**schema, "x-guidance": {"coerce_one_of": True}} if coerce and isinstance(schema, dict) else schema
    group.schemas += 1
    begin = time.perf_counter()
    try:
        matcher = bench.compile(asked)
    except RequestError as err:
        return err.message
    finally:
        if (took := time.perf_counter() - begin) > SLOW_S:
            group.slow.append(f"{path.name}: {took:.2f} s")
    group.accepted += 1
    for i, test in enumerate(case["tests"]):
        name = f"{path.name}#{i}"
        try:
            accepted = follow(bench, matcher, schema, test)
        except RuntimeError as err:
            group.refused_valid.append(f"{name}: {err}")
            continue
        if test["valid"]:
            group.valid += 1
            if not accepted:
                group.refused_valid.append(name)
        else:
            group.invalid += 1
            if accepted and valid_without_formats(schema, test["data"]):
                group.accepted_by_format.append(name)
            elif accepted:
                group.accepted_invalid.append(name)
    return None


def summary(values: Sequence[float]) -> dict[str, float]:
    """Of times in milliseconds."""
    ordered = sorted(values)
    shown = {f"p{percent:g}": round(percentile(ordered, percent), 4) for percent in (50, 90, 99, 99.9)}
    return {**shown, "max": round(ordered[-1], 3), "mean": round(statistics.mean(ordered), 4), "count": len(ordered)}


def totals(groups: dict[str, Group]) -> dict[str, Any]:
    """Over the groups that are from the world."""
    real = [group for name, group in groups.items() if name not in MADE_UP]
    schemas, accepted = sum(group.schemas for group in real), sum(group.accepted for group in real)
    return {
        "groups": len(real),
        "schemas": schemas,
        "accepted": accepted,
        "accepted_percent": round(100 * accepted / max(schemas, 1), 2),
        "refused_valid": sum(len(group.refused_valid) for group in groups.values()),
        "accepted_invalid": sum(len(group.accepted_invalid) for group in groups.values()),
        "accepted_by_format": sum(len(group.accepted_by_format) for group in groups.values()),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2", help="whose vocabulary is used")
    parser.add_argument("--sample", type=int, help="use only this many schemas, chosen at random (seed 11)")
    parser.add_argument("--coerce", action="store_true", help="take every oneOf as anyOf")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.json"))
    if options.sample:
        files = sorted(random.Random(11).sample(files, options.sample))
    bench = Bench(load_tokenizer(resolve_model(options.model)))
    groups: dict[str, Group] = {}
    refusals: Counter[str] = Counter()
    for path in files:
        refused = run_file(bench, path, groups.setdefault(group_of(path), Group()), options.coerce)
        if refused is not None:
            refusals[refused.partition(" (at ")[0]] += 1
    found = {
        "library": llguidance.__version__,
        "model": options.model,
        "coerce_one_of": options.coerce,
        "total": totals(groups),
        "milliseconds": {name: summary(values) for name, values in asdict(bench.times).items()},
        "refusals": dict(refusals.most_common(40)),
        "groups": {name: asdict(group) for name, group in sorted(groups.items())},
    }
    write_report(found, options.output)


if __name__ == "__main__":
    main()
