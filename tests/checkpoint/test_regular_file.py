"""What stands in the place of a file and is none is refused at once: reading it could take for ever."""

import json
import os
import shutil
from pathlib import Path

import pytest

from headrace.checkpoint.files import open_regular
from headrace.checkpoint.lora import LoraCheckpoint
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError
from headrace.text.chat_templates import read_template_argument

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 8,
}


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for path, kind in (("fifo", "a FIFO"), ("link", "a FIFO"), ("/dev/zero", "a device"), (".", "a folder")):
        with pytest.raises(ModelError, match=f"is {kind}; only regular files"):
            open_regular(tmp_path / path)
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "good").symlink_to("file")
    with open_regular(tmp_path / "good") as file:
        assert file.read() == b"text"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["model.gguf", "model", "stdin"])
def test_a_path_that_is_no_file(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} is a FIFO"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_checkpoint_with_something_else_in_it(name, tmp_path):
    """Nothing waits for the FIFO's writer; it is refused, or as if it were not there."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_with_something_else_in_it(name, tmp_path: Path):
    shutil.copyfile(__file__, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]})
    )
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError):
        LoraCheckpoint(tmp_path)


def test_a_chat_template(tmp_path):
    os.mkfifo(tmp_path / "template")
    with pytest.raises(ModelError, match="FIFO"):
        read_template_argument(str(tmp_path / "template"))
