"""What the compiler made of kernels that no processor here can run."""

import platform
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

from headrace.kernels import cpu


@pytest.fixture(scope="module")
def instructions() -> list[str]:
    """Every instruction of the extension, in order."""
    native = cpu.load()
    if native is None or platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("needs the native kernels on x86-64, and objdump")
    command = ["objdump", "-d", "--no-show-raw-insn", "--no-addresses", native.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()


def needs(isa: str) -> None:
    if dict(cpu.isas())[isa] == "not in this build":
        pytest.skip(f"this build is without {isa} (scripts/setup --all-isas has it)")


@pytest.mark.parametrize("product", ["tdpbsud", "tdpbf16ps"])
def test_tiles_stay_in_their_registers_between_products(instructions, product):
    needs("amx")
    places = [index for index, line in enumerate(instructions) if product in line]
    used = {tuple(re.findall(r"tmm\d", instructions[place])) for place in places}
    # Sums are tiles 0 to 3, weights 6 and 7, rows 4 and 5.
    assert used == {
        ("tmm6", "tmm4", "tmm0"),
        ("tmm7", "tmm4", "tmm1"),
        ("tmm6", "tmm5", "tmm2"),
        ("tmm7", "tmm5", "tmm3"),
    }
    for last in (place for place in places if "tmm3" in instructions[place]):
        first = max(place for place in range(last) if re.search(r"tileloadd.*tmm4", instructions[place]))
        step = instructions[first : last + 1]
        assert sum("tileloadd" in line for line in step) == 4
        assert sum(product in line for line in step) == 4
        assert not any("tilestored" in line or re.search(r"[xyz]mm\d", line) for line in step)


def test_sums_of_avx2_stay_in_their_registers_between_products(instructions):
    """Tiles of 4 rows x 2 vectors take all registers but one: left to itself, GCC 12 moves one to or from the stack every other product."""
    needs("avx2")
    places = [index for index, line in enumerate(instructions) if "vpmaddubsw" in line and "%ymm" in line]
    gaps = [instructions[a + 1 : b] for a, b in pairwise(places) if b - a <= 40]
    gaps = [gap for gap in gaps if not any(re.match(r"\s+(j|ret)", line) for line in gap)]
    moved = sum("%ymm" in line and re.search(r"\(%r[sb]p\)", line) is not None for gap in gaps for line in gap)

    assert len(gaps) > 500
    assert moved < len(gaps) / 4
