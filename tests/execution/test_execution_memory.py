"""Limits of control groups and the size of the KV pool, from files written here."""

import mmap
from pathlib import Path

import pytest
import torch

from headrace.cgroup import available_memory, memory_limit
from headrace.errors import ConfigError
from headrace.execution.memory import (
    available_on_host,
    check_pool_fits,
    kv_token_budget,
    naming_memory,
)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path):
    write(tmp_path / "a", memory__max="1000\n", memory__current="900\n", memory__stat="anon 5\ninactive_file 50\n")
    write(tmp_path / "a/b", memory__max="5000\n", memory__current="100\n", memory__stat="")
    write(tmp_path / "a/b/c", memory__max="max\n", memory__current="100\n", memory__stat="")
    (tmp_path / "own").write_text("0::/a/b/c\n")

    assert available_memory(tmp_path, tmp_path / "own") == 1000 - 900 + 50
    assert memory_limit(tmp_path, tmp_path / "own") == 1000


def test_cgroup_v1_is_read_too(tmp_path: Path):
    write(
        tmp_path / "memory/docker",
        memory__limit_in_bytes="4096",
        memory__usage_in_bytes="1096",
        memory__stat="total_inactive_file 96\n",
    )
    (tmp_path / "own").write_text("5:cpu,cpuacct:/docker\n4:memory:/docker\n")

    assert available_memory(tmp_path, tmp_path / "own") == 3096


def test_without_a_limit_the_machine_decides(tmp_path: Path):
    write(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5")
    (tmp_path / "own").write_text("4:memory:/\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:      7 kB\n")

    assert available_memory(tmp_path, tmp_path / "own") > 1 << 50
    assert available_memory(tmp_path, tmp_path / "absent") > 1 << 50
    assert available_on_host(tmp_path / "meminfo") == 7 * 1024


@pytest.mark.parametrize(
    ("available", "fraction", "useful", "want"),
    [
        (9_000, 0.5, 10**9, 400),  # half of 10,000 less 1,000 of weights, at 10 bytes a token
        (9_000, 0.5, 100, 112),  # no more than is useful, in whole pages
        (9_059, 0.5, 10**9, 400),  # rounded down to pages
        (500, 0.5, 10**9, 0),  # nothing is left
    ],
)
def test_the_budget_is_a_share_of_what_was_free_before_the_weights(
    available: int, fraction: float, useful: int, want: int
):
    num_tokens, _ = kv_token_budget(
        available=available,
        weight_bytes=1_000,
        mem_fraction_static=fraction,
        bytes_per_token=10,
        page_size=16,
        max_tokens_useful=useful,
    )

    assert num_tokens == want


_EIB = 1 << 60


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(_EIB // 4, dtype=torch.float32),
        lambda: mmap.mmap(-1, _EIB),
        lambda: bytearray(_EIB),
    ],
    ids=["torch", "mmap", "python"],
)
def test_memory_that_runs_out_names_what_it_was_for_and_what_to_change(allocate):
    with (
        pytest.raises(ConfigError, match=r"^out of memory while allocating the cache: lower it$"),
        naming_memory("the cache", "lower it"),
    ):
        allocate()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), FileNotFoundError(2, "x"), ValueError("y")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, naming_memory("the cache", "lower it"):
        raise error
    assert caught.value is error


def test_a_pool_that_is_larger_than_what_is_free_is_refused_with_what_fits():
    check_pool_fits(10, 100, 1000)
    with pytest.raises(ConfigError, match=r"--max-total-tokens 11 .* at most 10 tokens fit"):
        check_pool_fits(11, 100, 1000)
