"""What a prompt's content answers to those who pass it on."""

import pytest

from headrace.messages.packing import pack_float32, pack_int32
from headrace.messages.requests import PromptContent

IDS = list(range(100, 120))


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 20])
def test_the_context_of_the_text_after_it_is_its_last_eight_tokens(num_tokens):
    content = PromptContent(pack_int32(IDS[:num_tokens]))

    assert content.num_tokens == num_tokens
    assert content.context_ids == pack_int32(IDS[:num_tokens][-8:])


def test_an_incomplete_last_token_is_left_out():
    content = PromptContent(pack_int32(IDS) + b"\x01\x00\x00")

    assert content.num_tokens == 20
    assert content.context_ids == pack_int32(IDS[-8:])


def test_placeholders_of_embeddings_are_no_tokens():
    content = PromptContent(bytes(4 * 3), pack_float32([0.5] * 6))

    assert (content.num_tokens, content.has_tokens, content.context_ids) == (3, False, b"")


def test_ids_are_given_in_part():
    content = PromptContent(pack_int32(IDS))

    assert content.ids() == IDS
    assert content.ids(stop=3) == IDS[:3]
    assert content.ids(5, 6) == [IDS[5]]
    assert content.ids(18, 40) == IDS[18:]
