"""KV in a folder: an engine that starts again answers as before, from what the one before has computed; with other weights, from nothing."""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from engines import FILTERED, GREEDY, PENALISED, SEEDED, random_ids, running_engine
from lora_harness import tiny_adapter
from server_process import serving
from test_models_gguf_types import PROMPT, save_gguf

from headrace.cache.tier import DiskTier, Store
from headrace.checkpoint.weight_cache import files_fingerprint
from headrace.errors import ConfigError
from headrace.execution import build, page_transfer
from headrace.execution.page_transfer import PoolPages
from headrace.messages.control import ReadyInfo

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from device_harness import FakeDevice, queue_on

SAMPLINGS = (GREEDY, SEEDED, FILTERED, PENALISED)
PROMPTS = [
    random_ids(200, seed=8),
    random_ids(120, seed=9),
    [*random_ids(200, seed=8)[:130], *random_ids(100, seed=10)],
]


pytestmark = pytest.mark.usefixtures("patient_tier")


def answers(model: str, folder: Path, **options: Any) -> tuple[list[list[int]], list[int]]:
    """Output ids of each prompt under each kind of sampling, and the cached tokens of the first."""
    with running_engine(model, kv_cache_dir=str(folder), **options) as engine:
        outputs, cached = [], []
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                reply = engine.generate(input_ids=prompt, sampling_params=sampling)
                outputs.append(reply["output_ids"])
                if sampling is GREEDY:
                    cached.append(reply["meta_info"]["cached_tokens"])
        return outputs, cached


def test_an_engine_that_starts_again_finds_what_was_computed(tiny_model: str, tmp_path: Path):
    folder = tmp_path / "kv"
    want, computed = answers(tiny_model, folder)
    got, loaded = answers(tiny_model, folder)

    assert computed == [0, 0, 128]
    assert loaded == [192, 112, 224]
    assert got == want
    assert {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*.kv")} == {"0o600"}

    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    file = other / "model.safetensors"
    about, sampled = file.stat(), files_fingerprint([file], {})
    assert answers(str(other), folder)[1] == loaded, "the same weights elsewhere"
    before = checksums(other)
    with file.open("r+b") as opened:
        at = about.st_size * 5 // 8 | 3  # of an exponent, between two samples
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert files_fingerprint([file], {}) == sampled
    assert answers(str(other), folder)[1] == computed, "one bit of one weight, packed or not"
    assert sum(value != before[name] for name, value in checksums(other).items()) == 1


def checksums(model: Path) -> dict[str, str]:
    with running_engine(str(model)) as engine:
        [rank] = engine.check_weights()["ranks"]
    return rank["checksums"]


def test_a_folder_that_others_may_read_is_refused(tiny_model: str, tmp_path: Path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="others may read"), running_engine(tiny_model, kv_cache_dir=str(tmp_path)):
        pass


def test_memory_of_the_host_is_refused_where_the_pool_is_in_it(tiny_model: str):
    with (
        pytest.raises(ConfigError, match="raise --max-total-tokens"),
        running_engine(tiny_model, kv_cache_host_size=1 << 20),
    ):
        pass


def test_memory_of_the_host_behind_a_device(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    """A device of the tests, whose pool holds one prompt: pages are copied both ways byte for byte, and what comes back gives the CPU's tokens."""
    own: dict[str, Any] = {"attention_backend": "torch_native", "dtype": "float32", "page_size": 16}
    with running_engine(tiny_model, **own) as engine:
        want = [engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in PROMPTS]
    copied_out: set[bytes] = set()
    came_back: list[bool] = []

    class Watched(PoolPages):
        def __init__(self, pool: Any, *rest: Any) -> None:
            super().__init__(pool, *rest)
            self.pool = pool

        def rows(self, pages: Sequence[int]) -> list[bytes]:
            layers = [layer for pair in zip(self.pool.k, self.pool.v, strict=True) for layer in pair]
            slots = [slice(16 * page, 16 * page + 16) for page in pages]
            return [b"".join(layer[where].numpy().tobytes() for layer in layers) for where in slots]

        def read(self, pages: Sequence[int]) -> memoryview:
            data, rows = super().read(pages), self.rows(pages)
            copied_out.update(rows if bytes(data) == b"".join(rows) else ())
            return data

        def write(self, pages: Sequence[int], data: memoryview) -> None:
            super().write(pages, data)
            rows = self.rows(pages)
            came_back.extend(row in copied_out and bytes(data) == b"".join(rows) for row in rows)

    monkeypatch.setattr(build, "ReadyInfo", lambda **about: ReadyInfo(**about | {"device": "cuda"}))
    monkeypatch.setattr(page_transfer, "PoolPages", Watched)
    store = DiskTier.store

    def store_before_it_goes_on(tier: DiskTier, kept: Store) -> None:
        """The next prompt needs the pages, and what is not stored by then is dropped."""
        store(tier, kept)
        while not kept.is_done:
            time.sleep(0.001)

    monkeypatch.setattr(DiskTier, "store", store_before_it_goes_on)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device of the tests")
    device = FakeDevice()
    queue_on(device, monkeypatch)
    with running_engine(tiny_model, kv_cache_host_size=16 << 20, max_total_tokens=256, **own) as engine:
        for number in range(2):
            replies = [engine.generate(input_ids=prompt, sampling_params=GREEDY) for prompt in PROMPTS]
            assert [reply["output_ids"] for reply in replies] == want
            if number:
                assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [192, 112, 224]
    assert device.num_waits > 0
    assert len(came_back) >= (192 + 112 + 224) // 16 - 8
    assert all(came_back)


def test_an_adapter_finds_its_kv_after_a_restart_while_its_bytes_are_the_same(tiny_model: str, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapter = tiny_adapter(model, seed=1).save(tmp_path / "adapter")

    def answer(name: str, **options: Any) -> tuple[list[int], int]:
        with running_engine(tiny_model, lora_paths=f"{name}={adapter}", **options) as engine:
            reply = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, lora_path=name)
        return reply["output_ids"], reply["meta_info"]["cached_tokens"]

    kept = {"kv_cache_dir": str(tmp_path / "kv")}
    want = answer("x")[0]
    assert answer("x", **kept) == (want, 0)
    assert answer("renamed", **kept) == (want, 192)
    file = Path(adapter, "adapter_model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert answer("x", **kept) == (answer("x")[0], 0)


def test_a_session_goes_on_by_its_id_after_a_restart(tiny_model: str, tmp_path: Path):
    """Through HTTP, after a `kill -9`."""
    options = ("--session-dir", str(tmp_path / "sessions"), "--max-total-tokens", "4096", "--single-process")
    turns, session = ([11, 12, 13], [14, 15]), {"session_params": {"id": "mine"}}
    asked = [{"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 8}} for ids in turns]
    with serving(tiny_model, *options) as server:
        assert server.post("/open_session", {"session_id": "mine", "capacity_of_str_len": 4096}) == "mine"
        first = server.post("/generate", asked[0] | session)
        server.kill()
    with serving(tiny_model, *options) as server:
        whole = [*turns[0], *first["output_ids"], *turns[1]]
        want = server.post("/generate", asked[1] | {"input_ids": whole})
        got = server.post("/generate", asked[1] | session)
    assert got["output_ids"] == want["output_ids"]
    assert got["meta_info"]["prompt_tokens"] == len(whole)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_stages_find_what_one_process_wrote_and_other_ranks_do_not(kind: str, tiny_model: str, tmp_path: Path):
    """A page is found by its file's name, and is what is in the file; the sums of several ranks are in another order."""
    model, ids, options = tiny_model, PROMPTS[0], {"dtype": "float32"}
    splits = [{}, {"pp_size": 2, "single_process": False}, {"tp_size": 2, "single_process": False}]
    if kind == "gguf":  # of a vocabulary that is not split
        model, ids, options, splits = (
            str(tmp_path / "model.gguf"),
            PROMPT * 7,
            {"skip_tokenizer_init": True},
            splits[:2],
        )
        save_gguf(Path(model), *map(gguf.GGMLQuantizationType, (14, 12, 8)), num_layers=2)  # Q6_K, Q4_K, Q8_0
    written = []
    for split in splits:
        folder = tmp_path / f"kv {len(written)}"
        with running_engine(model, kv_cache_dir=str(folder), **options, **split) as engine:
            engine.generate(input_ids=ids, sampling_params=GREEDY | {"max_new_tokens": 1})
        written.append({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.kv")})
    assert all(written)
    assert written[0] == written[1]
    assert not any(written[0].keys() & of_ranks.keys() for of_ranks in written[2:])
