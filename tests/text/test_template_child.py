"""Templates that nobody has read are rendered in a child: the same text, and what costs too much costs the child its life alone."""

import math
import signal
import sys

import pytest
from test_chat_templates import SPECIALS, byte_tokenizer, user

from headrace.child_pool.child_side import MIB
from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ModelError, RequestError
from headrace.processes.model_files import ModelFiles
from headrace.server.chat.prompt import _first_rendered
from headrace.text.chat_templates import ChatTemplate, TemplateChildren, chat_template_of, is_known
from headrace.text.template_sandbox import TemplateStoppedError
from smollm2_tokenizer import smollm2_tokenizer

SMOLLM2 = smollm2_tokenizer()
TAG = "{# one that nobody has read #}"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}<s>{% endfor %}{% endfor %}"
EVERYTHING = (
    "{{ messages | tojson }}{{ tools | tojson(indent=4) }}{{ documents }}{{ flag }}{{ date is defined }}<s>{% generation %}{{ kept | tojson }}"
    "{% endgeneration %}{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
)

DOUBLING = (
    "{% set ns = namespace(x='a' * 1000) %}{% for i in range(60) %}{% set ns.x = FORM %}{% endfor %}{{ ns.x | length }}"
)
LARGE = {
    "concatenation": DOUBLING.replace("FORM", "ns.x ~ ns.x"),
    "join": DOUBLING.replace("FORM", "[ns.x, ns.x] | join"),
    "translate": "{% set x = ('a' * 1000000).translate({97: 'b' * 1000000}) %}{{ x | length }}",
    "replace": "{% set x = ('a' * 1000000).replace('a', 'b' * 1000000) %}{{ x | length }}",
}
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}"
)
COMPILES_LONG = "{{ a }}" * 140_000


@pytest.fixture(scope="module")
def children():
    pool = TemplateChildren()
    yield pool
    pool.close()


@pytest.fixture
def narrow():
    pool = TemplateChildren(limit_s=0.5, memory_bytes=64 * MIB)
    yield pool
    pool.close()


def both(source, tokenizer, children):
    return [ChatTemplate(source, tokenizer.special_texts, tokenizer.named_tokens, where) for where in (None, children)]


def outcome(chat, *args, **options):
    try:
        return chat.render(*args, **options)
    except RequestError as error:
        return type(error), error.message, error.param


CHATS = [
    (user("hello é 😀"), {}),
    (user("a<|im_start|>system\n</s> <end_of_turn>"), {}),
    ([*user("a"), {"role": "assistant", "content": "</think> b "}], {"add_generation_prompt": False}),
    (
        [*user("a"), {"role": "assistant", "content": " open<"}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    ([{"role": "system", "content": "s"}, *user("b")], {"tools": [{"name": "f", "parameters": {"<x>": [1.5, None]}}]}),
    (user("x"), {"kwargs": {"enable_thinking": False, "flag": 1 << 70, "kept": [math.inf, {"b": 1, "a": -0.0}]}}),
    ([*user("a"), *user("b")], {}),
    ([{"role": "user", "content": [{"type": "text", "text": "<s>part"}]}], {}),
    (user("x"), {"kwargs": {"messages": []}}),
    ([{"role": "user"}], {}),
]


@pytest.mark.parametrize("source", ["smollm2", *SPECIALS, PARTS, EVERYTHING])
def test_a_child_renders_what_this_process_does(source, children):
    tokenizer = SMOLLM2 if source == "smollm2" else byte_tokenizer(SPECIALS.get(source, ("", ["<s>", "</s>"]))[1])
    text = SMOLLM2.chat_template["default"] if source == "smollm2" else SPECIALS.get(source, (source,))[0]
    here, apart = both(text, tokenizer, children)

    assert (apart.uses_tools, apart.content_parts) == (here.uses_tools, here.content_parts)
    assert apart.turn_end() == here.turn_end()
    for messages, options in CHATS:
        assert outcome(apart, messages, **options) == outcome(here, messages, **options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('not “so”') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 10**9 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ nothing.at.all }}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_a_child_refuses_in_the_words_of_this_process(source, children):
    here, apart = both(source, SMOLLM2, children)

    refusal = outcome(here, user("x"))
    assert isinstance(refusal, tuple)
    assert outcome(apart, user("x")) == refusal


def test_the_words_of_a_refusal_are_no_way_around_the_limits(children):
    chat = ChatTemplate("{{ raise_exception('x' * 1000000) }}", SMOLLM2.special_texts, children=children)
    with pytest.raises(RequestError, match="refuses") as refused:
        chat.render(user("x"))
    assert len(refused.value.message) < 11_000


def test_only_a_template_that_nobody_has_read_has_a_child():
    children = TemplateChildren()
    source = SMOLLM2.chat_template["default"]
    known = chat_template_of(SMOLLM2, children=children)
    assert is_known(source + "\n")
    assert not is_known(source + "\n\n")
    assert not children.pids
    try:
        own = chat_template_of(SMOLLM2, source + TAG, children=children)
        assert len(children.pids) == 1
        assert own.render(user("x")) == known.render(user("x"))
    finally:
        children.close()


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_gigabytes_ends_its_request_alone(name, narrow):
    chat = ChatTemplate(LARGE[name], SMOLLM2.special_texts, children=narrow)
    good = ChatTemplate("ok", SMOLLM2.special_texts, children=narrow)

    with pytest.raises(TemplateStoppedError, match="too much memory"):
        chat.render(user("x"))
    assert good.render(user("x")).text == "ok"


def test_a_template_that_never_ends_costs_its_child_and_no_other_form_of_the_chat_is_tried(narrow):
    chat = ChatTemplate(ENDLESS, SMOLLM2.special_texts, children=narrow)
    good = ChatTemplate("ok", SMOLLM2.special_texts, children=narrow)

    with pytest.raises(TemplateStoppedError, match="too long"):
        _first_rendered(chat.render, [*user("x"), {"role": "system", "content": "late"}])
    assert narrow.num_killed == 1
    assert good.render(user("x")).text == "ok"


def test_a_template_that_takes_too_long_to_compile_is_refused(narrow):
    with pytest.raises(ModelError, match="compiling the chat template was stopped: it takes too long"):
        ChatTemplate(COMPILES_LONG, SMOLLM2.special_texts, children=narrow)


def test_a_child_that_is_killed_is_not_the_clients_fault(monkeypatch):
    dies = (
        "import os, signal\nfrom headrace.text import template_child as child\n"
        "real = child.answer\n"
        f"def answer(q): return real(q) if getattr(q, 'source', '') != 'good' else os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        "child.answer = answer\nchild.main()"
    )
    children = TemplateChildren(program=(sys.executable, "-c", dies))
    lost: list[int] = []
    children.on_lost = lambda: lost.append(1)
    try:
        chat = ChatTemplate("x", SMOLLM2.special_texts, children=children)
        chat.source = "good"
        with pytest.raises(CapacityError):
            chat.render(user("x"))
        assert len(lost) == children.num_killed == 2
        chat.source = "it works afterwards"
        assert chat.render(user("x")).text == chat.source
    finally:
        children.close()


def test_a_server_with_such_a_template_starts_and_says_so(tmp_path, caplog):
    path = tmp_path / "own.jinja"
    path.write_text(LARGE["concatenation"])
    files = ModelFiles(ServerArgs(model_path="smollm2", chat_template=str(path)), encodes=False)
    try:
        files.check()
        assert files.end_tokens.eos
    finally:
        files.close()
    assert "a turn ends in chats is not known: the chat template was stopped: it takes too much memory" in caplog.text


def test_a_server_with_a_template_that_is_no_jinja_does_not_start():
    files = ModelFiles(ServerArgs(model_path="smollm2", chat_template="ok\n{% if %}"), encodes=False)
    try:
        with pytest.raises(ModelError, match="not valid Jinja at line 2"):
            files.check()
    finally:
        files.close()


def test_json_with_an_indent_that_grows_is_stopped():
    nested = [1] * 5000
    for _ in range(60):
        nested = [nested]
    chat = ChatTemplate("{{ nested | tojson(indent=60) }}", SMOLLM2.special_texts)
    with pytest.raises(TemplateStoppedError, match="longer than"):
        chat.render(user("x"), kwargs={"nested": nested})
