"""Images in the terminal chat: files of the user, sent with a message."""

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli.chat import run_chat
from headrace.cli.chat_sources import ChatSampling, Piece
from headrace.cli.conversation import Conversation
from headrace.cli.images import MAX_IMAGE_BYTES, read_image
from headrace.errors import ConfigError, RequestError

PNG = b"\x89PNG\r\n\x1a\n and so on"
PART = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"},
}


class Source:
    """Says yes, but no to messages that it is to refuse; remembers what it was asked."""

    name = "m"

    def __init__(self, refused: int = 0):
        self.refused = refused
        self.sampling = ChatSampling()
        self.asked: list[list[dict[str, Any]]] = []

    def reply(self, messages, json_schema, tools):
        self.asked.append([dict(message) for message in messages])
        if len(self.asked) <= self.refused:
            raise RequestError("this model does not see images")
        yield Piece("yes", 1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    return path


def talk(monkeypatch, source, *lines, images=(), stdin=Terminal) -> str:
    monkeypatch.setattr("sys.stdin", stdin("".join(line + "\n" for line in lines)))
    out = io.StringIO()
    run_chat(source, Console(file=out, width=100), images=images)
    return out.getvalue()


def with_text(text: str, count: int = 1) -> list[dict[str, Any]]:
    return [*[PART] * count, {"type": "text", "text": text}]


@pytest.mark.parametrize("stdin", [io.StringIO, Terminal], ids=["a pipe", "a terminal"])
def test_images_of_the_command_go_with_the_first_message(monkeypatch, file: Path, stdin):
    source = Source()
    talk(monkeypatch, source, "what?", "why?", images=[read_image(file)] * 2, stdin=stdin)

    asked = [message["content"] for message in source.asked[-1] if message["role"] == "user"]
    assert asked == [with_text("what?", 2), "why?"]


def test_an_image_waits_for_the_next_message_and_stays_in_the_conversation(monkeypatch, file: Path):
    source = Source()
    printed = talk(monkeypatch, source, f"/image {file}", f"/image {file}", "/show", "what?", "/show", "why?")

    asked = [message["content"] for message in source.asked[-1] if message["role"] == "user"]
    assert asked == [with_text("what?", 2), "why?"]
    assert printed.count("the next message has 2 images") == 2
    assert "user:\n[image]\n[image]\nwhat?\n" in printed


@pytest.mark.parametrize("command", ["/image", "/clear"])
def test_an_image_that_waits_can_be_left_out(monkeypatch, file: Path, command: str):
    source = Source()
    talk(monkeypatch, source, f"/image {file}", command, "what?")
    assert source.asked == [[{"role": "user", "content": "what?"}]]


def test_a_refused_image_is_not_sent_again(monkeypatch, file: Path):
    source = Source(refused=1)
    printed = talk(monkeypatch, source, f"/image {file}", "what?", "hello")

    assert "does not see images\nnot sent: 1 image\n" in printed
    assert source.asked[1] == [{"role": "user", "content": "hello"}]


def test_what_cannot_be_sent_is_said_and_changes_nothing(monkeypatch, tmp_path: Path):
    (tmp_path / "a.txt").write_text("my passwords")
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large.png").open("wb") as large:
        large.write(PNG)
        large.truncate(MAX_IMAGE_BYTES + 1)
    source = Source()
    names = ("none.png", "a.txt", "fifo", "large.png", ".")
    printed = talk(monkeypatch, source, *(f"/image {tmp_path / name}" for name in names), "what?")

    said = " ".join(printed.split())
    for words in ("No such file", "is no image: PNG", "is a FIFO", "is larger than 20000000 bytes", "is a folder"):
        assert words in said, said
    assert source.asked == [[{"role": "user", "content": "what?"}]]


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"\xff\xd8\xff\xe0", "jpeg"), (b"RIFF....WEBPVP8 ", "webp"), (b"GIF89a", "gif"), (b"BM....", "bmp")],
)
def test_the_content_of_a_file_says_what_it_is(tmp_path: Path, data: bytes, kind: str):
    path = tmp_path / "file.png"
    path.write_bytes(data)
    assert read_image(path)["image_url"]["url"].startswith(f"data:image/{kind};base64,")


def test_a_saved_conversation_has_its_images(tmp_path: Path, file: Path):
    conversation, loaded = Conversation(None), Conversation(None)
    conversation.images.append(read_image(file))
    conversation.ask("what?")
    conversation.save(tmp_path / "saved.json", Source())
    loaded.images.append(read_image(file))
    loaded.load(tmp_path / "saved.json", Source())

    assert loaded.messages == [{"role": "user", "content": with_text("what?")}]
    assert not loaded.images


def test_images_of_others_than_the_user_are_not_loaded(tmp_path: Path):
    path = tmp_path / "saved.json"
    path.write_text('[{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]')
    with pytest.raises(ConfigError, match=r"messages\[0\].content must be a text"):
        Conversation(None).load(path, Source())
