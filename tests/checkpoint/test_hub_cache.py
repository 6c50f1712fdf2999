"""Models of the Hugging Face cache are found by name, as Hugging Face's own library finds them, or the error says what to do."""

import gc
import hashlib
import json
import weakref
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from headrace.checkpoint.hub_cache import HubName, cache_folder, choose_gguf, format_of, list_cached
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.source import open_checkpoint
from headrace.config.server_args import ServerArgs
from headrace.errors import ModelError
from headrace.execution.model_source import read_model_config
from headrace.processes.model_files import open_tokenizer

OLD, NEW = "1" * 40, "2" * 40
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "tie_word_embeddings": True,
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no model in the working directory."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


def put(cache: Path, repo: str, files: dict[str, bytes], commit: str = NEW, ref: str | None = "main") -> Path:
    """Files of a repository as Hugging Face's library caches them: blobs, and a snapshot of links to them."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for name, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(name.encode() + data).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../" * (2 + name.count("/"))) / "blobs" / blob.name)
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


def model_files(tmp_path: Path, value: float = 1.0) -> dict[str, bytes]:
    save_file({"model.embed_tokens.weight": torch.full((40, 64), value)}, tmp_path / "w.safetensors")
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": (tmp_path / "w.safetensors").read_bytes(),
    }


def smollm2() -> bytes:
    return resolve_model("smollm2").read_bytes()


def test_a_name_is_the_snapshot_of_its_main_revision(cache, tmp_path):
    old = put(cache, "org/tiny", model_files(tmp_path, 1.0), OLD, ref="v1.0")
    new = put(cache, "org/tiny", model_files(tmp_path, 2.0), NEW)

    assert resolve_model("org/tiny") == new
    assert str(new / "config.json") == huggingface_hub.try_to_load_from_cache(
        "org/tiny", "config.json", cache_dir=cache
    )
    assert resolve_model(str(cache / "models--org--tiny")) == new
    assert resolve_model("org/tiny@v1.0") == resolve_model(f"org/tiny@{OLD}") == old
    assert open_checkpoint(resolve_model("org/tiny")).tensor("model.embed_tokens.weight")[0, 0] == 2.0


def test_a_local_folder_wins(cache, tmp_path):
    put(cache, "org/tiny", model_files(tmp_path))
    local = Path("org/tiny")
    local.mkdir(parents=True)

    assert resolve_model("org/tiny") == local


@pytest.mark.parametrize("files", [{}, {"config.json": json.dumps(CONFIG).encode(), "README.md": b"what it is"}])
def test_the_gguf_file_of_a_repository_is_served_by_the_name(files, cache):
    snapshot = put(cache, "org/tiny-GGUF", {"tiny-Q4_1.gguf": smollm2(), "mmproj-F16.gguf": b"GGUF", **files})

    for text in ("org/tiny-GGUF", "org/tiny-GGUF:Q4_1", "org/tiny-GGUF:tiny-Q4_1.gguf", f"org/tiny-GGUF@{NEW}:q4_1"):
        assert resolve_model(text) == snapshot / "tiny-Q4_1.gguf"
    args = ServerArgs(model_path="org/tiny-GGUF:Q4_1", tokenizer_path="org/tiny-GGUF")
    assert args.served_name == "tiny-GGUF"
    assert read_model_config(args).num_layers == 30
    assert open_tokenizer(args).encode("The") == open_tokenizer(ServerArgs(model_path="smollm2")).encode("The")


def test_the_served_name_is_that_of_the_repository():
    assert ServerArgs(model_path="Org/Tiny-1.5B@refs/pr/1").served_name == "Tiny-1.5B"
    assert ServerArgs(model_path="folder/tiny.gguf").served_name == "tiny"


def test_a_missing_model_says_what_was_looked_for_and_how_to_get_it(cache):
    with pytest.raises(ModelError, match=r"looked for .*/hub/models--org--tiny\); .* headrace pull org/tiny:Q4_K_M$"):
        resolve_model("org/tiny:Q4_K_M")


def test_a_missing_revision_lists_what_is_there(cache, tmp_path):
    put(cache, "org/tiny", model_files(tmp_path), OLD, ref=None)

    with pytest.raises(ModelError, match=rf"no revision main .*{OLD}; .* headrace pull org/tiny$"):
        resolve_model("org/tiny")
    with pytest.raises(ModelError, match=rf"snapshots/{NEW}\); .* headrace pull org/tiny@{NEW}$"):
        resolve_model(f"org/tiny@{NEW}")


@pytest.mark.parametrize("content", [b"../../../../etc", b"\xff\xfe", b"", b"2" * 41])
def test_a_broken_ref_is_no_revision(content, cache, tmp_path):
    snapshot = put(cache, "org/tiny", model_files(tmp_path))
    (snapshot.parent.parent / "refs" / "main").write_bytes(content)

    with pytest.raises(ModelError, match="no revision main"):
        resolve_model("org/tiny")


def test_a_file_whose_blob_is_missing_is_named(cache, tmp_path):
    snapshot = put(cache, "org/tiny", model_files(tmp_path))
    (snapshot / "model.safetensors").resolve().unlink()

    with pytest.raises(ModelError, match=r"model\.safetensors .* is not whole .* headrace pull org/tiny$"):
        resolve_model("org/tiny")


def test_a_snapshot_of_nothing_useful(cache):
    put(cache, "org/tiny", {"README.md": b"hello"})

    with pytest.raises(ModelError, match=r"neither config\.json nor weights .* headrace pull org/tiny$"):
        resolve_model("org/tiny")


def test_links_out_of_the_cache_are_not_followed(cache, tmp_path):
    files = model_files(tmp_path)
    snapshot = put(cache, "org/tiny", files)
    (tmp_path / "secret.json").write_bytes(files["config.json"])
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "secret.json")

    with pytest.raises(ModelError, match=r"config\.json of org/tiny is a link that leads out"):
        resolve_model("org/tiny")


def test_a_repository_may_lie_on_another_disk(cache, tmp_path):
    snapshot = put(tmp_path / "disk", "org/tiny", model_files(tmp_path))
    cache.mkdir()
    (cache / "models--org--tiny").symlink_to(snapshot.parent.parent)

    assert open_checkpoint(resolve_model("org/tiny")).config.hidden_size == 64


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", "M-7B-Q4_K_M.gguf"),
        ("q4_k_m", "M-7B-Q4_K_M.gguf"),
        ("M-7B-IQ4_XS.gguf", "M-7B-IQ4_XS.gguf"),
        ("Q8_0", "big/M-7B.Q8_0.gguf"),
        ("BF16", "BF16/M-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_gguf_file_is_chosen_by_its_quantisation(wanted, found):
    files = [
        "M-7B-Q4_K_M.gguf",
        "M-7B-Q4_K_S.gguf",
        "M-7B-IQ4_XS.gguf",
        "big/M-7B.Q8_0.gguf",
        "mmproj-Q8_0.gguf",
        "BF16/M-BF16-00001-of-00002.gguf",
        "BF16/M-BF16-00002-of-00002.gguf",
        "a.md",
    ]

    assert choose_gguf(files, wanted, "org/m") == found


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (
            None,
            r"has 3 GGUF files; name one as org/m:FILE or org/m:Q4_K_M: M-BF16-00001-of-00002\.gguf, M-Q4_K_M\.gguf, M-Q8_0\.gguf",
        ),
        ("Q5_0", r"no GGUF file Q5_0; its GGUF files: M-BF16-00001-of-00002\.gguf, M-Q4_K_M\.gguf, M-Q8_0\.gguf"),
        ("Q4", "no GGUF file Q4"),
    ],
)
def test_a_choice_that_is_not_clear_lists_the_files(wanted, why):
    files = ["M-Q4_K_M.gguf", "M-Q8_0.gguf", "BF16/M-BF16-00001-of-00002.gguf", "BF16/M-BF16-00002-of-00002.gguf"]

    with pytest.raises(ModelError, match=why):
        choose_gguf(files, wanted, "org/m")


@pytest.mark.parametrize(
    "text", ["org/name", "org/name@v1", "org/name@refs/pr/3:Q4_0", "o/n:sub/FILE.gguf", "a/b.c-d_e"]
)
def test_names_are_written_as_they_are_read(text):
    name = HubName.parse(text)

    assert name is not None
    assert name.text == text


@pytest.mark.parametrize(
    "text",
    ["smollm2", "/org/name", "./org/name", "../name", "a/b/c", "org/name.gguf", "org/", "org/name@../x", "org/n:../x", "a/b@/c"],
)  # fmt: skip
def test_other_texts_are_paths(text):
    assert HubName.parse(text) is None


def test_the_cache_is_where_the_library_has_it(monkeypatch, tmp_path):
    for variable in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", "$HOME/hf")
    assert cache_folder() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_the_list_names_what_can_be_served(cache, tmp_path):
    put(cache, "org/tiny", model_files(tmp_path))
    put(cache, "org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    put(cache, "org/one-GGUF", {"one-Q4_0.gguf": b"GGUF1"})
    put(cache, "org/two-GGUF", {"two-Q4_0.gguf": b"GGUF12", "two-Q8_0.gguf": b"GGUF123", "mmproj-F16.gguf": b"GGUF"})

    listed = list_cached()

    assert [(model.name, model.kind) for model in listed] == [
        ("org/one-GGUF", "GGUF"),
        ("org/tiny", "safetensors"),
        ("org/two-GGUF:two-Q4_0.gguf", "GGUF"),
        ("org/two-GGUF:two-Q8_0.gguf", "GGUF"),
    ]
    assert [resolve_model(model.name) for model in listed] == [model.path for model in listed]
    assert listed[1].num_bytes == sum(len(data) for data in model_files(tmp_path).values())
    assert listed[3].num_bytes == 7 + 4


def test_the_list_says_how_weights_are_stored(cache, tmp_path):
    weights = model_files(tmp_path)["model.safetensors"]
    stated = {
        "a": {"dtype": "bfloat16"},
        "b": {"torch_dtype": "float16"},
        "c": {"dtype": "float16", "quantization_config": {"quant_method": "gptq"}},
        "d": {},
    }
    for repo, config in stated.items():
        put(cache, f"org/{repo}", {"config.json": json.dumps(config).encode(), "model.safetensors": weights})
    put(cache, "org/e", {"config.json": b"not JSON", "model.safetensors": weights})
    put(cache, "org/f", {"smollm2.gguf": smollm2()})
    put(cache, "org/g", {"cut.gguf": smollm2()[:1000]})

    assert [format_of(model) for model in list_cached()] == [
        "safetensors bfloat16",
        "safetensors float16",
        "safetensors gptq",
        "safetensors",
        "safetensors, not readable",
        "GGUF Q4_1",
        "GGUF, not readable",
    ]


def test_nothing_is_listed_without_a_cache(cache):
    assert list_cached() == []


def test_a_process_has_one_tokenizer_of_the_same_files_and_another_when_they_change(tmp_path):
    words = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "config.json").write_text("{}")
    args = ServerArgs(model_path=str(tmp_path))
    first = open_tokenizer(args)

    assert open_tokenizer(args) is first
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    changed = open_tokenizer(args)
    assert (first.eos_ids, changed.eos_ids) == ((1,), (0,))
    kept = weakref.ref(changed)
    del changed
    gc.collect()
    assert kept() is None
