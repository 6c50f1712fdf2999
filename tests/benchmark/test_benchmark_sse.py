"""Events come out the same however the bytes were cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.http_client import EventParser

STREAM = (
    b': a comment\n\ndata: {"a":1}\n\nevent: x\nid: 7\ndata:{"b":"\xc3\xa9\xf0\x9f\x98\x80"}\n\n'
    b"data: one\ndata: two\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a":1}', '{"b":"é😀"}'.encode(), b"one\ntwo", b"[DONE]"]


def events(pieces):
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    assert events([STREAM[a:b] for a, b in itertools.pairwise(edges)]) == EVENTS


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\n", b"\r\n")], ids=["LF", "CRLF"])
def test_byte_by_byte(stream):
    assert events([bytes([byte]) for byte in stream]) == EVENTS


def test_an_unfinished_event_is_kept_back():
    parser = EventParser()
    assert list(parser.feed(b"data: half\n")) == []
    assert list(parser.feed(b"\n")) == [b"half"]
