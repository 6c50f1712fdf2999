"""Sounds on the chat page, in Debian's chromium: chosen, pasted, dropped, played, sent and kept."""

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_frontend import Running, running_server
from media_page import PNG, asked, choose, expect, hand_over, opened, replied, send, waiting
from web_page import check_accessible

from headrace.media_kinds import AudioRef, ImageRef, MediaKind, MediaRefs
from headrace.messages.media import MediaSupport

RATE = 8000
DURATION_S = 0.25
TOKENS: dict[MediaKind, str] = {"image": "<image>", "audio": "<sound>"}


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(bytes(2 * int(RATE * DURATION_S)))
    return file.getvalue()


WAV = wav()


@pytest.fixture(scope="module")
def hearing() -> Iterator[Running]:
    with running_server(
        special_tokens=("<sound>",), media_support=MediaSupport("fake", {"audio": "<sound>"})
    ) as running:
        yield running


@pytest.fixture(scope="module")
def seeing_and_hearing() -> Iterator[Running]:
    with running_server(special_tokens=tuple(TOKENS.values()), media_support=MediaSupport("fake", TOKENS)) as running:
        yield running


@pytest.fixture
def chat(page: Any, hearing: Running) -> Any:
    hearing.frontend.reset()
    return opened(page, hearing.url)


def choose_sounds(page: Any, *names: str, data: bytes = WAV, kind: str = "audio/wav") -> None:
    choose(page, "Sound", *names, data=data, kind=kind)


def of_sounds(*files: bytes) -> MediaRefs:
    return MediaRefs(audios=tuple(AudioRef(url=base64.b64encode(data).decode()) for data in files))


def players(inside: Any) -> Any:
    return inside.locator("audio[controls]")


def test_sounds_are_chosen_pasted_and_dropped_and_go_with_one_message(chat: Any, hearing: Running):
    choose_sounds(chat, "chosen.wav")
    expect(waiting(chat)).to_have_count(1)
    hand_over(chat, "paste", ("pasted.wav", "audio/x-wav", WAV))
    expect(waiting(chat)).to_have_count(2)
    hand_over(chat, "drop", ("dropped.wav", "", WAV))
    expect(waiting(chat)).to_have_text([f"{name}.wav×" for name in ("chosen", "pasted", "dropped")])
    expect(players(waiting(chat)).first).to_have_js_property("duration", DURATION_S)
    expect(chat.get_by_role("status").first).to_contain_text("3 sounds go with the next message")
    check_accessible(chat)
    send(chat, "what?")

    prompt, media = asked(hearing)
    assert media == of_sounds(WAV, WAV, WAV)
    assert prompt.count("<sound>") == 3
    expect(waiting(chat)).to_have_count(0)
    expect(players(chat.locator("article.user"))).to_have_count(3)
    for player in players(chat.locator("article.user")).all():
        expect(player).to_have_js_property("duration", DURATION_S)
    expect(chat.locator("article.user")).to_contain_text("dropped.wav")
    check_accessible(chat)
    send(chat, "and now?")
    assert asked(hearing)[1] == of_sounds(WAV, WAV, WAV), "they stay in the conversation, and no other came"


def test_a_sound_is_removed_by_the_keyboard(chat: Any, hearing: Running):
    choose_sounds(chat, "a.wav", "b.wav")
    expect(waiting(chat)).to_have_count(2)
    chat.get_by_role("button", name="Remove a.wav").focus()
    chat.keyboard.press("Enter")
    expect(chat.get_by_role("button", name="Remove b.wav")).to_be_focused()
    chat.keyboard.press("Enter")
    expect(waiting(chat)).to_have_count(0)
    expect(chat.get_by_label("Message", exact=True)).to_be_focused()
    send(chat, "hello")
    assert asked(hearing)[1] == MediaRefs()


def test_a_sound_alone_is_a_message_and_survives_a_reload(chat: Any, hearing: Running):
    choose_sounds(chat, "a.wav")
    expect(waiting(chat)).to_have_count(1)
    send(chat, "")
    assert asked(hearing) == ("<|user|><sound>\n<|assistant|>", of_sounds(WAV))
    chat.reload()
    expect(players(chat.locator("article.user"))).to_have_js_property("duration", DURATION_S)
    send(chat, "what?")
    assert asked(hearing)[1] == of_sounds(WAV)


def test_an_edit_leaves_out_a_sound(chat: Any, hearing: Running):
    other = WAV + b"\0\0"
    hand_over(chat, "drop", ("a.wav", "audio/wav", WAV), ("b.wav", "audio/wav", other))
    expect(waiting(chat)).to_have_count(2)
    send(chat, "what?")
    chat.locator("article.user").get_by_role("button", name="Edit").click()
    expect(players(chat.locator("article.user"))).to_have_count(2)
    check_accessible(chat)
    chat.get_by_role("button", name="Remove a.wav").focus()
    chat.keyboard.press("Enter")
    expect(chat.get_by_role("button", name="Remove b.wav")).to_be_focused()
    chat.get_by_role("button", name="Send", exact=True).first.click()
    expect(chat.locator("article.user .branches")).to_contain_text("2/2")
    replied(chat)
    assert asked(hearing)[1] == of_sounds(other)
    expect(players(chat.locator("article.user"))).to_have_count(1)
    chat.get_by_role("button", name="Previous version").click()
    expect(players(chat.locator("article.user"))).to_have_count(2)


def test_a_sound_that_the_browser_has_no_room_for_is_not_kept_and_the_text_is(chat: Any, hearing: Running):
    choose_sounds(chat, "long.wav", data=WAV + bytes(8 << 20))
    expect(waiting(chat)).to_have_count(1)
    send(chat, "a long one")
    expect(chat.get_by_text("images and sounds of this conversation are not kept")).to_be_visible()
    expect(players(chat.locator("article.user"))).to_have_count(1)
    chat.reload()
    expect(chat.locator("article.user")).to_contain_text("a long one")
    expect(chat.locator("article.user")).to_contain_text("long.wav, a sound that was too large to keep")
    send(chat, "still there?")
    assert asked(hearing)[1] == MediaRefs()


FORMATS = {
    "wav": WAV,
    "flac": b"fLaC\0\0\0\x22",
    "ogg": b"OggS\0\x02",
    "mp3": b"\xff\xfb\x90\x64",
}


def test_the_content_of_a_file_says_which_sound_it_is(chat: Any, hearing: Running):
    """Whatever its name and its type; a server may be told the format."""
    hand_over(chat, "drop", *((f"{name}.bin", "video/ogg", data) for name, data in FORMATS.items()))
    expect(waiting(chat)).to_have_count(4)
    with chat.expect_request("**/v1/chat/completions") as info:
        send(chat, "")
    content = info.value.post_data_json["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["input_audio"] * 4
    assert [part["input_audio"]["format"] for part in content] == list(FORMATS)
    assert asked(hearing)[1] == of_sounds(*FORMATS.values())


def test_other_files_are_refused(chat: Any):
    choose_sounds(chat, "notes.mp3", data="my passwords".encode("utf-16"), kind="audio/mpeg")
    expect(chat.get_by_text("notes.mp3 is not sent: it is no WAV, FLAC, OGG or MP3 sound.")).to_be_visible()
    hand_over(chat, "drop", ("a.m4a", "audio/mp4", b"\0\0\0\x20ftypM4A "), ("a.png", "image/png", PNG))
    expect(chat.get_by_text("a.m4a is not sent")).to_be_visible()
    expect(chat.get_by_text("This model does not support images.")).to_be_visible()
    expect(waiting(chat)).to_have_count(0)


def test_a_model_that_does_not_hear_has_no_button_and_refuses_a_drop(page: Any, server: Running):
    opened(page, server.url)
    expect(page.get_by_label("Sound", exact=True)).to_be_hidden()
    hand_over(page, "drop", ("a.wav", "audio/wav", WAV))
    expect(page.get_by_text("This model does not support audio.")).to_be_visible()
    expect(waiting(page)).to_have_count(0)


def test_a_model_that_sees_and_hears_has_one_button_for_both(page: Any, seeing_and_hearing: Running):
    opened(page, seeing_and_hearing.url)
    choose(page, "File", "a.wav", data=WAV, kind="audio/wav")
    expect(waiting(page)).to_have_count(1)
    choose(page, "File", "a.png", data=PNG, kind="image/png")
    expect(waiting(page)).to_have_count(2)
    hand_over(page, "paste", ("b.wav", "audio/wav", WAV), ("notes.txt", "text/plain", b"secret"))
    expect(
        page.get_by_text("notes.txt is not sent: it is no PNG, JPEG, WEBP, GIF or BMP image and no WAV,")
    ).to_be_visible()
    expect(page.get_by_role("status").first).to_contain_text("1 image and 2 sounds go with the next message")
    check_accessible(page)
    send(page, "what?")
    prompt, media = asked(seeing_and_hearing)
    assert prompt.replace("\n", "") == "<|user|><sound><image><sound>what?<|assistant|>"
    coded = base64.b64encode(PNG).decode()
    assert media == MediaRefs((ImageRef(url=f"data:image/png;base64,{coded}"),), of_sounds(WAV, WAV).audios)


def test_a_sound_is_not_sent_to_a_model_that_came_meanwhile_and_does_not_hear(chat: Any, hearing: Running):
    for path in ("ready", "v1/chat/completions"):
        chat.route(f"**/{path}", lambda route: route.abort())
    send(chat, "hello?")
    expect(chat.locator("#offline")).to_be_visible()
    choose_sounds(chat, "a.wav")
    expect(waiting(chat)).to_have_count(1)
    chat.unroute_all()
    chat.route(
        "**/model_info", lambda route: route.fulfill(json=route.fetch().json() | {"has_audio_understanding": False})
    )
    expect(waiting(chat)).to_have_count(0)
    expect(chat.get_by_label("Sound", exact=True)).to_be_hidden()
    send(chat, "hello")
    assert asked(hearing)[1] == MediaRefs()
    assert all("net::ERR" in error for error in chat.errors)
    chat.errors.clear()


def test_an_exported_conversation_has_its_sounds(chat: Any, hearing: Running):
    choose_sounds(chat, "a [1].wav")
    expect(waiting(chat)).to_have_count(1)
    send(chat, "what?")
    with chat.expect_download() as info:
        chat.get_by_role("button", name="Export Markdown").click()
    coded = base64.b64encode(WAV).decode()
    assert f"[a \\[1\\].wav](data:audio/wav;base64,{coded})\n\nwhat?" in Path(info.value.path()).read_text()
    with chat.expect_download() as info:
        chat.get_by_role("button", name="Export JSON").click()
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("article")).to_have_count(0)
    chat.locator("#import").set_input_files(info.value.path())
    expect(players(chat.locator("article.user"))).to_have_js_property("duration", DURATION_S)
    send(chat, "and now?")
    assert asked(hearing)[1] == of_sounds(WAV)


@pytest.mark.parametrize("url", ["https://a.example/b.wav", "data:image/png;base64,YQ==", "data:audio/wav,a"])
def test_other_addresses_of_sounds_are_not_imported(chat: Any, tmp_path: Path, url: str):
    choose_sounds(chat, "a.wav")
    expect(waiting(chat)).to_have_count(1)
    send(chat, "what?")
    with chat.expect_download() as info:
        chat.get_by_role("button", name="Export JSON").click()
    text = Path(info.value.path()).read_text()
    changed = tmp_path / "changed.json"
    changed.write_text(text.replace(f"data:audio/wav;base64,{base64.b64encode(WAV).decode()}", url))
    chat.locator("#import").set_input_files(changed)
    expect(chat.get_by_text("this is not a conversation of this page")).to_be_visible()
