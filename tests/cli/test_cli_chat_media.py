"""Images and sounds in the terminal chat: files of the user, sent with a message."""

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli.app import main
from headrace.cli.chat import Conversation, run_chat
from headrace.cli.chat_sources import ChatSampling, Piece
from headrace.cli.given import number_of, read_part, shown
from headrace.errors import ConfigError, RequestError
from headrace.media_kinds import DEFAULT_FILE_BYTES, MediaKind

PNG = b"\x89PNG\r\n\x1a\n and so on"
WAV = b"RIFF....WAVE and so on"
IMAGE = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"},
}
SOUND = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
TEXT = {"type": "text", "text": "what?"}

KINDS = pytest.mark.parametrize(("kind", "part"), [(MediaKind.IMAGE, IMAGE), (MediaKind.AUDIO, SOUND)])


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
            raise RequestError("this model does not support images")
        yield Piece("yes", 1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"image": tmp_path / "a picture.png", "audio": tmp_path / "a sound.wav"}
    found["image"].write_bytes(PNG)
    found["audio"].write_bytes(WAV)
    return found


def talk(monkeypatch, source, *lines, media=(), stdin=Terminal) -> str:
    monkeypatch.setattr("sys.stdin", stdin("".join(line + "\n" for line in lines)))
    out = io.StringIO()
    run_chat(source, Console(file=out, width=100), media=media)
    return out.getvalue()


def asked(source: Source) -> list[Any]:
    return [message["content"] for message in source.asked[-1] if message["role"] == "user"]


@pytest.mark.parametrize("stdin", [io.StringIO, Terminal], ids=["a pipe", "a terminal"])
def test_media_of_the_command_go_with_the_first_message(monkeypatch, files, stdin):
    source = Source()
    given = [
        read_part(MediaKind.IMAGE, files["image"]),
        read_part(MediaKind.AUDIO, files["audio"]),
        read_part(MediaKind.AUDIO, files["audio"]),
    ]
    talk(monkeypatch, source, "what?", "why?", media=given, stdin=stdin)
    assert asked(source) == [[IMAGE, SOUND, SOUND, TEXT], "why?"]


def test_the_options_name_files_and_can_be_repeated(monkeypatch, files):
    source = Source()
    monkeypatch.setattr("headrace.cli.chat_sources.ServerChat", lambda *_: source)
    monkeypatch.setattr("sys.stdin", io.StringIO("what?\n"))
    sound = ["--audio", str(files["audio"])]
    with pytest.raises(SystemExit) as left:
        main(["chat", "--url", "http://a.example", *sound, "--image", str(files["image"]), *sound])
    assert left.value.code == 0
    assert asked(source) == [[IMAGE, SOUND, SOUND, TEXT]]


def test_an_option_with_another_file_is_an_error_before_a_model_is_loaded(files, capsys):
    with pytest.raises(SystemExit) as left:
        main(["chat", "--model-path", "nowhere", "--audio", str(files["image"])])
    assert left.value.code == 2
    assert "is not an audio file: WAV, MP3, FLAC and OGG can be sent" in capsys.readouterr().err


@KINDS
def test_one_waits_for_the_next_message_and_stays_in_the_conversation(
    monkeypatch, files, kind: MediaKind, part: dict[str, Any]
):
    source, typed = Source(), f"/{kind} {files[kind]}"
    printed = talk(monkeypatch, source, typed, typed, "/show", "what?", "/show", "why?")

    assert asked(source) == [[part, part, TEXT], "why?"]
    assert printed.count(f"the next message has {kind.amount(2)}") == 2
    assert f"user:\n[{kind}]\n[{kind}]\nwhat?\n" in printed


def test_both_wait_in_the_order_in_which_they_were_given(monkeypatch, files):
    source, sound, image = Source(), f"/audio {files['audio']}", f"/image {files['image']}"
    printed = talk(monkeypatch, source, sound, image, sound, "what?", "/show")

    assert asked(source) == [[SOUND, IMAGE, SOUND, TEXT]]
    assert "the next message has 1 image and 2 audio clips\n" in printed
    assert "user:\n[audio]\n[image]\n[audio]\nwhat?\n" in printed


@pytest.mark.parametrize("command", ["/image", "/audio"])
def test_a_command_without_a_file_drops_its_own_kind_only(monkeypatch, files, command: str):
    source, sound, image = Source(), f"/audio {files['audio']}", f"/image {files['image']}"
    printed = talk(monkeypatch, source, sound, image, command, "what?")

    own, other = ("image", "audio clip") if command == "/image" else ("audio clip", "image")
    assert asked(source) == [[SOUND if command == "/image" else IMAGE, TEXT]]
    assert f"the next message has 1 {other}\n" in printed
    assert f"the next message has no {own}\n" in talk(monkeypatch, source, command)


@KINDS
def test_a_new_conversation_forgets_what_waits(monkeypatch, files, kind: MediaKind, part: dict[str, Any]):
    source = Source()
    talk(monkeypatch, source, f"/{kind} {files[kind]}", "/clear", "what?")
    assert source.asked == [[{"role": "user", "content": "what?"}]]


def test_what_was_refused_is_not_sent_again(monkeypatch, files):
    source = Source(refused=1)
    printed = talk(monkeypatch, source, f"/image {files['image']}", f"/audio {files['audio']}", "what?", "hello")

    assert "does not support images\nnot sent: 1 image and 1 audio clip\n" in printed
    assert source.asked[1] == [{"role": "user", "content": "hello"}]


@KINDS
def test_what_cannot_be_sent_is_said_and_changes_nothing(
    monkeypatch, tmp_path: Path, kind: MediaKind, part: dict[str, Any]
):
    (tmp_path / "a.txt").write_text("my passwords", "utf-16")
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as large:
        large.write(PNG if kind == "image" else WAV)
        large.truncate(DEFAULT_FILE_BYTES + 1)
    source = Source()
    names = ("none", "a.txt", "fifo", "large", ".")
    printed = talk(monkeypatch, source, *(f"/{kind} {tmp_path / name}" for name in names), "what?")

    said = " ".join(printed.split())
    for words in (
        "No such file",
        f"is not an {kind} file: ",
        "is a FIFO",
        "is larger than 20000000 bytes",
        "is a folder",
    ):
        assert words in said, said
    assert source.asked == [[{"role": "user", "content": "what?"}]]


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"\xff\xd8\xff\xe0", "jpeg"), (b"RIFF....WEBPVP8 ", "webp"), (b"GIF89a", "gif"), (b"BM....", "bmp")],
)
def test_the_content_of_a_file_says_which_image_it_is(tmp_path: Path, data: bytes, kind: str):
    path = tmp_path / "file.png"
    path.write_bytes(data)
    assert read_part(MediaKind.IMAGE, path)["image_url"]["url"].startswith(f"data:image/{kind};base64,")
    with pytest.raises(ConfigError, match="is not an audio file: WAV, MP3, FLAC and OGG can be sent"):
        read_part(MediaKind.AUDIO, path)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (WAV, "wav"),
        (b"fLaC\0\0\0\x22", "flac"),
        (b"OggS\0\x02", "ogg"),
        (b"ID3\x04\0", "mp3"),
        (b"\xff\xfb\x90\x64", "mp3"),
        (b"\xff\xf3\x40\xc4", "mp3"),
        (b"\xff\xe3\x18\xc4", "mp3"),
    ],
)
def test_the_content_of_a_file_says_which_sound_it_is(tmp_path: Path, data: bytes, name: str):
    path = tmp_path / "file.mp4"
    path.write_bytes(data)
    assert read_part(MediaKind.AUDIO, path)["input_audio"] == {"data": base64.b64encode(data).decode(), "format": name}
    with pytest.raises(ConfigError, match="is not an image file: PNG, JPEG, WEBP, GIF and BMP can be sent"):
        read_part(MediaKind.IMAGE, path)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xf1\x50\x80", b"\0\0\0\x20ftypM4A ", b"RIFF....AVI "])
def test_other_files_are_no_sounds(tmp_path: Path, data: bytes):
    path = tmp_path / "file.wav"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is not an audio file"):
        read_part(MediaKind.AUDIO, path)


def test_a_saved_conversation_has_its_media(tmp_path: Path, files):
    conversation, loaded = Conversation(None), Conversation(None)
    conversation.media += [read_part(MediaKind.AUDIO, files["audio"]), read_part(MediaKind.IMAGE, files["image"])]
    conversation.ask("what?")
    conversation.save(tmp_path / "saved.json", Source())
    loaded.media.append(read_part(MediaKind.AUDIO, files["audio"]))
    loaded.load(tmp_path / "saved.json", Source())

    assert loaded.messages == [{"role": "user", "content": [SOUND, IMAGE, TEXT]}]
    assert not loaded.media


def test_sounds_of_other_clients_are_loaded(tmp_path: Path):
    path, conversation = tmp_path / "saved.json", Conversation(None)
    path.write_text(
        '[{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "https://a.example/b"}}]}]'
    )
    conversation.load(path, Source())
    assert [shown(message["content"]) for message in conversation.messages] == ["[audio]"]


@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("assistant", TEXT),
        ("user", {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,YQ=="}}),
    ],
)
def test_what_could_not_be_shown_is_not_loaded(tmp_path: Path, role: str, part: dict[str, Any]):
    path = tmp_path / "saved.json"
    path.write_text(str([{"role": role, "content": [part]}]).replace("'", '"'))
    with pytest.raises(ConfigError, match=r"messages\[0\].content must be a text"):
        Conversation(None).load(path, Source())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], ""),
        ([SOUND], "1 audio clip"),
        ([IMAGE] * 2, "2 images"),
        ([SOUND, IMAGE, SOUND], "1 image and 2 audio clips"),
    ],
)
def test_parts_are_counted_by_kind(parts: list[dict[str, Any]], words: str):
    assert number_of(parts) == words
