"""Grammars of calls: the model's own format, with the arguments bound by their schemas."""

import json
import random

import jsonschema_rs
import llguidance
import numpy as np
import pytest
from parser_harness import Output, make_format, tokens_of
from renderers import MARKS, dumps, python_calls
from renderers import RENDERERS as OWN_RENDERERS

from headrace.errors import RequestError
from headrace.grammar.source import library_text
from headrace.grammar.vocabulary import parser_limits
from headrace.messages.grammar import GrammarSpec
from headrace.parsers.call_grammar import Named, call_grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"name": "weather", "parameters": SCHEMA},
    {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
GOOD = ("weather", {"city": "Paris é", "unit": "C", "days": 7, "tags": ["a"], "at": {"x": 1}})
SMALL = ("weather", {"city": "Oslo", "days": 0})
NOW = ("now", {})
BAD = [
    ("weather", {"city": "Paris", "unit": "K", "days": 7}),
    ("weather", {"city": "Paris", "days": [7]}),
    ("weather", {"city": "Paris"}),
    ("weather", {"city": "Paris", "days": 7, "at": {"x": "1"}}),
    ("now", {"city": "Paris"}),
    ("later", {}),
]
# Within lists and objects, the grammar writes Python's strings between double quotes.
RENDERERS = {
    **OWN_RENDERERS,
    "pythonic": python_calls("", "", dumps),
    "lfm2": python_calls("<|tool_call_start|>", "<|tool_call_end|>", dumps),
}
ONE_CALL = {"gpt-oss"}  # the end of a call is the end of the output


def mistral_list(calls):
    """As models write it whose tokenizer has no token before arguments."""
    return f"[TOOL_CALLS] [{', '.join(dumps({'name': name, 'arguments': arguments}) for name, arguments in calls)}]"


class Bytes:
    """A tokenizer of single bytes and a format's special tokens."""

    def __init__(self, special):
        self.is_tokenizer_wrapper = True
        self.special = {text: 257 + i for i, text in enumerate(special)}
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"] + [text.encode() for text in special]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256
        self.bos_token_id = None

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


class Grammar:
    def __init__(self, grammar, special):
        self.vocabulary = Bytes(special)
        library = llguidance.LLTokenizer(self.vocabulary)
        spec = GrammarSpec("structural_tag", grammar.structural_tag, "tools")
        text = library_text(spec, self.vocabulary.special)
        self.template = llguidance.LLMatcher(library, text, log_level=0, limits=parser_limits(library.vocab_size))
        assert not self.template.is_error(), self.template.get_error()

    def takes(self, text):
        matcher = self.template.deep_copy()
        for part, token_id in tokens_of(text, self.vocabulary.special):
            ids = [token_id] if part in self.vocabulary.special else list(part.encode())
            if matcher.try_consume_tokens(ids) != len(ids):
                return False
        return matcher.is_accepting()

    def random_text(self, rng, max_tokens=600):
        """A text of random tokens that the grammar allows, drawn towards an end."""
        matcher = self.template.deep_copy()
        ids = []
        while len(ids) < max_tokens:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if matcher.is_accepting() and (allowed == [256] or rng.random() < 0.5):
                return b"".join(self.vocabulary.tokens[index] for index in ids).decode()
            printable = [index for index in allowed if 32 <= index < 127 or index > 256]
            ending = [index for index in printable if index in list(b'"}])</\\|<>') or index > 256]
            choices = [
                index for index in (ending if ending and rng.random() < 0.7 else printable or allowed) if index != 256
            ]
            token = rng.choice(choices)
            assert matcher.try_consume_tokens([token]) == 1
            ids.append(token)
        return None


def grammar(name, choice, with_special=True, tools=TOOLS, **options):
    special = MARKS.get(name, ()) if with_special else ()
    return Grammar(call_grammar(make_format(name, None, special), tools, choice, **options), special)


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", RENDERERS)
def test_required_calls_match_their_schemas(name, with_special):
    made = grammar(name, "required", with_special)
    write = RENDERERS[name] if name != "mistral" or with_special else mistral_list

    assert [call for call in (GOOD, SMALL, NOW) if not made.takes(write([call]))] == []
    assert [call for call in BAD if made.takes(write([call]))] == []
    assert not made.takes("")
    assert not made.takes("text")
    assert made.takes(write([SMALL, NOW])) == (name not in ONE_CALL)


@pytest.mark.parametrize("name", RENDERERS)
def test_named_and_single_calls(name):
    write = RENDERERS[name]
    named = grammar(name, Named("now"))
    single = grammar(name, "required", parallel=False)

    assert named.takes(write([NOW]))
    assert not named.takes(write([SMALL]))
    assert single.takes(write([SMALL]))
    assert not single.takes(write([SMALL, NOW]))


@pytest.mark.parametrize("name", RENDERERS)
def test_strict_functions_are_bound_where_the_model_chooses(name):
    made = grammar(name, "auto", strict_names={"weather"})
    write = RENDERERS[name]
    before = "<|channel|>final<|message|>" if name == "gpt-oss" else ""

    assert made.takes(f"{before}Just text, no call.")
    assert made.takes(write([GOOD]))
    assert not made.takes(write([BAD[1]]))
    assert made.takes(write([NOW]))
    assert not made.takes(write([("later", {})]))
    if name not in {"gpt-oss", "llama3_json", "pythonic"}:
        assert made.takes("Sure.\n" + write([SMALL]))


@pytest.mark.parametrize("name", RENDERERS)
def test_at_most_one_call(name):
    if name in ONE_CALL:
        assert call_grammar(make_format(name, None, MARKS[name]), TOOLS, "auto", parallel=False) is None
        return
    made = grammar(name, "auto", parallel=False)
    write = RENDERERS[name]

    assert made.takes(write([SMALL]))
    assert not made.takes(write([SMALL, NOW]))


def test_nothing_is_bound_without_need():
    assert call_grammar(make_format("hermes"), TOOLS, "auto") is None


@pytest.mark.parametrize("name", RENDERERS)
def test_calls_are_forbidden_by_their_first_token_or_by_its_text(name):
    special = MARKS.get(name, ())
    format = make_format(name, None, special)
    made = call_grammar(format, TOOLS, "none")
    if special and name != "deepseek_v32":
        assert made.structural_tag == ""
        first = {"gpt-oss": "<|call|>"}.get(name, special[0])
        assert format.special[first] in made.forbidden_ids
    elif name != "pythonic":
        assert not Grammar(made, special).takes(RENDERERS[name]([NOW]))
        assert Grammar(made, special).takes("text")


def test_reasoning_may_come_first():
    format = make_format("hermes", "qwen3")
    call = RENDERERS["hermes"]([NOW])
    made = Grammar(call_grammar(format, TOOLS, "required"), ())
    later = Grammar(call_grammar(format, TOOLS, "required", opens_reasoning=False), ())

    assert made.takes(f"<think>\nhm <b>\n</think>\n\n{call}")
    assert made.takes(call)
    assert not later.takes(f"<think>\nhm\n</think>\n\n{call}")
    assert later.takes(f"\n\n{call}")


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_reasoning_that_the_prompt_has_opened_ends_first(special):
    format = make_format("hermes", "qwen3", special)
    call = RENDERERS["hermes"]([NOW])
    made = Grammar(call_grammar(format, TOOLS, "required", in_reasoning=True), special)

    assert made.takes(f"hm <b> </think\n</think>\n\n{call}")
    assert made.takes(f"</think>{call}")
    assert not made.takes(call)
    assert not made.takes("hm</think>text")


def test_gpt_oss_thinks_and_announces_first():
    made = grammar("gpt-oss", "required")
    call = RENDERERS["gpt-oss"]([NOW])

    for text in ("<|channel|>analysis<|message|>hm", "<|channel|>commentary<|message|>Sure."):
        assert made.takes(f"{text}<|end|><|start|>assistant{call}")
    assert not made.takes("<|channel|>final<|message|>no")


def test_what_cannot_be_required():
    with pytest.raises(RequestError, match="'later'"):
        call_grammar(make_format("hermes"), TOOLS, Named("later"))
    with pytest.raises(RequestError, match="no tools"):
        call_grammar(make_format("hermes"), [], "required")
    with pytest.raises(RequestError, match="format"):
        call_grammar(make_format(None, "qwen3"), TOOLS, "required")


@pytest.mark.parametrize("name", RENDERERS)
def test_whatever_the_grammar_allows_is_parsed_as_valid_calls(name):
    """Also where marks are written as text, in the tokens of ordinary text."""
    special = MARKS.get(name, ())
    made = grammar(name, "required")
    rng = random.Random(3)
    validators = {tool["name"]: jsonschema_rs.validator_for(tool["parameters"]) for tool in TOOLS}
    texts = [text for text in (made.random_text(rng) for _ in range(6)) if text is not None]
    assert len(texts) >= 2
    for text in texts:
        for by_text in (False, True):
            output = Output(make_format(name, None, special), text, tools=TOOLS, by_text=by_text)
            if by_text:
                output.pieces = [(part, 1) for part, _ in output.tokens]
            parsed = output.whole()
            assert parsed.content == "" or name == "gpt-oss"  # which may announce a call
            assert parsed.calls
            for called, arguments in parsed.calls:
                validators[called].validate(json.loads(arguments))


def test_arguments_are_an_object_also_where_the_schema_does_not_say_so():
    """A function without parameters has no arguments."""
    want = {"type": "object", "properties": {}, "additionalProperties": False}
    shown = {"x": {"type": "integer"}}

    def arguments(tool):
        bound = call_grammar(make_format("hermes"), [{"name": "f", **tool}], "required")
        return json.loads(bound.structural_tag)["format"]["elements"][-1]["tags"][0]["content"]["json_schema"]

    assert arguments({}) == want
    assert arguments({"parameters": None}) == want
    assert arguments({"parameters": {}}) == want
    assert arguments({"parameters": {"properties": shown}}) == {"type": "object", "properties": shown}
    assert arguments({"parameters": {"type": "object", "properties": shown}}) == {"type": "object", "properties": shown}


TREE = {f"child{i}": {"$ref": "#/$defs/node"} for i in range(12)}
WIDE = {f"p{i}": {"type": "string"} for i in range(10_000)}


@pytest.mark.parametrize("name", ["gemma4", "functiongemma", "pythonic", "lfm2"])
@pytest.mark.parametrize(
    "properties",
    [WIDE, {"root": {"$ref": "#/$defs/node"}} | {f"p{i}": {"$ref": "#/$defs/node"} for i in range(500)}],
    ids=["wide", "tree"],
)
def test_a_notation_that_repeats_its_parts_is_not_written_out_without_bounds(name, properties):
    """Ordered pairs between commas take a part for every first one, in each object within another: far more than any memory."""
    schema = {"type": "object", "properties": properties, "$defs": {"node": {"type": "object", "properties": TREE}}}

    with pytest.raises(RequestError, match="grammar of more than") as caught:
        call_grammar(make_format(name), [{"name": "f", "parameters": schema}], "required")

    assert caught.value.param == "tools"
