"""Token ids to text: complete characters only, stops held back and trimmed, one bad sample alone."""

import msgspec
import pytest
from frontend_fakes import EOS, ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages.channel import LocalQueue
from headrace.messages.control import AbortReq, FaultReq, Heartbeat, ShutdownReq
from headrace.messages.outputs import (
    BatchTokenIDOut,
    DecodeOptions,
    FinishReason,
    LogprobBlock,
    SampleStats,
    TokenIDOut,
)
from headrace.messages.packing import pack_int32
from headrace.text.detokenizer_manager import DetokenizerManager
from headrace.text.incremental import IncrementalDecoder
from headrace.text.stop import StopMatcher

LENGTH = FinishReason("length")


class Detokenizer:
    """A DetokenizerManager and what it sent."""

    def __init__(self, **options):
        self.to_tokenizer, self.to_scheduler, self.inbox = LocalQueue(), LocalQueue(), LocalQueue()
        self.tokenizer = ByteTokenizer()
        self.manager = DetokenizerManager(self.tokenizer, self.to_tokenizer, self.to_scheduler, **options)
        self.counts = {}

    def row(self, rid, ids, finish=None, options=DecodeOptions(), **more):
        first = rid not in self.counts
        self.counts[rid] = self.counts.get(rid, 0) + len(ids)
        return TokenIDOut(rid, pack_int32(ids), self.counts[rid], finish, options if first else None, **more)

    def handle(self, *rows):
        return self.manager.handle(BatchTokenIDOut(rows)).rows

    def texts(self, parts, finish, options=DecodeOptions(), rid="r"):
        """Texts of the outputs of one sample whose ids come in `parts`, the last with `finish`."""
        ends = [None] * (len(parts) - 1) + [finish]
        return [self.handle(self.row(rid, ids, end, options))[0].text for ids, end in zip(parts, ends, strict=True)]


def split(ids, cuts):
    """`ids` cut into parts at the given places."""
    places = sorted({c % (len(ids) + 1) for c in cuts})
    return [ids[a:b] for a, b in zip([0, *places], [*places, len(ids)], strict=True)]


def test_a_character_is_given_when_its_last_byte_has_come():
    detokenizer = Detokenizer()
    parts = [[byte] for byte in "é🚰".encode()]

    assert detokenizer.texts(parts, LENGTH) == ["", "é", "", "", "", "🚰"]


def test_an_incomplete_character_is_flushed_at_the_end():
    assert Detokenizer().texts([[97], [0xF0, 0x9F]], LENGTH) == ["a", "\ufffd"]


def test_a_character_begun_in_the_prompt_is_completed():
    whole = "🚰".encode()
    options = DecodeOptions(context_ids=pack_int32(list(b"a" + whole[:2])))

    assert "".join(Detokenizer().texts([[byte] for byte in whole[2:] + b"b"], LENGTH, options)) == "🚰b"


def test_a_beginning_of_a_stop_is_held_back_and_released_when_it_does_not_complete():
    options = DecodeOptions(stop=("END",))
    parts = [list(b"aE"), list(b"N"), list(b"x"), list(b"E")]

    assert Detokenizer().texts(parts, LENGTH, options) == ["a", "", "ENx", "E"]


def test_a_stop_is_cut_off_with_what_follows_it_in_the_same_token():
    stop = FinishReason("stop", matched="END")
    options = DecodeOptions(stop=("END", "zzz"))

    assert "".join(Detokenizer().texts([list(b"text E"), list(b"ND more")], stop, options)) == "text "


def test_no_stop_trim_keeps_everything_and_holds_nothing_back():
    options = DecodeOptions(stop=("END",), no_stop_trim=True, skip_special_tokens=False)

    texts = Detokenizer().texts([list(b"aE"), list(b"ND.")], FinishReason("stop", matched="END"), options)
    assert texts == ["aE", "ND."]
    assert Detokenizer().texts([[97, EOS]], FinishReason("stop", matched=EOS), options) == ["a<eos>"]


def test_a_match_of_a_pattern_is_not_trimmed():
    options = DecodeOptions(stop_regex=("[0-9]+",))

    assert Detokenizer().texts([list(b"no 42")], FinishReason("stop", matched="[0-9]+"), options) == ["no 42"]


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_token_leaves_no_text_but_its_id(skip):
    detokenizer = Detokenizer()
    stop = FinishReason("stop", matched=ord("!"))
    [row] = detokenizer.handle(detokenizer.row("r", list(b"hi!"), stop, DecodeOptions(skip_special_tokens=skip)))

    assert row.text == "hi"
    assert row.tokens.ids == pack_int32(list(b"hi!"))
    assert row.tokens.num_output_tokens == 3


def test_special_tokens_are_shown_by_the_samples_that_ask_for_them_only():
    detokenizer = Detokenizer()
    rows = detokenizer.handle(
        detokenizer.row("a", [97, EOS, 98], LENGTH, DecodeOptions(skip_special_tokens=False)),
        detokenizer.row("b", [97, EOS, 98], LENGTH, DecodeOptions(skip_special_tokens=True)),
    )

    assert [row.text for row in rows] == ["a<eos>b", "ab"]


def test_an_abort_gives_the_text_that_was_held_back():
    options = DecodeOptions(stop=("END",))
    texts = Detokenizer().texts([list(b"partEN"), []], FinishReason("abort", message="asked for"), options)

    assert "".join(texts) == "partEN"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abE🚰漢N ", max_size=24),
    stops=st.lists(st.text(alphabet="abEN🚰", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_joined_outputs_are_the_text_up_to_the_first_stop_for_every_split(text, stops, cuts):
    ids = list(text.encode())
    matcher = StopMatcher(stops, (), IncrementalDecoder(ByteTokenizer()))
    finish, expected = LENGTH, text
    for position, token_id in enumerate(ids):
        if (match := matcher.push(token_id)) is not None:
            finish, expected = FinishReason("stop", matched=match.matched), text[: match.start]
            ids = ids[: position + 1]
            break
    parts = split(ids, cuts)
    # The scheduler ends a sample with the token that completes the stop.
    outputs = Detokenizer().texts(parts, finish, DecodeOptions(stop=tuple(stops)))

    assert "".join(outputs) == expected
    assert not any("\ufffd" in output for output in outputs)


def test_everything_of_a_row_but_its_options_passes_through():
    detokenizer = Detokenizer()
    block = LogprobBlock(b"1234", b"5678")
    stats = SampleStats(3, 1)
    more = {"stats": stats, "logprobs": block, "prompt_logprobs": block, "hidden_states": b"h"}
    first = detokenizer.row("r", [97], **more)
    last = detokenizer.row("r", [98], LENGTH, **more)

    assert first.options is not None
    assert detokenizer.handle(first)[0].tokens == msgspec.structs.replace(first, options=None)
    assert detokenizer.handle(last)[0].tokens == last


def test_a_sample_that_cannot_be_decoded_ends_alone_and_the_scheduler_is_told(caplog):
    detokenizer = Detokenizer()
    handle, row = detokenizer.handle, detokenizer.row
    handle(row("bad", [97]), row("good", [97]))

    bad, good = handle(row("bad", [999]), row("good", [98]))

    assert (bad.tokens.finish.type, bad.tokens.finish.status_code) == ("abort", 500)
    assert good.text == "b"
    assert detokenizer.to_scheduler.recv_nowait().rids == ("bad",)
    assert "rid bad" in caplog.text
    # The scheduler's own end of it comes later and is not a second one.
    assert handle(row("bad", [97])) == ()
    assert handle(row("bad", [], FinishReason("abort"))) == ()
    assert handle(row("good", [], LENGTH))[0].tokens.finish == LENGTH
    assert detokenizer.manager.num_samples == 0
    assert detokenizer.to_scheduler.recv_nowait() is None


def test_a_failure_in_the_last_output_of_a_sample_needs_no_abort():
    detokenizer = Detokenizer()

    [row] = detokenizer.handle(detokenizer.row("bad", [999], LENGTH))

    assert row.tokens.finish.status_code == 500
    assert detokenizer.to_scheduler.recv_nowait() is None
    assert detokenizer.manager.num_samples == 0


def test_outputs_of_samples_never_begun_are_dropped_and_counted():
    detokenizer = Detokenizer()
    detokenizer.counts["r"] = 1  # so that no options are sent

    assert detokenizer.handle(detokenizer.row("r", [97])) == ()
    assert detokenizer.manager.num_unknown_outputs == 1


def test_a_rid_that_is_used_again_starts_afresh():
    detokenizer = Detokenizer()
    detokenizer.handle(detokenizer.row("r", [0xF0], LENGTH))
    detokenizer.counts.clear()

    assert detokenizer.texts([[97]], LENGTH) == ["a"]
    assert detokenizer.manager.num_samples == 0


def test_the_loop_serves_until_told_to_leave_and_gives_signs_of_life(monkeypatch):
    monkeypatch.setattr("headrace.text.detokenizer_manager.HEARTBEAT_INTERVAL_S", 0.0)
    detokenizer = Detokenizer()
    detokenizer.inbox.send(BatchTokenIDOut((detokenizer.row("r", [97], LENGTH),)))
    detokenizer.inbox.send(AbortReq())  # not for it
    detokenizer.inbox.send(ShutdownReq())

    detokenizer.manager.run(detokenizer.inbox, heartbeats=False)
    assert detokenizer.to_tokenizer.recv_nowait().rows[0].text == "a"
    assert detokenizer.to_tokenizer.recv_nowait() is None

    class LeavesAfterHeartbeat(LocalQueue):
        def recv(self, timeout_s):
            assert detokenizer.to_tokenizer.recv(20) == Heartbeat("detokenizer")
            return ShutdownReq()

    detokenizer.manager.run(LeavesAfterHeartbeat())


def test_an_injected_fault_hits_its_sample_at_its_token():
    slept = []
    detokenizer = Detokenizer(enable_faults=True, sleep=slept.append)
    handle, row = detokenizer.handle, detokenizer.row
    detokenizer.manager.add_fault(FaultReq("detokenize", "raise", "r", at_token=2))
    detokenizer.manager.add_fault(FaultReq("detokenize", "sleep", "s", seconds=3.0))

    assert handle(row("r", [97]))[0].text == "a"
    assert handle(row("s", [97], LENGTH))[0].text == "a"
    assert slept == [3.0]
    assert handle(row("r", [98]))[0].tokens.finish.status_code == 500


def test_faults_are_refused_unless_enabled():
    detokenizer = Detokenizer()
    detokenizer.manager.add_fault(FaultReq("detokenize", "raise", "r"))

    assert detokenizer.handle(detokenizer.row("r", [97], LENGTH))[0].text == "a"
