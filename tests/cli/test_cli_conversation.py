"""Saved conversations, and the history of what was typed, as files."""

import json

import pytest

from headrace.cli.chat import Conversation
from headrace.cli.chat_sources import ChatSampling
from headrace.cli.terminal import MAX_ENTRIES, MAX_ENTRY_CHARS, History
from headrace.errors import ConfigError


class Source:
    name = "m"

    def __init__(self):
        self.sampling = ChatSampling(top_p=0.5)


def test_a_saved_conversation_comes_back_whole(tmp_path):
    path = tmp_path / "a.json"
    source, conversation = Source(), Conversation("be brief")
    conversation.messages += [{"role": "user", "content": "grüß"}, {"role": "assistant", "content": "hi\n"}]
    conversation.json_schema = '{"b":1,"a":2}'
    assert not conversation.is_kept
    conversation.save(path, source)
    assert conversation.is_kept

    other, loaded = Source(), Conversation(None)
    other.sampling = ChatSampling(seed=1)
    loaded.load(path, other)

    assert loaded.messages == conversation.messages
    assert list(json.loads(loaded.json_schema)) == ["b", "a"]
    assert other.sampling == ChatSampling(top_p=0.5)
    loaded.clear()
    assert loaded.messages == [{"role": "system", "content": "be brief"}]


def test_a_list_of_messages_changes_no_settings(tmp_path):
    path, source, conversation = tmp_path / "a.json", Source(), Conversation(None)
    path.write_text('[{"role": "user", "content": "hi"}]')
    conversation.load(path, source)
    assert conversation.messages == [{"role": "user", "content": "hi"}]
    assert source.sampling == ChatSampling(top_p=0.5)


def test_calls_and_their_results_are_loaded(tmp_path):
    path = tmp_path / "a.json"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "7"},
    ]
    path.write_text(json.dumps(messages))
    conversation = Conversation(None)
    conversation.load(path, Source())
    assert conversation.messages == messages


def test_overwriting_keeps_links_and_modes(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("{}")
    target.chmod(0o640)
    link.symlink_to(target)

    with pytest.raises(FileExistsError):
        Conversation("s").save(link, Source())
    Conversation("s").save(link, Source(), overwrite=True)

    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert json.loads(target.read_text())["messages"] == [{"role": "system", "content": "s"}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "target.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("[]", "messages is empty"),
        ("{}", "has no messages"),
        ('{"messages": [], "x": 1}', "no field 'x'"),
        ("[1]", r"messages\[0\]: expected an object, got an integer"),
        ('[{"role": "", "content": ""}]', r"messages\[0\].role"),
        (
            '[{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]',
            r"messages\[0\].content must be a text",
        ),
        ('{"messages": [{"role": "user", "content": ""}], "settings": {"top_p": 2}}', "top_p 2"),
        ('{"messages": [{"role": "user", "content": ""}], "settings": [1]}', "settings must be an object"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path, text, words):
    path, source, conversation = tmp_path / "a.json", Source(), Conversation("s")
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        conversation.load(path, source)
    assert conversation.messages == [{"role": "system", "content": "s"}]
    assert source.sampling == ChatSampling(top_p=0.5)


def test_the_history_is_bounded_and_survives_what_is_no_entry(tmp_path):
    path = tmp_path / "state" / "history"
    history = History(path)
    assert history.entries() == []
    history.add("first\nof two lines")
    history.add("x" * (MAX_ENTRY_CHARS + 1))
    with path.open("a") as file:
        file.write("not JSON\n7\n")
    assert history.entries() == ["first\nof two lines"]

    with path.open("a") as file:
        file.writelines(json.dumps(str(number)) + "\n" for number in range(MAX_ENTRIES + 5))
    assert history.entries() == [str(number) for number in range(5, MAX_ENTRIES + 5)]
    assert len(path.read_text().splitlines()) == MAX_ENTRIES
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_that_cannot_be_written_is_forgotten(tmp_path):
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "history")
    history.add("x")
    assert history.entries() == []
