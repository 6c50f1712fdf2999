"""Pages of KV out of the pool and into another one: the tokens that follow are the same, and the fingerprint knows every weight."""

import contextlib

import pytest
import torch
from runner_harness import CONTEXT, int32, make_driver, prompt, save_llama

from headrace.attention.base import KvPool
from headrace.execution import page_transfer, weight_files
from headrace.execution.page_transfer import PoolPages
from headrace.kernels import cpu as native_cpu
from headrace.messages.step import sums_of

PROMPT = prompt(40, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "cpu", "dtype": "bfloat16"},
        {"attention_backend": "cpu", "kv_cache_dtype": "int8"},
        {"attention_backend": "torch_native", "page_size": 16},
        {"attention_backend": "torch_native", "page_size": 1},
    ],
    ids=["bfloat16", "int8", "pages of 16", "pages of 1"],
)
def test_tokens_after_copied_pages_are_those_after_computed_ones(tmp_path, options):
    save_llama(tmp_path)
    first = make_driver(tmp_path, **options)
    second = make_driver(tmp_path, **options)
    with contextlib.closing(first.worker), contextlib.closing(second.worker):
        want = first.generate(0, PROMPT, 8)
        size = first.info.page_size
        num_pages = len(PROMPT) // size
        pages, others = first.worker.pages, second.worker.pages
        assert isinstance(pages, PoolPages)
        assert isinstance(others, PoolPages)
        assert pages.fingerprint() == others.fingerprint()
        data = pages.read(range(num_pages))
        assert len(data) == num_pages * pages.page_bytes
        begin = CONTEXT // size  # of sequence 1
        others.write(range(begin, begin + num_pages), data)

        slots = int32(range(CONTEXT, CONTEXT + (len(PROMPT) - 1) // size * size))
        assert second.generate(1, PROMPT, 8, prefix_slots=slots) == want


@pytest.mark.parametrize("shape", [(2, 64), (1, 7), (3, 5)], ids=["of 16 bytes", "odd", "unaligned"])
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_bytes_of_pages_are_those_of_their_layers(monkeypatch, shape, is_native):
    """In the order of layers, K before V, whatever copies them; pages that are not named stay as they are."""
    if is_native and native_cpu.why_not():
        pytest.skip(native_cpu.why_not())
    if not is_native:
        monkeypatch.setattr(page_transfer, "runs_native", lambda: False)
    k, v = ([torch.randint(0, 256, (5 * 4, *shape), dtype=torch.uint8) for _ in range(3)] for _ in "kv")
    pages, before = PoolPages(KvPool(k, v, 20, 4), list, dict), [one.clone() for one in (*k, *v)]
    numbers = [3, 0, 4]

    def rows(number):
        return [tensor.view(5, -1)[number] for pair in zip(k, v, strict=True) for tensor in pair]

    want = torch.cat([row for number in numbers for row in rows(number)]).numpy().tobytes()
    assert pages.read(numbers) == want
    into = memoryview(bytearray(len(want)))
    sums = pages.read_into(numbers, into)
    assert into == want
    assert sums.tolist() == sums_of(into).tolist()

    given = memoryview(bytearray(torch.randint(0, 256, (len(want),), dtype=torch.uint8).numpy()))
    pages.write(numbers, given)
    assert pages.read(numbers) == given
    for tensor, old in zip((*k, *v), before, strict=True):
        assert torch.equal(tensor.view(5, -1)[[1, 2]], old.view(5, -1)[[1, 2]])

    for call in (
        lambda: pages.read([5]),
        lambda: pages.read([-1]),
        lambda: pages.write([5], given[: pages.page_bytes]),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises((ValueError, RuntimeError)):
        pages.read_into(numbers, into[: 2 * pages.page_bytes])
    with pytest.raises((ValueError, RuntimeError)):
        pages.write(numbers, given[: 2 * pages.page_bytes])


@pytest.mark.skipif(bool(native_cpu.why_not()), reason="packed weights are the native kernels'")
def test_packed_weights_that_were_read_are_not_hashed_again(tmp_path, monkeypatch):
    """But what an update brings is."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    save_llama(tmp_path / "model")
    fingerprints, hashed, counts = [], [], []

    def bytes_of(tensor):
        hashed.append(tensor.nbytes)
        return plain(tensor)

    plain = weight_files.bytes_of
    monkeypatch.setattr(weight_files, "bytes_of", bytes_of)
    for _ in range(2):
        driver = make_driver(tmp_path / "model", attention_backend="cpu", quantization="int8")
        with contextlib.closing(driver.worker):
            pages = driver.worker.pages
            hashed.clear()
            fingerprints.append(pages.fingerprint())
            counts.append(sum(hashed))
            keeper = next(weight for weight in driver.worker.runner.model.weights() if "q_proj" in weight.name).keepers[
                0
            ]
            kept = dict(keeper.kept())
            name = max(
                (name for name, value in kept.items() if isinstance(value, torch.Tensor)),
                key=lambda name: kept[name].nbytes,
            )
            changed = kept[name].clone()
            changed.view(torch.uint8).view(-1)[5] ^= 1
            keeper.restore({**kept, name: changed})
            fingerprints.append(pages.fingerprint())
    assert fingerprints[0] == fingerprints[2] != fingerprints[1] == fingerprints[3]
    assert counts[0] > 10 * counts[1], counts  # the norms are no packed weights


def test_a_fingerprint_is_of_every_weight(tmp_path):
    """One value of one weight changed, in whichever layer."""
    save_llama(tmp_path)
    driver = make_driver(tmp_path, attention_backend="torch_native")
    with contextlib.closing(driver.worker):
        pages = driver.worker.pages
        seen = {pages.fingerprint()}
        for number, weight in enumerate(driver.worker.runner.model.weights()):
            for keeper in weight.keepers:
                kept = dict(keeper.kept())
                name, tensor = next((name, value) for name, value in kept.items() if isinstance(value, torch.Tensor))
                changed = tensor.clone()
                changed.view(torch.uint8).view(-1)[number] ^= 1
                keeper.restore({**kept, name: changed})
            seen.add(pages.fingerprint())
            assert len(seen) == number + 2, weight.name
