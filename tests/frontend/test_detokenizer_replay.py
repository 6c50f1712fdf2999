"""A detokenizer that takes a sample up in the middle of its text, and does not mix up the lives of a scheduler."""

import pytest
from frontend_fakes import ByteTokenizer

from headrace.messages.channel import LocalQueue
from headrace.messages.outputs import BatchTokenIDOut, DecodeOptions, FinishReason, TokenIDOut
from headrace.messages.packing import pack_int32
from headrace.text.detokenizer_manager import DetokenizerManager

TEXT = "wörld 😀 and STO and then STOP after"
STOP = "STOP"


def manager() -> DetokenizerManager:
    return DetokenizerManager(ByteTokenizer(), LocalQueue(), LocalQueue())


def packed(text: bytes) -> bytes:
    return pack_int32(list(text))


def row(ids: bytes, total: int, options: DecodeOptions | None = None, finish: FinishReason | None = None) -> TokenIDOut:
    return TokenIDOut("r", packed(ids), total, finish, options)


def said(detokenizer: DetokenizerManager, source: int, *rows: TokenIDOut) -> str:
    return "".join(out.text for out in detokenizer.handle(BatchTokenIDOut(rows, source)).rows)


def test_at_whatever_token_it_is_taken_up_nothing_is_lost_or_repeated():
    ids = TEXT[: TEXT.index(STOP) + len(STOP)].encode()
    want = TEXT[: TEXT.index(STOP)]
    for cut in range(1, len(ids)):
        first, second = manager(), manager()
        before = said(first, 0, row(ids[:cut], cut, DecodeOptions(stop=(STOP,))))

        again = DecodeOptions(stop=(STOP,), output_ids=packed(ids[:cut]), attempt=1)
        end = FinishReason("stop", matched=STOP)
        after = said(second, 1, row(ids[cut:], len(ids), again, end))

        assert before + after == want, cut


def test_what_an_earlier_life_still_says_is_dropped():
    detokenizer = manager()
    said(detokenizer, 0, row(b"ab", 2, DecodeOptions()))
    said(detokenizer, 5, row(b"c", 3, DecodeOptions(output_ids=packed(b"ab"), attempt=1)))

    late_rows = (row(b"x", 3), row(b"y", 1, DecodeOptions()), row(b"", 3, finish=FinishReason("length")))
    late = [said(detokenizer, 0, one) for one in late_rows]

    assert late == ["", "", ""]
    assert said(detokenizer, 5, row(b"d", 4)) == "d"


def test_samples_of_a_source_that_is_gone_are_forgotten_and_others_are_not():
    detokenizer = manager()
    said(detokenizer, 0, row(b"ab", 2, DecodeOptions()))
    detokenizer.handle(BatchTokenIDOut((TokenIDOut("other", b"", 0, None, DecodeOptions()),), 1))

    detokenizer.forget(0)

    assert detokenizer.num_samples == 1
    assert said(detokenizer, 0, row(b"z", 1, DecodeOptions())) == ""
    assert detokenizer.num_samples == 1


@pytest.mark.parametrize("source", [0, 3])
def test_text_is_signed_as_the_ids_were(source: int):
    assert manager().handle(BatchTokenIDOut((row(b"a", 1, DecodeOptions()),), source)).source == source
