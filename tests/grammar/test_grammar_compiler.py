"""Grammars are compiled once, remembered within bounds, and fail alone."""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from headrace.errors import CapacityError, ConfigError, ExecutionError, RequestError
from headrace.grammar.compiler import SHARED_CHARACTERS, GrammarCompiler
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import CompiledGrammar, Grammars, GrammarSpec

BYTES = Vocabulary([bytes([byte]) for byte in range(255)] + [b"", b"<end>"], [256], [256])

STUB = """
import os
from headrace.grammar import compile_child as child
real = child.try_grammar

def try_grammar(tokens, spec):
    if spec.text.startswith("/") and os.path.exists(spec.text):
        open(spec.text).read()
    if spec.text == "die":
        raise SystemExit
    return real(tokens, spec)

child.try_grammar = try_grammar
child.main()
"""
"""A child that waits until somebody writes into the pipe that a grammar names, if it is there."""

ENOUGH_S = 250
"""For any result; a test that waits so long fails."""


def spec(text: str, field: str = "regex", kind: str = "regex") -> GrammarSpec:
    return GrammarSpec(kind, text, field)


def result(future: "Future[CompiledGrammar]") -> CompiledGrammar:
    return future.result(ENOUGH_S)


def error(future: "Future[CompiledGrammar]") -> BaseException | None:
    return future.exception(ENOUGH_S)


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(lambda: BYTES, num_children=1, limit_s=60)
    yield compiler
    compiler.close()


@pytest.fixture
def make():
    """Makes compilers and closes them."""
    made = []

    def make(**options) -> GrammarCompiler:
        options = {"make_vocabulary": lambda: BYTES, "num_children": 1, "limit_s": 60.0, **options}
        made.append(GrammarCompiler(**options))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """A grammar that is compiled for as long as nobody writes into it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return str(path)


def release(pipe: str) -> None:
    Path(pipe).write_text("")


def test_a_compiled_grammar_gives_masks(compiler: Grammars):
    grammar = result(compiler.compile(spec("ab")))

    mask = grammar.start()
    words = np.zeros(9, np.int32)
    mask.fill(words)
    assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == [ord("a")]
    mask.accept(ord("a"))
    mask.accept(ord("b"))
    assert mask.is_complete
    assert grammar.start().is_complete is False


def test_the_same_grammar_is_compiled_once(make):
    compiler = make()
    futures = [compiler.compile(spec("a+b", field)) for field in ("regex", "response_format")]
    futures += [compiler.compile(spec("a+c"))]
    first, second, other = map(result, futures)

    assert first is second is result(compiler.compile(spec("a+b")))
    assert other is not first
    stats = compiler.stats()
    assert (stats.num_compiled, stats.num_cache_hits, stats.num_refused, stats.num_killed) == (2, 2, 0, 0)


def _write(mask, text, words):
    for byte in text.encode():
        mask.fill(words)
        mask.accept(byte)


def test_a_grammar_that_an_output_has_spent_is_compiled_again(make):
    careless = "from headrace.grammar import compile_child as child\nchild.probe = lambda *_: None\nchild.main()"
    compiler = make(program=(sys.executable, "-c", careless))
    text = "xx(b?){3000}b{3000}"
    first = result(compiler.compile(spec(text)))
    mask, words = first.start(), np.zeros(9, np.int32)
    with pytest.raises(ExecutionError, match="too many expressions"):
        _write(mask, "xx" + "b" * 50, words)

    again = result(compiler.compile(spec(text)))
    assert again is not first
    again.start().fill(words)
    assert compiler.stats().num_cached == 1
    assert result(compiler.compile(spec(text))) is again


def test_the_same_text_of_another_kind_is_another_grammar(make):
    compiler = make()
    text = 'start: "a"'
    assert result(compiler.compile(spec(text, kind="lark"))) is not result(compiler.compile(spec(text, kind="regex")))


def test_a_refusal_is_remembered_and_names_the_field_that_asked(make):
    compiler = make()
    messages = set()
    for field in ("regex", "response_format", "regex"):
        refused = error(compiler.compile(spec("a(b", field)))
        assert isinstance(refused, RequestError)
        assert refused.param == field
        messages.add(refused.message)
    assert len(messages) == 1
    assert "" not in messages
    assert error(compiler.compile(spec("a(b"))) is not error(compiler.compile(spec("a(b")))
    stats = compiler.stats()
    assert (stats.num_compiled, stats.num_refused, stats.num_cache_hits) == (0, 1, 4)
    assert stats.num_cached == 1


def test_the_cache_has_a_limit_in_bytes_and_forgets_what_was_not_used_for_longest(make):
    compiler = make(cache_bytes=3 * 80_000)
    for text in ("a", "b", "c", "a", "d"):
        result(compiler.compile(spec(text)))
    assert compiler.stats().num_cached == 3
    assert 0 < compiler.stats().cached_bytes <= 3 * 80_000
    before = compiler.stats().num_compiled

    for text in ("a", "c", "d"):
        result(compiler.compile(spec(text)))
    assert compiler.stats().num_compiled == before
    result(compiler.compile(spec("b")))
    assert compiler.stats().num_compiled == before + 1


def test_the_many_grammars_of_one_tenant_do_not_evict_that_of_another(make):
    compiler = make(cache_bytes=500_000)
    long = "b" * (SHARED_CHARACTERS + 1)
    mine = result(compiler.compile(spec(long), "b"))
    for index in range(8):
        result(compiler.compile(spec(f"{long}{index}"), "a"))
    assert compiler.stats().num_cached < 9
    assert result(compiler.compile(spec(long), "b")) is mine


def test_what_is_larger_than_the_cache_is_served_but_not_remembered(make):
    compiler = make(cache_bytes=1000)
    for _ in range(2):
        result(compiler.compile(spec("a")))
    stats = compiler.stats()
    assert (stats.num_compiled, stats.num_cached, stats.cached_bytes) == (2, 0, 0)


def test_long_refused_grammars_do_not_fill_the_memory(make):
    compiler = make(cache_bytes=1_000_000)
    for index in range(5):
        assert error(compiler.compile(spec(f"({index}" + "x" * 100_000)))
    assert compiler.stats().num_cached == 2
    assert compiler.stats().cached_bytes <= 1_000_000


def test_a_cancelled_request_disturbs_no_other(make, pipe: str):
    compiler = make(program=(sys.executable, "-c", STUB))
    held = compiler.compile(spec(pipe))
    cancelled, kept = compiler.compile(spec("a")), compiler.compile(spec("a"))
    abandoned = compiler.compile(spec("b"))
    assert cancelled.cancel()
    assert abandoned.cancel()
    release(pipe)

    assert result(kept)
    assert result(held)
    assert result(compiler.compile(spec("c")))
    assert compiler.stats().num_compiled == 3  # nobody wanted "b" any more
    assert result(compiler.compile(spec("b")))


def test_others_pass_a_grammar_that_takes_long(make, pipe: str):
    compiler = make(num_children=3, program=(sys.executable, "-c", STUB))
    held = compiler.compile(spec(pipe))
    for text in ("a", "b", "a(b"):
        assert compiler.compile(spec(text)).exception(ENOUGH_S) is None or text == "a(b"
    assert not held.done()
    release(pipe)
    assert result(held)


def test_one_tenant_leaves_a_child_to_another(make, pipe: str):
    compiler = make(num_children=2, program=(sys.executable, "-c", STUB))
    held, waiting = compiler.compile(spec(pipe), "a"), compiler.compile(spec("a"), "a")
    assert result(compiler.compile(spec("b"), "b"))
    assert not held.done()
    assert not waiting.done()
    release(pipe)
    assert result(held)
    assert result(waiting)


def test_nobody_learns_by_the_time_what_another_key_has_compiled(make):
    compiler = make()
    long = "a" * (SHARED_CHARACTERS + 1)
    first, second, again = [result(compiler.compile(spec(long), key, is_private=True)) for key in ("x", "y", "x")]
    assert second is not first
    assert again is first
    assert (compiler.stats().num_compiled, compiler.stats().num_cache_hits) == (2, 1)
    short = [result(compiler.compile(spec(long[1:]), key, is_private=True)) for key in ("x", "y")]
    addresses = [result(compiler.compile(spec(long), address)) for address in ("10.0.0.1", "10.0.0.2")]
    assert short[0] is short[1]
    assert addresses[0] is addresses[1]
    assert compiler.stats().num_compiled == 4


def test_what_another_key_is_compiling_is_not_waited_for(make, pipe: str):
    """Nor does a client without a key wait in another one's turn."""
    compiler = make(num_children=2, program=(sys.executable, "-c", STUB))
    held, waiting = compiler.compile(spec(pipe), "a"), compiler.compile(spec("b"), "a")
    theirs = result(compiler.compile(spec("b"), "b"))
    assert not waiting.done()
    release(pipe)
    assert result(waiting) is theirs
    assert result(held)
    assert compiler.stats().num_compiled == 2


def test_a_grammar_that_ends_its_child_is_refused_and_counted(make):
    compiler = make(program=(sys.executable, "-c", STUB))
    refused = error(compiler.compile(spec("die")))
    assert isinstance(refused, RequestError)
    assert refused.param == "regex"
    assert result(compiler.compile(spec("a")))
    assert compiler.stats().num_killed == 1


def kill_at_work(compiler: GrammarCompiler, pipe: str) -> None:
    """Kill the child as it compiles the grammar that names the pipe."""
    writer = os.open(pipe, os.O_WRONLY)  # returns when the child has opened its end
    (pid,) = compiler.child_pids
    os.kill(pid, signal.SIGKILL)
    os.close(writer)
    while pid in compiler.child_pids:
        time.sleep(0.001)


def test_a_grammar_whose_child_is_killed_is_not_refused(make, pipe: str):
    compiler = make(program=(sys.executable, "-c", STUB))
    once = compiler.compile(spec(pipe))
    kill_at_work(compiler, pipe)
    release(pipe)
    assert result(once)

    os.rename(pipe, pipe + "2")
    twice = compiler.compile(spec(pipe + "2"))
    kill_at_work(compiler, pipe + "2")
    kill_at_work(compiler, pipe + "2")
    refused = error(twice)
    assert isinstance(refused, CapacityError)
    assert refused.retry_after_s > 0
    assert compiler.stats().num_cached == 1  # the first

    os.unlink(pipe + "2")
    assert result(compiler.compile(spec(pipe + "2")))
    assert (compiler.stats().num_killed, compiler.stats().num_refused) == (3, 0)


def test_a_refusal_is_remembered_for_its_tenant_alone(make):
    compiler = make(program=(sys.executable, "-c", STUB))
    for tenant, num_killed in (("a", 1), ("a", 1), ("b", 2), ("b", 2), ("a", 2)):
        assert isinstance(error(compiler.compile(spec("die"), tenant)), RequestError)
        assert compiler.stats().num_killed == num_killed
    assert compiler.stats().num_cached == 2
    assert result(compiler.compile(spec("a"), "a")) is result(compiler.compile(spec("a"), "b"))


def test_a_model_whose_output_cannot_follow_a_grammar_refuses_all(make):
    def no_vocabulary() -> Vocabulary:
        raise ConfigError("this model's tokenizer has no fixed bytes per token")

    compiler = make(make_vocabulary=no_vocabulary)
    for field in ("regex", "ebnf"):
        refused = error(compiler.compile(spec("a", field)))
        assert isinstance(refused, RequestError)
        assert refused.message == "this model's tokenizer has no fixed bytes per token"
        assert refused.param == field


def test_what_could_not_be_tried_is_tried_again(make, tmp_path: Path):
    flag = tmp_path / "flag"
    program = f"import os\nif os.path.exists({str(flag)!r}):\n    exec({STUB!r})\n"
    compiler = make(program=(sys.executable, "-c", program))

    assert isinstance(error(compiler.compile(spec("a"))), ExecutionError)
    assert compiler.stats().num_cached == 0
    flag.touch()
    assert result(compiler.compile(spec("a")))


def test_an_error_of_ours_fails_one_request_and_not_the_thread(make):
    def broken() -> Vocabulary:
        raise ZeroDivisionError

    compiler = make(make_vocabulary=broken)
    for _ in range(2):
        failed = error(compiler.compile(spec("a")))
        assert isinstance(failed, ExecutionError)
        assert failed.message == "internal error"


def test_nothing_is_made_before_the_first_grammar():
    made = []

    def vocabulary() -> Vocabulary:
        made.append(True)
        return BYTES

    compiler = GrammarCompiler(vocabulary, num_children=1, limit_s=60)
    assert made == []
    assert compiler.stats().num_compiled == 0
    for text in ("a", "b"):
        result(compiler.compile(spec(text)))
    assert made == [True]
    compiler.close()


def test_the_tokens_are_made_while_a_child_tries_the_grammar(make):
    begun: SimpleQueue[tuple[Future, Callable[[], object]]] = SimpleQueue()

    def begin(work):
        future = Future()
        begun.put((future, work))
        return future

    compiler = make(program=(sys.executable, "-c", STUB), begin=begin)
    compiled = compiler.compile(spec("a"))
    vocabulary, make_vocabulary = begun.get(timeout=60)
    vocabulary.set_result(make_vocabulary())
    tokens, make_tokens = begun.get(timeout=60)
    while not compiler.child_pids:
        time.sleep(0.01)
    assert not compiled.done()
    tokens.set_result(make_tokens())
    assert result(compiled)


def test_nothing_is_made_for_a_compiler_that_is_closed():
    made = []
    compiler = GrammarCompiler(lambda: made.append(True) or BYTES, num_children=1)
    compiler.close()
    assert isinstance(error(compiler.compile(spec("a"))), ExecutionError)
    assert made == []


def test_close_abandons_what_is_being_compiled_and_leaves_no_child(make, pipe: str):
    compiler = make(program=(sys.executable, "-c", STUB))
    result(compiler.compile(spec("a")))
    (pid,) = compiler.child_pids
    futures = [compiler.compile(spec(pipe)), compiler.compile(spec("b"))]

    compiler.close()

    for future in futures:
        failed = error(future)
        assert isinstance(failed, ExecutionError)
        assert failed.message == "the server is stopping"
    assert not Path(f"/proc/{pid}").exists()
    assert isinstance(error(compiler.compile(spec("a"))), ExecutionError)
    compiler.close()


def test_close_before_any_grammar(make):
    make().close()
