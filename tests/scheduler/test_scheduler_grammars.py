"""Requests whose grammar is being compiled, and rows that sit a step out."""

from fake_worker import Rig, expected_outputs

from headrace.errors import ExecutionError, RequestError
from headrace.messages.control import AbortReq
from headrace.messages.grammar import GrammarSpec
from headrace.messages.namespaces import of_api_key, of_request

A = GrammarSpec("regex", "a", "regex")
B = GrammarSpec("regex", "b", "regex")
PROMPT = [0, 1, 1, 0]


class Compiled:
    def start(self) -> None:
        raise AssertionError("the fake worker does not mask")


def test_others_pass_a_request_whose_grammar_is_compiled():
    rig = Rig()
    rig.add("late", PROMPT, grammar=A)
    rig.add("plain", PROMPT)
    for _ in range(40):
        rig.turn()

    assert set(rig.finish) == {"plain"}
    grammar = Compiled()
    seen = []
    submit = rig.worker.submit
    rig.worker.submit = lambda batch: (seen.extend(batch.new), submit(batch))
    rig.grammars.finish("a", grammar)
    rig.drain()
    assert rig.ids["late"] == rig.ids["plain"] == expected_outputs(PROMPT, 16, 9)
    assert [new.grammar for new in seen] == [grammar]
    rig.check_idle()


def test_a_refused_grammar_ends_only_its_requests():
    rig = Rig()
    for rid, grammar in (("bad1", A), ("good", B), ("bad2", A), ("broken", GrammarSpec("regex", "c", "regex"))):
        rig.add(rid, PROMPT, grammar=grammar)
    rig.turn()
    rig.grammars.finish("a", RequestError("no", "regex"))
    rig.grammars.finish("b", Compiled())
    rig.grammars.finish("c", ValueError("a bug"))
    rig.drain()

    assert [rig.finish[rid].status_code for rid in ("bad1", "bad2", "broken")] == [400, 400, 500]
    assert (rig.finish["bad1"].message, rig.finish["bad1"].param) == ("regex: no", "regex")
    assert "bug" not in rig.finish["broken"].message
    assert rig.finish["good"].type in ("stop", "length")
    rig.check_idle()


def test_a_request_may_end_while_its_grammar_is_compiled():
    rig = Rig()
    rig.add("gone", PROMPT, grammar=A)
    rig.turn()
    assert rig.scheduler.internal_state().num_grammar_queue == 1
    rig.inbox.send(AbortReq(("gone",)))
    rig.turn()
    assert rig.finish["gone"].type == "abort"
    assert rig.scheduler.internal_state().num_grammar_queue == 0
    rig.turn()
    [(_, wanted)] = rig.grammars.started
    assert wanted.cancelled()

    rig.grammars.finish("a", ExecutionError("late"))
    rig.drain()
    assert len(rig.rows["gone"]) == 1, "its end is said once"
    rig.check_idle()


def test_grammars_are_compiled_for_a_tenant_and_those_of_keys_apart():
    rig = Rig()
    rig.add("keyed", PROMPT, grammar=A, tenant="k", weight=2.0, namespace=of_api_key("k", ""))
    rig.add("other", PROMPT, grammar=A, tenant="10.0.0.1", namespace=of_request("x", None))
    rig.turn()
    assert rig.grammars.asked == [("k", 2.0, True), ("10.0.0.1", 1.0, False)]
    rig.grammars.finish("a", Compiled())
    rig.drain()


def test_requests_whose_grammar_is_compiled_count_for_the_queue():
    rig = Rig(max_queued=2)
    for i in range(3):
        rig.add(f"r{i}", PROMPT, grammar=A)
    rig.turn()
    assert rig.finish["r2"].status_code == 503
    rig.grammars.finish("a", Compiled())
    rig.drain()
    assert {rig.finish[f"r{i}"].type for i in range(2)} <= {"stop", "length"}


def test_a_row_that_sits_out_computes_the_same_tokens():
    rig = Rig(page_size=4)
    rig.worker.sits_out = lambda step, row: step % 3 != 0
    rig.add("r", PROMPT, 12, stream=True)
    rig.add("other", [1, 1, 0, 0, 1], 12, stream=True)
    rig.drain()
    assert rig.ids["r"] == expected_outputs(PROMPT, 12, 9)
    assert rig.ids["other"] == expected_outputs([1, 1, 0, 0, 1], 12, 9)
    assert rig.state.counters.num_sat_out > 5
    rig.check_idle()


def test_the_worker_hears_which_rows_are_left():
    rig = Rig()
    seen = []
    submit = rig.worker.submit
    rig.worker.submit = lambda batch: (seen.append(batch), submit(batch))
    rig.add("first", PROMPT, 4, grammar=A)
    rig.turn()
    rig.grammars.finish("a", Compiled())
    rig.drain()
    rig.add("plain", PROMPT, 4)
    rig.drain()
    rig.add("other", PROMPT, 4)
    rig.add("beside", PROMPT, 8)
    rig.drain()
    first, plain, other, beside = [new.seq for batch in seen for new in batch.new]
    assert beside != other
    assert [seq for batch in seen for seq in batch.left] == [first, plain, other]


def test_what_rows_held_goes_when_nothing_has_come_for_a_while():
    rig = Rig()
    rig.add("first", PROMPT, 4, grammar=A)
    rig.turn()
    rig.grammars.finish("a", Compiled())
    rig.drain()
    assert rig.worker.rested == []
    rig.turn()
    [row] = rig.worker.rested
    seen = []
    submit = rig.worker.submit
    rig.worker.submit = lambda batch: (seen.append(batch), submit(batch))
    rig.turn()
    rig.add("plain", PROMPT, 4)
    rig.drain()
    rig.turn()
    assert rig.worker.rested == [row, row], "once for each of the two"
    assert all(batch.left == () for batch in seen)


def test_memory_goes_back_too_when_a_step_of_others_has_said_which_rows_were_left():
    rig = Rig()
    rig.add("first", PROMPT, 2, grammar=A)
    rig.add("plain", PROMPT, 8)
    rig.turn()
    rig.grammars.finish("a", Compiled())
    rig.drain()
    rig.turn()
    rig.turn()

    assert rig.worker.num_rests == 1
    assert len(rig.worker.rested) == 1, "the other row was said with a step"
