"""Children try grammars: what costs too much ends a child, never the server, and no child outlives the pool."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import child_environment
from headrace.errors import ExecutionError
from headrace.grammar import compiler
from headrace.grammar.compile_child import Passed, Refused, try_grammar
from headrace.grammar.compiler import CompilePool
from headrace.grammar.matcher import MatcherTokens
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec
from smollm2_tokenizer import smollm2_tokenizer

BYTES = Vocabulary([bytes([byte]) for byte in range(255)] + [b"", b"<end>"], [256], [256])

STUB = """
import os, threading
from headrace.grammar import compile_child as child
real, kept = child.try_grammar, []

def try_grammar(tokens, spec):
    what, _, value = spec.text.partition(":")
    if what == "hang" and not value:
        while True: pass
    if what == "hang":
        open(value, "w").close()  # a pipe with a name: it says that the child is here
        threading.Event().wait()
    if what == "die":
        os.abort()
    if what == "keep":
        kept.append(b"x" * int(value))
    if what == "allocate":
        kept.append(bytearray(int(value)))
    if what == "environment":
        return child.Refused(repr(sorted(os.environ)))
    if what == "print":
        print(spec.text, flush=True)
        os.write(2, spec.text.encode())
    return real(tokens, spec)

child.try_grammar = try_grammar
child.main()
"""
"""A child that does what a grammar says."""


def spec(text: str, kind: str = "regex") -> GrammarSpec:
    return GrammarSpec(kind, text, "field")


def schema(value: object) -> GrammarSpec:
    return spec(json.dumps(value), "json_schema")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def pool():
    pool = CompilePool(BYTES, num_children=1, limit_s=60)
    yield pool
    pool.close()


@pytest.fixture
def stub():
    """Makes pools whose children do what they are told."""
    pools = []

    def make(**options) -> CompilePool:
        pools.append(CompilePool(BYTES, program=(sys.executable, "-c", STUB), **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_grammar_passes_with_what_the_library_takes(pool: CompilePool):
    verdict = pool.try_spec(schema({"type": "integer"}))

    assert isinstance(verdict, Passed)
    assert "integer" in verdict.text
    assert verdict.memory_bytes >= 0


def test_what_a_grammar_occupies_is_measured(pool: CompilePool):
    names = random.Random(7).sample(range(10**9), 20_000)
    small = pool.try_spec(spec("a|b"))
    large = pool.try_spec(schema({"enum": [f"name {name}" for name in names]}))
    after = pool.try_spec(spec("a|c"))

    assert isinstance(large, Passed)
    assert large.memory_bytes > 2 * MIB > small.memory_bytes
    assert after.memory_bytes < 2 * MIB
    assert after.left_bytes < large.memory_bytes


def test_a_grammar_is_refused_in_words(pool: CompilePool):
    for bad in (spec("a(b"), schema({"$ref": "#"}), spec('start: "x', "lark"), spec("{", "json_schema")):
        verdict = pool.try_spec(bad)
        assert isinstance(verdict, Refused)
        assert verdict.message
        assert "<state>" not in verdict.message
        assert "<grammar>" not in verdict.message


def test_a_child_is_started_when_it_is_needed_and_kept():
    pool = CompilePool(BYTES, num_children=2)
    assert pool.pids == []
    pool.try_spec(spec("a"))
    (pid,) = pool.pids
    pool.try_spec(spec("b"))
    assert pool.pids == [pid]
    pool.close()
    assert pool.pids == []
    assert is_gone(pid)


def test_a_grammar_that_takes_too_long_ends_its_child(stub):
    pool = stub(num_children=1, limit_s=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_limit_s", 60)
        assert isinstance(pool.try_spec(spec("a")), Passed)
    (pid,) = pool.pids

    verdict = pool.try_spec(spec("hang"))

    assert isinstance(verdict, Refused)
    assert "longer than 0.5 s" in verdict.message
    assert is_gone(pid)
    assert pool.num_killed == 1


def test_a_child_that_dies_is_replaced(stub):
    pool = stub(num_children=1, limit_s=60)
    open_files = None
    for _ in range(3):
        verdict = pool.try_spec(spec("die"))
        assert isinstance(verdict, Refused)
        assert "more memory" in verdict.message
        assert pool.pids == []
        open_files = open_files or len(os.listdir("/proc/self/fd"))
    assert isinstance(pool.try_spec(spec("a")), Passed)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)  # between two grammars
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    assert isinstance(pool.try_spec(spec("a")), Passed)

    assert pool.pids != [pid]
    assert is_gone(pid)
    assert pool.num_killed == 3
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_child_has_a_limit_of_memory(stub):
    pool = stub(num_children=1, limit_s=60, memory_bytes=64 * MIB)

    assert isinstance(pool.try_spec(spec(f"allocate:{128 * MIB}")), Refused)
    assert isinstance(pool.try_spec(spec(f"allocate:{16 * MIB}")), Passed)


def test_a_grammar_that_takes_too_much_memory_is_refused():
    pool = CompilePool(BYTES, num_children=1, limit_s=60, memory_bytes=16 * MIB)
    verdict = pool.try_spec(schema({"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}))
    after = pool.try_spec(spec("a"))
    pool.close()

    assert isinstance(verdict, Refused)
    assert "memory" in verdict.message
    assert isinstance(after, Passed)


def test_a_child_that_has_grown_is_replaced_after_its_answer(stub, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_LEFT_BYTES", 8 * MIB)
    pool = stub(num_children=1, limit_s=60)
    pool.try_spec(spec("keep:1000000"))
    (pid,) = pool.pids

    verdict = pool.try_spec(spec(f"keep:{16 * MIB}"))

    assert isinstance(verdict, Passed)
    assert verdict.left_bytes > 8 * MIB
    assert pool.pids == []
    assert is_gone(pid)
    assert isinstance(pool.try_spec(spec("a")), Passed)
    assert pool.num_killed == 0


def test_one_grammar_that_hangs_does_not_hold_up_another(stub, tmp_path):
    pool = stub(num_children=2, limit_s=200)
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    failed = []

    def hang() -> None:
        try:
            pool.try_spec(spec(f"hang:{begun}"))
        except ExecutionError as error:
            failed.append(error.message)

    thread = threading.Thread(target=hang)
    thread.start()
    begun.read_bytes()  # returns when the child has opened and closed its end
    for _ in range(5):
        assert isinstance(pool.try_spec(spec("a")), Passed)
    assert thread.is_alive()
    pids = pool.pids
    assert len(pids) == 2

    pool.close()
    thread.join()

    assert failed == ["the server is stopping"]
    assert all(is_gone(pid) for pid in pids)
    with pytest.raises(ExecutionError, match="stopping"):
        pool.try_spec(spec("a"))


@pytest.mark.parametrize(
    "program", [("/bin/false",), ("/nonexistent/program",), (sys.executable, "-c", "print('hello')")], ids=str
)
def test_children_that_do_not_start_fail_the_grammar_only(program: tuple[str, ...]):
    pool = CompilePool(BYTES, num_children=1, program=program)
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(ExecutionError, match="process"):
            pool.try_spec(spec("a"))
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_child_gets_no_secret_and_prints_nothing(stub, capfd, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    pool = stub(num_children=1, limit_s=60)

    assert isinstance(pool.try_spec(spec("print:word of a request")), Passed)
    names = pool.try_spec(spec("environment")).message

    assert "OPENAI_API_KEY" not in names
    assert "PATH" in names
    captured = capfd.readouterr()
    assert "word of a request" not in captured.out + captured.err
    assert child_environment({"HF_TOKEN": "x", "HOME": "/h"}).keys() & {"HF_TOKEN", "HOME"} == {"HOME"}


def test_a_child_ends_with_its_parent():
    program = """
import os, sys, signal
from headrace.grammar.compiler import CompilePool
from headrace.grammar.matcher import MatcherTokens
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec
pool = CompilePool(Vocabulary([b"a", b"<end>"], [1], [1]), num_children=1)
pool.try_spec(GrammarSpec("regex", "a*", "field"))
print(*pool.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid = int(parent.stdout)

    with contextlib.suppress(ProcessLookupError):  # it has ended already
        process = os.pidfd_open(pid)
        ended, _, _ = select.select([process], [], [], 60)
        os.close(process)
        assert ended == [process]


RNG = random.Random(3)
REFS = {
    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}}]}
    for i in range(300)
}
HOSTILE = {
    "5000 properties": schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}),
    "50000 strings": schema({"enum": [f"{RNG.getrandbits(60):x}" for _ in range(50_000)]}),
    "exponential automaton": spec(".*a.{20}"),
    "maxLength": schema({"type": "string", "maxLength": 1_000_000}),
    "long constant": schema({"const": "x" * 300_000}),
    "optional then required": spec("(a?){3000}a{3000}"),
    "cycle": schema({"$ref": "#"}),
    "chain of references": schema({"$defs": {**REFS, "d300": {"type": "null"}}, "$ref": "#/$defs/d0"}),
    "ambiguous": spec('start: s\ns: s s | "a" |\n', "lark"),
    "nested schema": spec('{"items":' * 3000 + "{}" + "}" * 3000, "json_schema"),
    "nested regex": spec("(" * 5000 + "a" + ")" * 5000),
    "nested lark": spec("start: " + "(" * 50_000 + '"a"' + ")" * 50_000, "lark"),
    "repetitions of repetitions": spec("((((a{1,100}){1,100}){1,100}){1,100})"),
    "many stars": spec("(a|b)*" * 3000),
    "terminals that double": spec(
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(64)) + '\nR64: "a"', "lark"
    ),
    "minItems": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**8, "maxItems": 10**9}),
    "product of conditions": schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(12)]}
    ),
}


@pytest.fixture(scope="module")
def real_pool():
    """With the vocabulary of a model, and the limits of a server."""
    smollm2 = smollm2_tokenizer()
    pool = CompilePool(Vocabulary.of(smollm2, smollm2.vocab_size, smollm2.eos_ids), num_children=1)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_and_leaves_nothing_behind(real_pool: CompilePool, name: str):
    verdict = real_pool.try_spec(HOSTILE[name])

    assert verdict.left_bytes < 50 * MIB
    if isinstance(verdict, Refused):
        assert 0 < len(verdict.message) < 1000
    for _ in range(2):  # another process's load may make the first one take too long
        after = real_pool.try_spec(schema({"type": "integer"}))
        if isinstance(after, Passed):
            break
    assert isinstance(after, Passed)
    assert len(real_pool.pids) == 1


def test_a_grammar_that_is_too_complex_after_its_first_token_is_refused():
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "integer"} for i in range(2500)}}
    tokens = MatcherTokens(BYTES)
    verdict = try_grammar(tokens, GrammarSpec("json_schema", json.dumps(schema), "json_schema"))
    assert isinstance(verdict, Refused)
    assert "too complex" in verdict.message


def test_objects_are_closed_where_the_closed_schema_can_be_followed():
    tokens = MatcherTokens(BYTES)
    more = {"required": ["a"], "minProperties": 2, "anyOf": [{"properties": {"b": False}}]}
    for schema, is_closed in (
        ({"type": "object", "properties": {"a": {}}}, True),
        ({"type": "object", "properties": {"a": {}}, "x-guidance": {"open_objects": True}}, False),
        ({"type": "object", "properties": {"a": {}}, **more}, False),
    ):
        verdict = try_grammar(tokens, GrammarSpec("json_schema", json.dumps(schema), "json_schema"))
        assert isinstance(verdict, Passed), verdict
        assert ('"additionalProperties":false' in verdict.text) is is_closed


COUNTED = {"type": "string", "maxLength": 5000, "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)"}


def test_a_grammar_that_is_too_complex_after_some_tokens_is_refused():
    tokens = MatcherTokens(BYTES)
    for schema in (COUNTED, {"type": "object", "properties": {"a": COUNTED}, "required": ["a"]}):
        verdict = try_grammar(tokens, GrammarSpec("json_schema", json.dumps(schema), "json_schema"))
        assert isinstance(verdict, Refused)
        assert "too complex" in verdict.message
