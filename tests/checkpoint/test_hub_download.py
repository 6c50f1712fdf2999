"""Downloads from a stand-in Hub: whole, checked and continued, in the layout of Hugging Face's own library, or a plain error."""

import fcntl
import io
import json
import os
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from hub_stand_in import git_sha1, running_hub
from rich.console import Console
from safetensors.torch import save

from headrace.checkpoint import hub_download
from headrace.checkpoint.hub_cache import HubName, list_cached
from headrace.checkpoint.hub_download import pull_from_hub
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.source import open_checkpoint
from headrace.cli.app import main
from headrace.cli.pull import run_pull
from headrace.errors import ModelError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "tie_word_embeddings": True,
}
SHARDS = {
    "model-00001-of-00002.safetensors": save({"model.embed_tokens.weight": torch.ones(40, 64)}),
    "model-00002-of-00002.safetensors": save({"model.norm.weight": torch.ones(64)}),
}
WEIGHT_MAP = dict(zip(("model.embed_tokens.weight", "model.norm.weight"), SHARDS, strict=True))
NEEDED = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode(),
    **SHARDS,
}
OTHERS = {
    "README.md": b"what it is",
    "pytorch_model.bin": b"a pickle",
    "pytorch_model.bin.index.json": b"{}",
    "modeling_tiny.py": b"import os",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.safetensors": b"another form",
    "original/params.json": b"{}",
}
BIG = save(
    {"model.embed_tokens.weight": torch.arange(40.0 * 64).reshape(40, 64), "model.norm.weight": torch.ones(90000)}
)
CUT = (1 << 16) + 1000


class Counter:
    """A PullProgress that keeps its figures."""

    def __init__(self):
        self.total = self.done = self.num_files = 0
        self.files = []

    def start(self, num_files, total_bytes):
        self.num_files, self.total, self.done, self.files = num_files, total_bytes, 0, []

    def file(self, name):
        self.files.append(name)

    def advance(self, num_bytes):
        self.done += num_bytes


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub, an empty cache, nobody's token, no waiting."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(hub_download, "WAIT_S", 0.0)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with running_hub() as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        yield stand_in


@pytest.fixture
def one_file(hub):
    """A repository whose weights are one file."""
    hub.repos["org/tiny"] = {"config.json": NEEDED["config.json"], "model.safetensors": BIG}
    return hub


def pull(text: str) -> tuple[Path, Counter]:
    name = HubName.parse(text)
    assert name is not None
    progress = Counter()
    return pull_from_hub(name, progress), progress


def cache() -> Path:
    return Path(os.environ["HF_HUB_CACHE"])


def tree(folder: Path) -> dict[str, str]:
    """Files, links with their targets, and contents of the refs."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else git_sha1(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_only_what_serving_needs_comes_and_lies_where_the_library_puts_it(hub, tmp_path):
    hub.repos["org/tiny"] = NEEDED | OTHERS

    path, progress = pull("org/tiny")

    assert sorted(hub.downloads()) == sorted(NEEDED)
    for name in NEEDED:
        huggingface_hub.hf_hub_download("org/tiny", name, cache_dir=tmp_path / "theirs", endpoint=hub.url)
    assert tree(cache() / "models--org--tiny") == tree(tmp_path / "theirs" / "models--org--tiny")
    assert path == resolve_model("org/tiny")
    assert open_checkpoint(path).tensor("model.norm.weight").tolist() == [1.0] * 64
    assert progress.num_files == len(progress.files) == len(NEEDED)
    assert progress.done == progress.total == sum(map(len, NEEDED.values()))


def test_the_modules_of_an_embedding_model_come_with_it(hub):
    modules = {
        "modules.json": b"[]",
        "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
        "2_Dense/config.json": b'{"in_features": 64}',
        "2_Dense/model.safetensors": save({"linear.weight": torch.ones(8, 64)}),
    }
    hub.repos["org/tiny"] = (
        NEEDED | modules | {"2_Dense/pytorch_model.bin": b"a pickle", "onnx/config.json": b"another"}
    )

    path, _ = pull("org/tiny")

    assert sorted(hub.downloads()) == sorted(NEEDED | modules)
    assert (path / "2_Dense" / "model.safetensors").read_bytes() == modules["2_Dense/model.safetensors"]


def test_what_is_there_is_checked_and_not_downloaded_again(one_file):
    pull("org/tiny")
    one_file.seen.clear()

    _, progress = pull("org/tiny")

    assert one_file.downloads() == []
    assert progress.done == progress.total > 0


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:]])
def test_a_damaged_file_of_the_cache_comes_again(damage, one_file):
    path, _ = pull("org/tiny")
    blob = (path / "model.safetensors").resolve()
    blob.write_bytes(damage(blob.read_bytes()))

    path, progress = pull("org/tiny")

    assert (path / "model.safetensors").read_bytes() == BIG
    assert progress.done == progress.total


def test_the_token_goes_to_the_hub_alone(one_file, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    pull("org/tiny")

    sent = {
        server: {headers.get("authorization") for own, _, _, headers in one_file.seen if own == server}
        for server in ("hub", "cdn")
    }
    assert sent == {"hub": {"Bearer hf_secret"}, "cdn": {None}}


def test_a_broken_connection_is_continued(one_file):
    one_file.cut_after = [CUT, 2 * CUT, 0]

    path, progress = pull("org/tiny")

    assert (path / "model.safetensors").read_bytes() == BIG
    assert one_file.ranges() == [None, f"bytes={CUT}-", f"bytes={3 * CUT}-", f"bytes={3 * CUT}-"]
    assert progress.done == progress.total


def test_a_download_that_was_given_up_is_continued_by_the_next_one(one_file):
    one_file.cut_after = [CUT, 0, 0, 0, 0, 0]
    with pytest.raises(ModelError, match=rf"model\.safetensors of org/tiny stopped at {CUT} of {len(BIG)} bytes"):
        pull("org/tiny")
    with pytest.raises(ModelError, match="headrace pull org/tiny"):
        resolve_model("org/tiny")
    one_file.seen.clear()

    path, progress = pull("org/tiny")

    assert one_file.ranges() == [f"bytes={CUT}-"]
    assert (path / "model.safetensors").read_bytes() == BIG
    assert progress.done == progress.total
    assert not list(cache().rglob("*.incomplete"))


@pytest.mark.parametrize("left", [b"", b"x" * (len(BIG) + 1)])
def test_what_an_earlier_download_left_may_be_useless(left, one_file):
    blob = (pull("org/tiny")[0] / "model.safetensors").resolve()
    blob.unlink()
    blob.with_name(f"{blob.name}.headrace.incomplete").write_bytes(left)

    path, progress = pull("org/tiny")

    assert (path / "model.safetensors").read_bytes() == BIG
    assert progress.done == progress.total


def test_what_an_earlier_download_left_may_be_wrong(one_file):
    blob = (pull("org/tiny")[0] / "model.safetensors").resolve()
    blob.unlink()
    blob.with_name(f"{blob.name}.headrace.incomplete").write_bytes(b"x" * 1000)

    with pytest.raises(ModelError, match="arrived damaged"):
        pull("org/tiny")
    assert (pull("org/tiny")[0] / "model.safetensors").read_bytes() == BIG


def test_a_server_that_knows_no_ranges_sends_all_again(one_file):
    one_file.cut_after, one_file.ignores_range = [CUT], True

    path, progress = pull("org/tiny")

    assert (path / "model.safetensors").read_bytes() == BIG
    assert progress.done == progress.total


def test_what_comes_again_is_not_slow(one_file, monkeypatch):
    one_file.cut_after, one_file.ignores_range = [len(BIG) - 1], True
    monkeypatch.setattr(hub_download, "WINDOW_S", 0.0)
    monkeypatch.setattr(hub_download, "MIN_WINDOW_BYTES", 0)

    path, _ = pull("org/tiny")

    assert (path / "model.safetensors").read_bytes() == BIG
    assert one_file.ranges() == [None, f"bytes={len(BIG) - 1}-"]


def test_a_server_that_always_breaks_off_at_the_same_place_is_given_up(one_file):
    one_file.cut_after, one_file.ignores_range = [CUT] * 50, True

    with pytest.raises(ModelError, match="5 attempts"):
        pull("org/tiny")


def test_a_file_that_comes_too_slowly_is_given_up_and_continued(one_file, monkeypatch):
    one_file.trickles = "file"
    with monkeypatch.context() as patch:
        patch.setattr(hub_download, "WINDOW_S", 0.1)
        with pytest.raises(
            ModelError, match=r"stopped at \d+ of \d+ bytes \(too slow: \d+ bytes in 0 s, .* continues from"
        ):
            pull("org/tiny")
    assert len(one_file.ranges()) == 3
    (partial,) = cache().rglob("*.incomplete")
    have = partial.stat().st_size
    one_file.trickles = ""
    one_file.seen.clear()

    path, _ = pull("org/tiny")

    assert one_file.ranges() == [f"bytes={have}-" if have else None]
    assert (path / "model.safetensors").read_bytes() == BIG


def test_a_server_that_sends_little_over_many_connections_is_given_up(one_file, monkeypatch):
    monkeypatch.setattr(hub_download, "WINDOW_S", 0.0)
    one_file.cut_after = [1] * len(BIG)

    with pytest.raises(ModelError, match="too slow"):
        pull("org/tiny")


@pytest.mark.parametrize("trickles", ["head", "list"])
def test_a_list_of_files_that_comes_too_slowly_is_given_up(trickles, one_file, monkeypatch):
    monkeypatch.setattr(hub_download, "ANSWER_S", 0.3)
    one_file.trickles = trickles

    with pytest.raises(ModelError, match=f"{one_file.url} is too slow"):
        pull("org/tiny")


def test_the_body_of_a_redirect_is_not_read(one_file):
    one_file.redirects = "far"

    assert (pull("org/tiny")[0] / "model.safetensors").read_bytes() == BIG


def test_redirects_that_lead_around_are_given_up(one_file):
    one_file.redirects = "around"

    with pytest.raises(ModelError, match="redirects more than 10 times"):
        pull("org/tiny")


def test_a_server_in_trouble_is_asked_again(one_file):
    one_file.api_statuses, one_file.cdn_statuses = [503, 502], [500, 429]

    path, _ = pull("org/tiny")

    assert (path / "model.safetensors").read_bytes() == BIG
    one_file.api_statuses = [503] * 3
    with pytest.raises(ModelError, match="answered with status 503"):
        pull("org/tiny")


def test_a_wrong_checksum_leaves_nothing_that_could_be_served(one_file):
    one_file.corrupts = True

    with pytest.raises(
        ModelError, match=r"model\.safetensors of org/tiny arrived damaged: its digest is \w{64}, not \w{64}"
    ):
        pull("org/tiny")

    with pytest.raises(ModelError, match="headrace pull org/tiny"):
        resolve_model("org/tiny")
    assert not list(cache().rglob("*.incomplete"))
    one_file.corrupts = False
    assert (pull("org/tiny")[0] / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize(
    ("token", "refusal", "why"),
    [
        (None, (401, "RepoNotFound"), "no model org/tiny at http.*, or it is private; for a private one set HF_TOKEN"),
        ("hf_wrong", (401, ""), r"refuses org/tiny with this token \(status 401\)"),
        ("hf_small", (403, ""), r"refuses org/tiny with this token \(status 403\)"),
        (None, (401, "GatedRepo"), "org/tiny is gated: accept its terms at http.*/org/tiny, and set HF_TOKEN"),
        ("hf_other", (403, "GatedRepo"), "org/tiny is gated"),
        ("hf_right", (404, "RepoNotFound"), "there is no model org/tiny at http"),
        (None, (500, ""), "answered with status 500"),
    ],
)
def test_refusals_say_what_to_do_and_never_the_token(token, refusal, why, one_file, monkeypatch):
    one_file.refusal = refusal
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)

    with pytest.raises(ModelError, match=why) as caught:
        pull("org/tiny")

    assert "hf_" not in caught.value.message
    assert not list(cache().rglob("*"))


def test_a_file_that_is_listed_but_cannot_be_had(one_file):
    one_file.missing.add("config.json")

    with pytest.raises(ModelError, match="does not have all files of org/tiny"):
        pull("org/tiny")
    assert list((cache() / "models--org--tiny" / "blobs").iterdir()) == []


def test_an_unknown_model_or_revision(hub):
    hub.repos["org/tiny"] = {"config.json": b"{}"}
    with pytest.raises(ModelError, match="there is no model org/other at"):
        pull("org/other")
    with pytest.raises(ModelError, match="org/tiny has no revision v9 at"):
        pull("org/tiny@v9")


def test_a_list_of_files_has_a_limit(one_file, monkeypatch):
    monkeypatch.setattr(hub_download, "MAX_LIST_BYTES", 100)

    with pytest.raises(ModelError, match="did not answer as the Hub does: more than 100 bytes"):
        pull("org/tiny")


def test_a_list_of_files_that_is_nested_too_deeply_is_refused(one_file):
    one_file.padding = b', "more": ' + b"[" * 1_000_000 + b"]" * 1_000_000

    with pytest.raises(ModelError, match="did not answer as the Hub does: it is nested too deeply"):
        pull("org/tiny")


def test_no_network(one_file, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"cannot be reached \(ConnectError\); check the network"):
            pull("org/tiny")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_an_environment_without_network_is_obeyed(variable, one_file, monkeypatch):
    monkeypatch.setenv(variable, "1")

    with pytest.raises(ModelError, match=f"{variable} is set"):
        pull("org/tiny")
    assert one_file.seen == []


def test_space_is_checked_before_anything_comes(one_file, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 100, 100))

    with pytest.raises(ModelError, match=r"needs 0\.0 GB more, but the disk .* has 0\.0 GB free"):
        pull("org/tiny")
    assert one_file.downloads() == []


def test_a_gguf_file_is_chosen_and_stays_when_another_joins_it(hub):
    hub.repos["org/tiny-GGUF"] = {
        "README.md": b"",
        "tiny-Q4_0.gguf": b"GGUF four",
        "tiny-Q8_0.gguf": b"GGUF eight",
        "mmproj-tiny.gguf": b"GGUF",
    }
    with pytest.raises(ModelError, match=r"has 2 GGUF files; name one as .*: tiny-Q4_0\.gguf, tiny-Q8_0\.gguf"):
        pull("org/tiny-GGUF")
    assert hub.downloads() == []

    four, _ = pull("org/tiny-GGUF:Q4_0")
    assert four.read_bytes() == b"GGUF four"
    assert resolve_model("org/tiny-GGUF") == four
    hub.commit = "b" * 40
    hub.seen.clear()
    eight, _ = pull("org/tiny-GGUF:tiny-Q8_0.gguf")

    assert eight.read_bytes() == b"GGUF eight"
    assert resolve_model("org/tiny-GGUF:Q4_0").read_bytes() == b"GGUF four"
    assert hub.downloads() == ["tiny-Q8_0.gguf"]  # the vision encoder is here


def test_all_parts_of_a_gguf_file_are_downloaded(hub):
    parts = {f"Q8/tiny-Q8_0-{number:05}-of-00003.gguf": b"GGUF %d" % number for number in (1, 2, 3)}
    hub.repos["org/tiny-GGUF"] = {"tiny-Q4_0.gguf": b"GGUF", **parts}

    first, _ = pull("org/tiny-GGUF:Q8_0")

    assert first.name == "tiny-Q8_0-00001-of-00003.gguf"
    assert [file.read_bytes() for file in sorted(first.parent.iterdir())] == list(parts.values())
    assert [(model.name, model.num_bytes) for model in list_cached()] == [("org/tiny-GGUF", 18)]
    (first.parent / "tiny-Q8_0-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf of org/tiny-GGUF is not whole"):
        resolve_model("org/tiny-GGUF:Q8_0")
    del hub.repos["org/tiny-GGUF"]["Q8/tiny-Q8_0-00003-of-00003.gguf"]
    with pytest.raises(ModelError, match=r"lacks Q8/tiny-Q8_0-00003-of-00003\.gguf, one of the 3 parts"):
        pull("org/tiny-GGUF:Q8_0")


@pytest.mark.parametrize(
    ("beside", "taken"),
    [
        (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], ["mmproj-F16.gguf"]),
        (["mmproj-m-Q8_0.gguf", "mmproj-m-f32.gguf"], ["mmproj-m-f32.gguf"]),
        (["Q8/mmproj-m.gguf", "mmproj-f16.gguf"], ["Q8/mmproj-m.gguf"]),
        (["other/mmproj-f16.gguf"], []),
        (["mmproj-a-f16.gguf", "mmproj-b-bf16.gguf"], ["mmproj-a-f16.gguf", "mmproj-b-bf16.gguf"]),
    ],
)
def test_a_gguf_file_comes_with_its_parts_and_its_vision_encoder(hub, beside, taken):
    parts = [f"Q8/tiny-Q8_0-{number:05}-of-00002.gguf" for number in (1, 2)]
    hub.repos["org/tiny-GGUF"] = {name: b"GGUF " + name.encode() for name in (*parts, *beside)}

    first, _ = pull("org/tiny-GGUF:Q8_0")

    assert sorted(hub.downloads()) == sorted([*parts, *taken])
    output = io.StringIO()
    run_pull("org/tiny-GGUF:Q8_0", Console(file=output))
    named = "".join(f"vision encoder: {Path(name).name}\n" for name in taken)
    assert output.getvalue() == f"org/tiny-GGUF:Q8_0 is ready: {first}\n{named}"
    for name in taken[:1]:
        (first.parent.parent / name).resolve().unlink()
        with pytest.raises(ModelError, match=rf"{name} of org/tiny-GGUF is not whole"):
            resolve_model("org/tiny-GGUF:Q8_0")


def test_a_revision_is_kept_under_its_name(one_file):
    path, _ = pull("org/tiny@refs/pr/1")

    assert resolve_model("org/tiny@refs/pr/1") == path
    with pytest.raises(ModelError, match="no revision main"):
        resolve_model("org/tiny")


def test_pickles_are_never_downloaded(hub):
    hub.repos["org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}

    with pytest.raises(
        ModelError, match="neither safetensors nor GGUF files; its pickled weights are never downloaded"
    ):
        pull("org/old")
    assert hub.downloads() == []


@pytest.mark.parametrize(
    "shard", ["../../outside.safetensors", "pytorch_model.bin", "model-00003-of-00003.safetensors"]
)
def test_an_index_that_names_something_else_is_refused(shard, hub):
    index = json.dumps({"weight_map": {"w": shard}}).encode()
    hub.repos["org/tiny"] = {**NEEDED, "model.safetensors.index.json": index, "pytorch_model.bin": b"a pickle"}

    with pytest.raises(ModelError, match="is not a safetensors file of it"):
        pull("org/tiny")
    assert hub.downloads() == ["model.safetensors.index.json"]


def test_names_that_lead_out_of_the_folder_are_ignored(one_file, tmp_path):
    evil = ["../../evil.json", "/tmp/evil.json", "additional_chat_templates/../../x.jinja", "a\\..\\b.json"]
    evil += ["new\nline.json", "\x1b[2J.json", "right\u202eleft.json", "nul\0.json"]
    one_file.repos["org/tiny"] |= dict.fromkeys(evil, b"{}")

    pull("org/tiny")

    assert sorted(one_file.downloads()) == ["config.json", "model.safetensors"]


def test_one_pull_of_a_model_at_a_time(one_file):
    lock = cache() / ".locks" / "models--org--tiny" / "headrace.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another `headrace pull` of org/tiny is running"):
            pull("org/tiny")

    pull("org/tiny")


def test_the_commands_pull_and_list(one_file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["pull", "org/tiny"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert "2/2 model.safetensors" in err
    assert f"org/tiny is ready: {resolve_model('org/tiny')}" in out.replace("\n", "")

    with pytest.raises(SystemExit) as ended:
        main(["models"])
    assert ended.value.code == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "org/tiny" in line)
    assert all(word in row for word in ("safetensors", "370.", "kB", "a" * 12))


def test_the_commands_end_with_the_error(one_file, capsys):
    one_file.refusal = (403, "GatedRepo")
    with pytest.raises(SystemExit) as ended:
        main(["pull", "org/tiny"])
    assert ended.value.code == 2
    assert "headrace: org/tiny is gated" in capsys.readouterr().err
