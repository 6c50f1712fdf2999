"""A folder behind the tree: what comes back from it is the KV of exactly that prefix, or it is computed; nobody waits longer than that takes.

The worker's KV remembers the history of each slot, so that a step over KV of another prefix fails at once. What users of other servers have met
with is named where it is tested.
"""

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_worker import FakeWorker, Rig, expected_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache import tier
from headrace.cache.host_pages import HostPages
from headrace.cache.page_files import PageFiles
from headrace.cache.tier import DiskTier
from headrace.messages.media import KEY_BYTES, MediaItem, MediaSpan
from headrace.messages.operations import OPERATIONS, OperationReq
from headrace.messages.weights import UpdateFromDisk, WeightOpReq
from headrace.scheduler import kv_manager, tier_queue

PAGE, AT_ONCE = 4, 5


class KvOfWorker:
    """A `PageTransfer` over the worker's KV. page_bytes: eight for each slot."""

    page_bytes = 8 * PAGE

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.contents: dict[int, str] = {}

    def fingerprint(self) -> str:
        return f"weights {self.worker.version if self.worker.version > 0 else 0}"

    def adapter(self, lora_id: int) -> str:
        return self.contents.get(lora_id, "")

    def read(self, pages: list[int]) -> memoryview:
        return memoryview(self.worker.kv.reshape(-1, PAGE)[pages].tobytes())

    def write(self, pages: list[int], data: memoryview) -> None:
        self.worker.kv.reshape(-1, PAGE)[pages] = np.frombuffer(data, np.int64).reshape(len(pages), PAGE)


class SteppedTier(DiskTier):
    """Works when it is told to. works: whether it does what is asked at the end of each turn."""

    works = True

    def work_all(self) -> None:
        while self.work():
            pass


def make(folder: Path | None, limit_bytes: int = 1 << 30, memory: bytearray | None = None, **options: object) -> Rig:
    """A scheduler with a tier in `folder`, as after a start. Computing seems to take for ever, so that every load is waited for.

    memory: of the host, before the files.
    """

    transfers: list[KvOfWorker] = []

    def tier(worker: FakeWorker) -> SteppedTier:
        transfer = KvOfWorker(worker)
        transfers.append(transfer)

        def open_files(fingerprint: str) -> PageFiles | HostPages:
            about = fingerprint, PAGE, transfer.page_bytes
            files = None if folder is None else PageFiles(folder, *about, limit_bytes)
            return files if memory is None else HostPages(memoryview(memory), *about, AT_ONCE, files)

        return SteppedTier(transfer, open_files)

    options = {"num_pages": 32, "page_size": PAGE, "eos_every": 10**9, **options}
    rig = Rig(**options, tier=tier)
    rig.tier, [rig.transfer] = rig.state.tier.tier, transfers
    rig.state.tier.prompt_seconds = lambda start, count: math.inf
    turn = rig.turn

    def turn_and_work() -> None:
        turn()
        if rig.tier.works:
            rig.tier.work_all()

    rig.turn = turn_and_work
    rig.tier.work_all()
    return rig


def prompt(n: int, start: int) -> list[int]:
    return np.random.default_rng(start).integers(0, 2, n).tolist()


def ask(rig: Rig, rid: str, ids: list[int], version: int = 0, num_new: int = 6, **fields: object) -> int:
    """The number of cached tokens of a prompt, whose outputs are as they must be."""
    rig.add(rid, ids, num_new, **fields)
    rig.drain()
    rig.turn()
    assert rig.ids[rid] == expected_outputs(ids, num_new, 10**9, version=version)
    return rig.rows[rid][0].stats.cached_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_comes_back_after_a_restart(tmp_path, overlap):
    """And is used, rather than computed again (llama.cpp 26676: a restore that does nothing)."""
    ids = prompt(50, 1)
    rig = make(tmp_path, overlap=overlap)
    assert ask(rig, "a", ids) == 0
    rig.check_idle()

    rig = make(tmp_path, overlap=overlap)
    assert ask(rig, "b", ids) == 48
    assert rig.worker.num_computed == len(ids) - 48 + 5
    other = [*ids[:30], 1 - ids[30], *ids[31:]]
    assert ask(rig, "c", other) == 28, "from the tree, which has it now"
    assert ask(make(tmp_path), "d", [*ids[:20], 1 - ids[20], *ids[21:]]) == 20, "the first part of a run"
    assert ask(make(tmp_path), "e", other) == 48, "the run that leaves it there"
    rig.check_idle()


def test_an_evicted_prefix_comes_back(tmp_path):
    rig = make(tmp_path, num_pages=16)
    for i in range(12):
        cached = ask(rig, f"r{i}", prompt(40, i % 4))
        assert cached < 12 if i < 4 else cached == 36
    rig.check_idle()


@pytest.mark.parametrize("has_files", [False, True])
def test_the_memory_of_the_host_is_before_the_files(tmp_path, monkeypatch, has_files):
    """It has room for two of the prefixes, and the pool for one. What it has no more comes from the files, and is there again."""
    monkeypatch.setattr(tier, "pages_at_once", lambda page_bytes: AT_ONCE)
    read = []
    monkeypatch.setattr(PageFiles, "read", lambda *given, whole=PageFiles.read: read.append(0) or whole(*given))
    folder, memory = tmp_path if has_files else None, bytearray(8 * PAGE * (AT_ONCE + 27))
    rig = make(folder, memory=memory, num_pages=16)
    cached = [ask(rig, f"r{number}", prompt(50, i)) for number, i in enumerate((0, 1, 0, 1))]
    assert max(cached[:2]) < 12
    assert cached[2:] == [48, 48]
    assert not read
    ask(rig, "third", prompt(50, 2))
    ask(rig, "fourth", prompt(50, 3))
    for number in range(2):
        found = ask(rig, f"again {number}", prompt(50, 0))
        assert found == 48 if has_files or number else found < 12
        assert len(read) == has_files
        rig.kv.flush()
    assert rig.tier.num_damaged == 0
    rig.check_idle()
    assert (ask(make(folder, memory=memory), "after a restart", prompt(50, 3)) == 48) == has_files


def test_write_back_stores_what_is_about_to_be_evicted_and_the_rest_at_the_end(tmp_path):
    rig = make(tmp_path, num_pages=48, writes_back=True)
    ask(rig, "a", prompt(50, 1))
    ask(rig, "b", prompt(50, 2))
    assert not list(tmp_path.rglob("*.kv"))
    for i in range(3, 7):
        ask(rig, f"r{i}", prompt(50, i))
    num_files = len(list(tmp_path.rglob("*.kv")))
    assert 2 <= num_files < 6
    assert ask(rig, "again", prompt(50, 1)) == 48, "from its file"
    rig.check_idle()

    rig = make(tmp_path, writes_back=True)
    ask(rig, "c", prompt(50, 7))
    ask(rig, "d", prompt(50, 7) + prompt(50, 8))
    rig.state.tier.close()
    rig.tier.work_all()
    assert ask(make(tmp_path), "e", prompt(50, 7) + prompt(50, 8)) == 96


def test_requests_with_the_same_prefix_share_a_load(tmp_path):
    ids = prompt(50, 1)
    ask(make(tmp_path), "a", ids)
    rig = make(tmp_path)
    for i in range(5):
        rig.add(f"r{i}", ids + prompt(3, i), 4)
    rig.drain()
    assert rig.tier.num_loaded == 12
    assert all(rig.rows[f"r{i}"][0].stats.cached_tokens >= 48 for i in range(5))
    rig.turn()
    rig.check_idle()


@pytest.mark.parametrize("hash_s", [0.0, math.inf])
def test_a_request_right_after_the_start_waits_for_the_hash_of_the_weights(tmp_path, hash_s):
    """Unless computing is faster; what it computes is kept all the same."""
    ids = prompt(50, 1)
    ask(make(tmp_path), "a", ids)
    rig = make(tmp_path)
    rig.state.tier.prompt_seconds = lambda start, count: 10.0
    rig.tier.hash_s = hash_s
    rig.tier.weights_changed()
    rig.tier.works = False
    rig.add("b", ids, 4)
    for _ in range(20):
        rig.turn()
    assert ("b" in rig.ids) == (hash_s == math.inf)
    rig.tier.works = True
    rig.drain()
    assert rig.rows["b"][0].stats.cached_tokens == (0 if hash_s == math.inf else 48)


def begun_again(folder: Path, ids: list[int], num_delivered: int, works: bool = True, **options: object) -> Rig:
    """A scheduler that is gone in the middle of a long answer, after that many tokens, and a new one that gets the request again."""
    rig = make(folder, num_pages=64, **options)
    rig.add("r", ids, 100, stream=True)
    while len(rig.ids.get("r", [])) < num_delivered:
        rig.turn()
    heard = rig.ids["r"]
    rig = make(folder, num_pages=64, **options)
    rig.tier.works = works
    rig.tier.hash_s = 1.0
    rig.tier.weights_changed()
    rig.ids["r"] = list(heard)
    rig.add("r", ids, 100, stream=True, output_ids=np.array(heard, np.int32).tobytes(), attempt=1)
    return rig


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_scheduler_died_its_request_goes_on_from_the_files(tmp_path, monkeypatch, overlap):
    """With what it had computed of the answer, too; it waits for the hash of the weights."""
    monkeypatch.setattr(kv_manager, "AHEAD_PAGES", 3)
    ids = prompt(50, 1)
    rig = begun_again(tmp_path, ids, 70, works=False, overlap=overlap)
    for _ in range(20):
        rig.turn()
    assert not rig.rows, "it waits"
    rig.tier.works = True
    rig.drain()
    assert rig.ids["r"] == expected_outputs(ids, 100, 10**9)
    assert rig.rows["r"][0].stats.cached_tokens >= 104, "of 120"
    rig.turn()
    rig.check_idle()


def test_a_prompt_is_stored_while_it_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_manager, "AHEAD_PAGES", 3)
    ids = prompt(100, 1)
    rig = make(tmp_path)
    rig.add("r", ids, 4)
    for _ in range(10):
        rig.turn()
    assert not rig.ids
    assert ask(make(tmp_path), "again", ids) >= 48


def test_others_pass_a_request_whose_prefix_is_loaded(tmp_path):
    ids = prompt(50, 1)
    ask(make(tmp_path), "a", ids)
    rig = make(tmp_path)
    rig.tier.works = False
    rig.add("slow", ids, 4)
    rig.add("other", prompt(9, 5), 4)
    for _ in range(20):
        rig.turn()
    assert "other" in rig.finish
    assert "slow" not in rig.ids
    rig.tier.works = True
    rig.drain()
    assert rig.rows["slow"][0].stats.cached_tokens == 48


@pytest.mark.parametrize("page_s", [0.0, 10.0])
def test_nobody_waits_longer_than_computing_takes(tmp_path, page_s):
    """Neither while it is not known how fast the tier is, nor if it is known to be slow."""
    ids = prompt(50, 1)
    ask(make(tmp_path), "a", ids)
    rig = make(tmp_path)
    rig.state.tier.prompt_seconds = lambda start, count: 1.0
    rig.tier.seconds_per_page = page_s
    rig.tier.works = False
    rig.add("r", ids, 4)
    turns = 0
    while "r" not in rig.finish:
        rig.turn()
        turns += 1
        if turns == 2 and page_s:
            rig.tier.work()  # it is found
            rig.tier.work()
    assert turns < 30
    assert rig.rows["r"][0].stats.cached_tokens == 0
    rig.tier.works = True
    for _ in range(3):
        rig.turn()
    rig.check_idle()


def test_two_loads_that_do_not_fit_together_do_not_wait_for_one_another(tmp_path):
    """vLLM 45388."""
    first, second = prompt(50, 1), prompt(50, 2)
    rig = make(tmp_path)
    ask(rig, "a", first)
    ask(rig, "b", second)
    rig = make(tmp_path, num_pages=20)
    rig.add("c", first, 4)
    rig.add("d", second, 4)
    rig.drain()
    assert rig.ids["c"] == expected_outputs(first, 4, 10**9)
    assert rig.ids["d"] == expected_outputs(second, 4, 10**9)
    rig.turn()
    rig.check_idle()


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("writes_back", [False, True])
def test_loads_under_one_node_that_is_split_meanwhile_end_nobody(tmp_path, writes_back, is_short):
    """SGLang 34975 and 35931, and 36377 of the same days: an assertion of the scheduler that one load at a time holds a node. Here both are used, or
    given up for want of pages."""
    trunk = prompt(12, 1)
    asked = {"a": trunk + [0] + prompt(36, 2), "b": trunk + [1] + prompt(36, 3)}
    rig = make(tmp_path, num_pages=64)
    for rid, ids in asked.items():
        ask(rig, rid, ids)
    rig = make(tmp_path, writes_back=writes_back)
    rig.add("trunk", [*trunk, 0], 4)
    rig.drain()
    rig.tier.works = False
    for rid, ids in asked.items():
        rig.add(rid, ids, 6)
    rig.turn()
    rig.tier.work()  # both are found
    rig.turn()
    assert len(rig.state.tier) == 2, "both are loaded"
    rig.add("other", [*trunk[:8], 1 - trunk[8], 0], 4)
    if is_short:
        rig.add("long", prompt(70, 4), 4, namespace='["", "salt"]')  # does not wait for the tier
    for _ in range(30):
        rig.turn()
    assert {"other", "long"} & rig.finish.keys() == {"other", *["long"][:is_short]}
    assert len(rig.state.tier) == (0 if is_short else 2)
    rig.tier.works = True
    rig.drain()
    for rid, ids in asked.items():
        assert rig.ids[rid] == expected_outputs(ids, 6, 10**9)
        assert is_short or rig.rows[rid][0].stats.cached_tokens == 48
    assert rig.tier.num_loaded == (0 if is_short else 18)
    rig.turn()
    rig.check_idle()


def test_an_update_of_the_weights_is_another_fingerprint(tmp_path):
    """SGLang 24758: KV of other weights under the same name."""
    ids = prompt(50, 1)
    rig = make(tmp_path)
    ask(rig, "a", ids)
    for version, cached in ((1, 0), (0, 48), (1, 48)):
        rig.inbox.send(WeightOpReq(version, UpdateFromDisk(str(version))))
        rig.turn()
        rig.scheduler.worker.weights.finish()
        for _ in range(3):
            rig.turn()
        assert ask(rig, f"r{version}{cached}", ids, version) == cached
    rig.check_idle()


def test_damaged_files_stay_counted_when_the_weights_change(tmp_path):
    ask(make(tmp_path), "a", prompt(50, 1))
    for file in tmp_path.rglob("*.kv"):
        file.write_bytes(b"other")
    rig = make(tmp_path)
    assert ask(rig, "b", prompt(50, 1)) == 0
    count = rig.tier.num_damaged
    assert count > 0
    rig.tier.weights_changed()
    assert rig.tier.num_damaged == count
    rig.tier.work_all()
    assert rig.tier.num_damaged == count


def test_requests_go_on_where_the_folder_cannot_be_used(tmp_path, monkeypatch):
    """Whatever goes wrong with it; nothing waits to be stored there."""

    def broken(*arguments: object) -> None:
        raise ValueError("no folder")

    monkeypatch.setattr(PageFiles, "__init__", broken)
    rig = make(tmp_path)
    assert rig.tier.opens_in_s == math.inf
    assert ask(rig, "a", prompt(50, 1)) == 0
    assert not rig.state.tier.is_busy
    rig.check_idle()


@pytest.mark.parametrize("persists", [False, True])
def test_what_belongs_to_a_tenant_is_kept_if_asked(tmp_path, persists):
    ids = prompt(50, 1)
    for namespace in ('["", "salt"]', '["key", "a", ""]'):
        cached = []
        for _ in range(2):
            rig = make(tmp_path)
            rig.state.tier.persists_tenants = persists
            cached.append(ask(rig, "a", ids, namespace=namespace))
        assert cached == [0, 48 if persists else 0]


def test_kv_of_an_adapter_is_that_of_its_content(tmp_path):
    """Whatever its number and its name are after a restart; of one that has gone nothing is kept."""

    def cached(number: int, content: str, salt: str = "") -> int:
        rig = make(tmp_path)
        rig.state.tier.persists_tenants = True
        rig.worker.loras.add(number)
        rig.worker.version = -100_003 * number  # the same history, whatever the number
        rig.transfer.contents[number] = content
        inner = json.dumps(["", salt]) if salt else ""
        rig.add("a", prompt(50, 1), 4, lora_id=number, namespace=json.dumps([inner, number, f"name {number}", ""]))
        rig.drain()
        rig.turn()
        return rig.rows["a"][0].stats.cached_tokens

    assert [cached(1, "x"), cached(2, "x"), cached(3, "y"), cached(1, "y")] == [0, 48, 0, 48]
    assert [cached(1, "x", "salt"), cached(1, "x", "salt")] == [0, 48]
    num_files = len(list(tmp_path.rglob("*.kv")))
    assert cached(4, "") == 0
    assert len(list(tmp_path.rglob("*.kv"))) == num_files
    rig = make(tmp_path)
    rig.state.tier.persists_tenants = True
    assert ask(rig, "b", prompt(50, 1), namespace='["", "x"]') == 0, "a salt that looks like it"


def test_a_flush_forgets_the_files(tmp_path):
    ids = prompt(50, 1)
    rig = make(tmp_path)
    ask(rig, "a", ids)
    rig.inbox.send(OperationReq(1, "flush_cache", b"\x80"))
    rig.turn()
    assert rig.reply(OPERATIONS["flush_cache"], 1).success
    assert not list(tmp_path.rglob("*.kv"))
    assert ask(rig, "b", ids) == 0
    assert ask(make(tmp_path), "c", ids) == 48, "stored again"


def test_requests_go_on_while_nothing_can_be_stored(tmp_path, monkeypatch):
    """LMCache 3956: storing is best effort, and must end nothing."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    rig = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PageFiles, "write", full)
        ask(rig, "a", prompt(50, 1))
    ask(rig, "b", prompt(50, 2))
    assert not list(tmp_path.rglob("*.kv")), "it pauses"
    rig.tier.paused_until_s = 0.0
    ask(rig, "c", prompt(50, 3))
    assert list(tmp_path.rglob("*.kv"))
    rig.check_idle()


def test_what_waits_to_be_stored_is_dropped_when_pages_are_short(tmp_path):
    rig = make(tmp_path, num_pages=16)
    rig.state.tier.prompt_seconds = lambda start, count: 0.001
    rig.tier.works = False
    rig.add("a", prompt(12, 1), 4)
    rig.drain()
    assert rig.kv.state().leased_tokens > 0
    rig.add("b", prompt(60, 2), 4)  # takes the whole pool
    rig.drain()
    assert rig.ids["b"] == expected_outputs(prompt(60, 2), 4, 10**9)
    assert rig.state.tier.num_dropped > 0


@pytest.mark.parametrize("damaged", [0, 3, 11])
def test_cached_tokens_are_those_that_were_read(tmp_path, damaged):
    """LMCache 1681: a hit of more tokens than were retrieved. The rest is computed, and stored again."""
    ids = prompt(50, 1)
    rig = make(tmp_path)
    ask(rig, "a", ids)
    [first, *_] = sorted(tmp_path.rglob("*.kv"), key=lambda file: -file.stat().st_size)
    data = bytearray(first.read_bytes())
    data[4096 + damaged * rig.transfer.page_bytes] ^= 1
    first.write_bytes(data)
    rig = make(tmp_path)
    rig.state.tier.prompt_seconds = lambda start, count: math.inf
    assert ask(rig, "b", ids) == damaged * PAGE
    assert rig.tier.num_damaged == 1
    assert ask(make(tmp_path), "c", ids) == 48


def test_a_load_that_finds_the_pool_full_is_computed_later(tmp_path):
    """LMCache 1482: an assertion of the allocator when the hot cache is full."""
    ids = prompt(50, 1)
    ask(make(tmp_path), "a", ids)
    rig = make(tmp_path, num_pages=30)
    rig.add("long", prompt(80, 2), 30)
    while "long" not in rig.back.runs:
        rig.turn()
    rig.add("b", ids, 6)
    rig.drain()
    assert rig.ids["b"] == expected_outputs(ids, 6, 10**9)
    assert rig.ids["long"] == expected_outputs(prompt(80, 2), 30, 10**9)
    rig.turn()
    rig.check_idle()


@pytest.mark.parametrize("other", [False, True])
def test_a_prompt_with_an_image_comes_back_for_this_image_only(tmp_path, other):
    """llama.cpp 21133: nothing can be restored beside a vision encoder."""
    cached = []
    for number in (1, 2 if other else 1):
        rig = make(tmp_path, encoder_rows=100)
        item = MediaItem(bytes([number]) * KEY_BYTES, 8, bytes(32), (8,))
        rig.add("a", [0, 1, 0, 1, *[0] * 8, *prompt(40, 1)], 4, media=(item,), spans=(MediaSpan(4, 8, 0, 0),))
        rig.drain()
        rig.turn()
        cached.append(rig.rows["a"][0].stats.cached_tokens)
    assert cached == [0, PAGE if other else 48]


def test_what_a_killed_writer_leaves_goes_when_the_folder_is_opened_and_what_another_writes_stays(tmp_path):
    def opened() -> PageFiles:
        return PageFiles(tmp_path, "weights", PAGE, 2, 1 << 30)

    def parts() -> Iterator[memoryview]:
        yield memoryview(b"ab")
        left = next(tmp_path.rglob(".*.kv.*")).with_suffix(".killed")
        left.write_bytes(b"a")
        opened()
        assert not left.exists()
        yield memoryview(b"cd")

    files, tokens = opened(), bytes(4 * 2 * PAGE)
    keys = files.keys("", tokens)
    files.write(keys, tokens, 0, parts())
    [run] = files.find(keys, tokens)
    assert [bytes(part) for _, part in files.read(run, keys, 2)] == [b"abcd"]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_disk_that_hangs_stops_nobody(tmp_path, monkeypatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def write(files: PageFiles, keys: object, tokens: object, first: int, parts: Iterator[memoryview]) -> None:
        next(parts)
        hangs.set()
        goes_on.wait()
        assert next(parts, None) is None

    monkeypatch.setattr(PageFiles, "write", write)
    rig = make(tmp_path, num_pages=16)
    rig.state.tier.prompt_seconds = lambda start, count: 0.001
    rig.tier.works = False
    rig.add("a", prompt(12, 1), 4)
    rig.drain()
    thread = threading.Thread(target=rig.tier.work_all)
    thread.start()
    hangs.wait()
    rig.add("b", prompt(60, 2), 4)  # takes the whole pool
    rig.drain()
    assert rig.ids["b"] == expected_outputs(prompt(60, 2), 4, 10**9)
    goes_on.set()
    thread.join()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), overlap=st.booleans())
def test_no_wrong_token_whatever_becomes_of_the_files(tmp_path_factory, seed, overlap):
    """Random load on a small pool, restarts, and files that are cut, changed, swapped and removed meanwhile (SGLang 27504, 30321, 36179: garbage
    after loads under load)."""
    folder = tmp_path_factory.mktemp("kv")
    rng = np.random.default_rng(seed)
    for start in range(3):
        rig = make(folder, num_pages=24, max_running=6, overlap=overlap, limit_bytes=int(rng.integers(2, 40)) * 5000)
        rig.state.ratio.scale(0.1)
        for i in range(12):
            ids = prompt(int(rng.integers(4, 12)), int(rng.integers(0, 3))) + prompt(
                int(rng.integers(1, 40)), int(rng.integers(0, 4))
            )
            rig.add(f"{start}-{i}", ids, int(rng.integers(1, 12)))
            rig.tier.works = bool(rng.integers(0, 2))
            for _ in range(int(rng.integers(0, 6))):
                rig.turn()
            damage(rng, sorted(folder.rglob("*.kv")))
        rig.tier.works = True
        rig.drain()
        rig.turn()
        assert len(rig.finish) == 12
        assert {finish.type for finish in rig.finish.values()} <= {"stop", "length"}
        rig.check_idle()


def damage(rng: np.random.Generator, files: list[Path]) -> None:
    if not files or rng.integers(0, 2):
        return
    path, other = (files[int(rng.integers(len(files)))] for _ in range(2))
    data = bytearray(path.read_bytes())
    match rng.integers(0, 4):
        case 0:
            place = int(rng.integers(200) if rng.integers(0, 2) else rng.integers(4096, max(4097, len(data))))
            data[place % len(data)] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
        case 1:
            path.write_bytes(data[: int(rng.integers(len(data)))])
        case 2:
            path.write_bytes(other.read_bytes())
        case 3:
            path.unlink()


def test_few_pages_are_computed(tmp_path):
    ids = prompt(PAGE * tier_queue.LEAST_PAGES, 1)
    ask(make(tmp_path), "a", ids)
    rig = make(tmp_path)
    assert ask(rig, "b", ids) == 0, "its last token is computed in any case, so there is a page less to load"
    assert ask(make(tmp_path), "c", [*ids, 1]) == len(ids)
