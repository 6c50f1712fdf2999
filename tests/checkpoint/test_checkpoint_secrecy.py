"""What is said of a file that is no checkpoint: never what it holds, and never where it lies. Clients of the control routes may name paths."""

import struct
from pathlib import Path

import pytest

from headrace.checkpoint.files import read_json_object
from headrace.checkpoint.gguf import GgufFile
from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.errors import ModelError

CONTENTS = {
    "text": b"root:x:0:0:swordfish\n",
    "almost JSON": b'{"password": swordfish',
    "not UTF-8": b'{"a": "\xe9swordfish"}',
    "control character": b'{"a": "swordfish\n"}',
    "a long number": b'{"a": ' + b"7" * 5000 + b"}",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_no_message_repeats_a_file_or_its_folder(tmp_path: Path, content: bytes):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    weights = tmp_path / "x.safetensors"
    weights.write_bytes(struct.pack("<Q", len(content)) + content)
    messages = []
    for read in (lambda: read_json_object(file), lambda: SafetensorsFile(weights), lambda: GgufFile(file)):
        with pytest.raises(ModelError) as caught:
            read()
        messages.append(caught.value.message)
    for message in messages:
        for part in ("swordfish", "root", "0xe9", "777", str(tmp_path), "codec", "Error"):
            assert part not in message


def test_a_file_that_may_not_be_read_is_named_without_its_folder(tmp_path: Path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"^config\.json [^/]*$"):
        read_json_object(tmp_path / "config.json")


def test_a_git_lfs_pointer_is_told(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        GgufFile(tmp_path / "m.gguf")
