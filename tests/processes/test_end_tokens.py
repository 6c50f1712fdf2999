"""Which tokens end outputs: what the checkpoint's files say, and what a chat template shows."""

import json
import sys
from contextlib import closing
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.checkpoint.gguf import GgufFile
from headrace.checkpoint.gguf_names import end_ids
from headrace.checkpoint.model_config import parse_hf_config
from headrace.config.server_args import ServerArgs
from headrace.processes.model_files import ModelFiles
from headrace.text.tokenizers import tokenizer_from_gguf

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))

from test_chat_templates import GEMMA_STYLE, LLAMA3_STYLE, QWEN_STYLE

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
]
SPECIAL += ["<|end|>", "<|return|>", "<|call|>"]
IDS = {text: len(ALPHABET) + index for index, text in enumerate(SPECIAL)}

HARMONY_STYLE = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + END }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
NO_END = "{% for message in messages %}{{ message.role }}: {{ message.content }}. {% endfor %}<|im_end|>"
SHOUTED = "{% for message in messages %}{{ message.content | upper }} </s>{% endfor %}"
PARTS = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"
REFUSES = "{{ raise_exception('no') }}"


def folder(path, *, config=None, generation=None, named=None, special_map=None, template=None):
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(path / "tokenizer.json"))
    files = {
        "config.json": {"model_type": "llama", "vocab_size": 300} | (config or {}),
        "generation_config.json": generation,
        "tokenizer_config.json": (named or {}) | ({"chat_template": template} if template else {}),
        "special_tokens_map.json": special_map,
    }
    for name, content in files.items():
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


def ends_of(path, **options):
    with closing(ModelFiles(ServerArgs(model_path=str(path), **options))) as files:
        eos, turn = files.end_tokens
    return set(eos), set(turn)


@pytest.mark.parametrize(
    "files, want",
    [
        ({"config": {"eos_token_id": 2}, "named": {"eos_token": "<pad>"}}, {2, IDS["<pad>"]}),
        ({"config": {"eos_token_id": None}, "named": {"eos_token": "</s>"}}, {IDS["</s>"]}),
        (
            {"config": {"eos_token_id": [2, 3]}, "generation": {"eos_token_id": 4}, "named": {"eos_token": "</s>"}},
            {2, 3, 4, IDS["</s>"]},
        ),
        ({"config": {"eos_token_id": 2}, "named": {"eos_token": {"content": "</s>"}}}, {2, IDS["</s>"]}),
        ({"config": {"eos_token_id": 2}, "special_map": {"eos_token": "</s>"}}, {2, IDS["</s>"]}),
        ({"config": {"eos_token_id": 2}, "named": {"eos_token": "unknown"}}, {2}),
        ({"config": {"eos_token_id": 2}, "named": {"eos_token": None}}, {2}),
        ({"config": {"eos_token_id": None}}, set()),
    ],
)  # fmt: skip
def test_the_tokenizer_names_an_end_as_the_config_and_the_generation_config_do(tmp_path, files, want):
    assert ends_of(folder(tmp_path, **files)) == (want, set())


@pytest.mark.parametrize(
    "stated, want", [("7", {7}), ("0", {0}), ("[7, 8]", {7, 8}), ("[0]", {0}), ("null", {IDS["</s>"]})]
)
def test_an_override_of_the_end_stands_for_all_files(tmp_path, stated, want):
    path = folder(tmp_path, config={"eos_token_id": None}, named={"eos_token": "</s>"})

    assert ends_of(path, json_model_override_args=f'{{"eos_token_id": {stated}}}')[0] == want


@pytest.mark.parametrize("tool_parser", ["auto", "none"])
@pytest.mark.parametrize(
    "template, end",
    [
        (LLAMA3_STYLE, "<|eot_id|>"),
        (QWEN_STYLE, "<|im_end|>"),
        (GEMMA_STYLE, "<end_of_turn>"),
        (SHOUTED, "</s>"),
        (PARTS, "</s>"),
        (HARMONY_STYLE.replace("END", "'<|return|>'"), "<|return|>"),
        # What a format uses between the messages of a turn ends none.
        (HARMONY_STYLE.replace("END", "'<|end|>'"), None),
        (NO_END, None),
        (REFUSES, None),
    ],
)
def test_chats_end_with_the_token_that_the_template_shows(tmp_path, template, end, tool_parser):
    path = folder(tmp_path, config={"eos_token_id": 2}, template=template)

    assert ends_of(path, tool_call_parser=tool_parser) == ({2}, set() if end is None else {IDS[end]})


def test_a_tokenizer_s_end_that_the_format_uses_within_a_turn_ends_nothing(tmp_path):
    template = HARMONY_STYLE.replace("END", "'<|return|>'")
    path = folder(tmp_path, config={"eos_token_id": 2}, named={"eos_token": "<|end|>"}, template=template)

    assert ends_of(path) == ({2}, {IDS["<|return|>"]})
    # What the config or the user states is done.
    assert ends_of(path, json_model_override_args=f'{{"eos_token_id": {IDS["<|end|>"]}}}')[0] == {IDS["<|end|>"]}
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 300, "eos_token_id": IDS["<|end|>"]})
    )
    assert ends_of(path)[0] == {IDS["<|end|>"]}


def test_the_template_of_the_options_and_that_for_tools_count(tmp_path):
    templates = [{"name": "default", "template": SHOUTED}, {"name": "tool_use", "template": QWEN_STYLE}]
    path = folder(tmp_path, config={"eos_token_id": 2}, template=templates)

    assert ends_of(path)[1] == {IDS["</s>"], IDS["<|im_end|>"]}
    assert ends_of(path, chat_template=LLAMA3_STYLE)[1] == {IDS["<|eot_id|>"]}


def gguf_with(path, tokens, **ids):
    """A GGUF file of a tokenizer. tokens: (text, type) pairs, of the first tokens."""
    tokens = [*tokens, ("x", NORMAL), ("y", NORMAL), ("xy", NORMAL)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges(["x y"])
    for name, index in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


NORMAL, CONTROL, USER = 1, 3, 4


@pytest.mark.parametrize(
    "texts, ids, want",
    [
        (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], {"eos": 0}, ["<|endoftext|>", "<|im_end|>"]),
        (["<s>", "</s>", "<|eot_id|>", "<|eom_id|>"], {"eos": 1}, ["</s>", "<|eot_id|>", "<|eom_id|>"]),
        (["<bos>", "<eos>", "<end_of_turn>", "<start_of_turn>"], {}, ["<eos>", "<end_of_turn>"]),
        (["a", "_<EOT>", "<EOT>"], {"eos": 0, "eot": 1}, ["a", "_<EOT>", "<EOT>"]),
        (["<|end|>", "<|user|>"], {}, ["<|end|>"]),
        (["<|fim_pad|>", "<|fim_middle|>", "<|file_sep|>"], {}, ["<|fim_pad|>", "<|file_sep|>"]),
        # harmony's messages, and a token that Gemma 4 has beside its own end
        (["<|end|>", "<|return|>", "<|call|>"], {}, ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos": 1, "eot": 0}, ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|flush|>", "<|calls|>"], {"eom": 0}, ["<|flush|>", "<|calls|>"]),
        (["<|end|>", "<|return|>"], {}, ["<|end|>", "<|return|>"]),
        (["</s>", "<turn|>", "<|tool_response>"], {"eot": 0}, ["<turn|>", "<|tool_response>"]),
        (["</s>", "<turn|>", "<|tool_response>"], {}, ["<turn|>", "<|tool_response>"]),
    ],
)
@pytest.mark.parametrize("kind", [CONTROL, USER])
def test_ends_of_a_gguf_file_are_known_by_their_text(tmp_path, texts, ids, want, kind):
    file = gguf_with(tmp_path / "m.gguf", [(text, kind) for text in texts], **ids)

    assert end_ids(file) == [texts.index(text) for text in want]
    assert tokenizer_from_gguf(file).eos_ids == tuple(end_ids(file))


def test_ordinary_text_of_a_gguf_file_ends_nothing(tmp_path):
    texts = [("<|im_end|>", NORMAL), ("</s>", NORMAL), ("<|endoftext|>", CONTROL)]
    file = gguf_with(tmp_path / "m.gguf", texts)

    assert end_ids(file) == [2]


def test_what_a_gguf_file_adds_counts_only_if_the_format_does_not_use_it_within_a_turn(tmp_path):
    texts = ["<|end|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>"]
    path = tmp_path / "m.gguf"
    ends = end_ids(gguf_with(path, [(text, CONTROL) for text in texts], eos=1))
    assert set(ends) == {0, 1}
    (tmp_path / "harmony.jinja").write_text(HARMONY_STYLE.replace("END", "'<|return|>'"))
    model = parse_hf_config({"model_type": "llama", "vocab_size": 8, "eos_token_id": ends}, origin="m.gguf")
    args = ServerArgs(model_path=str(path), chat_template=str(tmp_path / "harmony.jinja"))
    with closing(ModelFiles(args)) as files:
        files.config = model

        assert files.end_tokens == ({1}, set())
