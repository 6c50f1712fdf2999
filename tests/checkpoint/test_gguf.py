"""The GGUF reader against the gguf library, and against broken files."""

from array import array

import gguf
import numpy as np
import pytest

from headrace.checkpoint.gguf import BLOCK_TYPES, GgufFile, dequantize, gguf_of, opened
from headrace.checkpoint.gguf_checkpoint import precision_of
from headrace.checkpoint.gguf_strings import Strings, text_of
from headrace.config.server_args import ServerArgs
from headrace.errors import ModelError

QUANTISED = [block.name for block in BLOCK_TYPES.values() if block.block_values > 1]


def write_gguf(path, tensors, metadata=(), arch="llama"):
    """tensors: name -> float array, or (uint8 rows, type name)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in dict(metadata).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=gguf.GGMLQuantizationType[tensor[1]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path):
    tensors = {"a.weight": np.arange(64, dtype=np.float32).reshape(2, 32), "b.weight": np.ones(32, np.float16)}
    metadata = {"x.text": "höher", "x.list": ["a", "", "ü"], "x.ints": [1, 2, 3], "x.float": 0.5, "x.flag": True}
    return write_gguf(tmp_path / "small.gguf", tensors, metadata)


@pytest.mark.parametrize("name", QUANTISED)
def test_dequantisation_is_that_of_the_gguf_library_bit_for_bit(name):
    block = next(block for block in BLOCK_TYPES.values() if block.name == name)
    raw = np.random.default_rng(7).integers(0, 256, (5, block.block_bytes * 3), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])

    got = dequantize(raw, name)

    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "IQ4_XS"])
def test_a_tensor_of_several_portions_keeps_its_order(name, monkeypatch):
    monkeypatch.setattr("headrace.checkpoint.gguf._DEQUANT_CHUNK_BYTES", 500)
    block = next(block for block in BLOCK_TYPES.values() if block.name == name)
    raw = np.random.default_rng(7).integers(0, 256, (20, block.block_bytes * 3), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])

    np.testing.assert_array_equal(dequantize(raw, name).view(np.uint32), want.view(np.uint32))


def test_every_type_that_the_library_dequantises_is_read():
    sizes = {block.name: (block.block_values, block.block_bytes) for block in BLOCK_TYPES.values()}
    for kind in gguf.GGMLQuantizationType:
        try:
            with np.errstate(all="ignore"):
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            assert kind.value not in BLOCK_TYPES
        else:
            assert sizes[kind.name] == gguf.GGML_QUANT_SIZES[kind]
            assert BLOCK_TYPES[kind.value].name == kind.name


def test_half_types_become_the_same_numbers():
    values = np.array([[0.5, -1.25, 3e-5, 40000.0]], np.float32)
    bfloat = (values.view(np.uint32) >> 16).astype(np.uint16)

    assert dequantize(values.astype(np.float16).view(np.uint8), "F16").tolist() == values.astype(np.float16).tolist()
    assert (dequantize(bfloat.view(np.uint8), "BF16").view(np.uint32) == values.view(np.uint32) & 0xFFFF0000).all()


def test_metadata_and_tensors_are_read_back(small):
    file = GgufFile(small)

    assert file.get("general.architecture") == "llama"
    assert (file.get("x.text"), file.get("x.list"), file.get("x.ints")) == ("höher", ["a", "", "ü"], [1, 2, 3])
    assert (file.get("x.float"), file.get("x.flag"), file.get("absent", 7)) == (0.5, True, 7)
    assert list(file.tensors) == ["a.weight", "b.weight"]
    assert file.tensors["a.weight"].shape == (2, 32)
    assert file.dequantize("a.weight").tolist() == np.arange(64.0).reshape(2, 32).tolist()
    assert file.raw("b.weight").shape == (1, 64)


def test_strings_are_found_and_survive_their_file(tmp_path):
    words = ["ab", "", "b", "ü", "a", "b"]
    path = write_gguf(tmp_path / "s.gguf", {}, {"x.words": words, "x.ints": [3, -1], "x.text": "a"})
    file = GgufFile(path)
    found = file.strings("x.words")
    path.write_bytes(bytes(path.stat().st_size))

    assert (list(found), found[1:3], len(found)) == (words, ["", "b"], 6)
    assert [found.find(word) for word in ("b", "ü", "", "abc")] == [2, 3, 1, None]
    for key in ("x.ints", "x.text", "absent"):
        with pytest.raises(ModelError, match=key):
            file.strings(key)
    for key in ("x.words", "x.text", "absent"):
        with pytest.raises(ModelError, match=key):
            file.integers(key)


@pytest.mark.parametrize(
    "texts", [[], [b"", b"a\xc3", b"\xbcb"], [b"a\0b", b"\0", b""], [b"\xc3\xbc", b"\1" * 300, b""]]
)
def test_all_strings_are_what_each_of_them_is(texts):
    data = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    starts = np.cumsum([40, *(8 + len(text) for text in texts)]).tolist()
    strings = Strings(data, array("q", starts))

    assert list(strings) == [text_of(text) for text in texts] == [strings[at] for at in range(len(texts))]


def test_a_file_is_opened_once_until_it_changes(tmp_path):
    path = write_parts(tmp_path)
    first = opened(path)
    assert opened(path) is first

    (tmp_path / "other").mkdir()
    other = write_parts(tmp_path / "other").with_name("m-00003-of-00003.gguf")
    other.replace(tmp_path / other.name)

    assert opened(path) is not first


def write_parts(folder, changes=None, stem="m"):
    """A file in three parts, as llama-gguf-split writes it; changes: metadata of a part by its number from 0."""
    tensors = [{"a.weight": np.full((2, 32), 1.0, np.float32)}, {"b.weight": np.full((2, 32), 2.0, np.float32)}, {}]
    tensors[2] = {"c.weight": np.full((1, 32), 3.0, np.float32), "d.weight": np.full(32, 4.0, np.float32)}
    for number, own in enumerate(tensors):
        metadata = {"split.no": number, "split.count": 3, "split.tensors.count": 4} | (changes or {}).get(number, {})
        write_gguf(folder / f"{stem}-{number + 1:05}-of-00003.gguf", own, metadata)
    return folder / f"{stem}-00001-of-00003.gguf"


def test_a_file_in_parts_is_one_file(tmp_path):
    file = GgufFile(write_parts(tmp_path))

    assert list(file.tensors) == ["a.weight", "b.weight", "c.weight", "d.weight"]
    assert [float(file.dequantize(name).max()) for name in file.tensors] == [1.0, 2.0, 3.0, 4.0]
    assert [part.path.name for part in file.parts] == [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    assert len(file.mapped_memory()) == 3
    assert gguf_of(tmp_path) == file.path


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({1: {"split.no": 2}}, r"00002-of-00003\.gguf is not .* says that it is another one of 3 parts"),
        ({2: {"split.count": 2}}, "another one of 3 parts"),
        ({0: {"split.tensors.count": 5}}, "its parts have 4 tensors, and it says 5"),
        ({0: {"split.count": 4}}, "one of 4 parts of a model, which are called"),
        ({0: {"split.count": 2**31}}, "expected a number of parts"),
        ({0: {"split.no": 1}}, r"not the first of 3 parts; name m-00001-of-00003\.gguf"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, why, tmp_path):
    with pytest.raises(ModelError, match=why):
        GgufFile(write_parts(tmp_path, changes))


def test_a_part_alone_or_without_its_neighbour_is_refused(tmp_path):
    first = write_parts(tmp_path)
    with pytest.raises(ModelError, match=r"not the first of 3 parts; name m-00001-of-00003\.gguf"):
        GgufFile(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"of its 3 parts m-00003-of-00003\.gguf is missing"):
        GgufFile(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=r"one of 3 parts of a model, which are called NAME-00001-of-00003\.gguf"):
        GgufFile(tmp_path / "renamed.gguf")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/a-Q4_K_M-00001-of-00003.gguf", "a-Q4_K_M"),
        ("/m/a-Q4_K_M.gguf", "a-Q4_K_M"),
        ("/m/a-00001-of-00003", "a-00001-of-00003"),
    ],
)
def test_a_file_in_parts_is_served_under_the_name_of_the_whole(path, name):
    assert ServerArgs(model_path=path).served_names == (name,)


def test_a_part_that_does_not_say_so_is_refused(tmp_path):
    first = write_parts(tmp_path)
    write_gguf(tmp_path / "m-00002-of-00003.gguf", {"b.weight": np.ones((2, 32), np.float32)})

    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is not .* does not say that it is one of 3 parts"):
        GgufFile(first)


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    first = write_parts(tmp_path)
    metadata = {"split.no": 1, "split.count": 3, "split.tensors.count": 4}
    write_gguf(tmp_path / "m-00002-of-00003.gguf", {"a.weight": np.ones(32, np.float32)}, metadata)

    with pytest.raises(ModelError, match=r"tensor a\.weight is in another part, too"):
        GgufFile(first)


def test_every_truncation_is_refused(small, tmp_path):
    whole = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in {*range(0, 300, 7), len(whole) - 40, len(whole) - 65, *range(300, len(whole) - 65, 61)}:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GgufFile(cut)


def test_a_truncated_tensor_is_named(small, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[:-64])

    with pytest.raises(ModelError, match=r"b\.weight.*truncated"):
        GgufFile(cut)


def test_flipped_header_bits_never_crash(small, tmp_path):
    whole = bytearray(small.read_bytes())
    broken = tmp_path / "broken.gguf"
    for at in range(len(whole) - 320):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        broken.write_bytes(flipped)
        try:
            file = GgufFile(broken)
            for key in file.metadata_keys():
                file.get(key)
            for name in file.tensors:
                file.dequantize(name)
        except ModelError:
            continue


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "big-endian"),
        (b"PK\x03\x04" + bytes(60), "does not start with the letters GGUF"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "claims"),
    ],
)
def test_what_is_no_gguf_is_refused_with_the_reason(tmp_path, content, why):
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=why):
        GgufFile(path)


def test_an_unsupported_block_type_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "q.gguf", {"w.weight": (np.zeros((1, 292), np.uint8), "Q8_K")})

    with pytest.raises(ModelError, match=r"w\.weight has type Q8_K; supported: F32, .*IQ4_XS"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({"general.file_type": 15}, "Q4_K_M"),
        ({"general.file_type": 7}, "Q8_0"),
        ({"general.file_type": 1}, "F16"),
        ({"general.file_type": 1024}, "Q4_0"),
        ({"general.file_type": "all"}, "Q4_0"),
        ({}, "Q4_0"),
    ],
)
def test_the_precision_is_that_of_the_file_or_of_most_of_its_values(tmp_path, metadata, want):
    tensors = {"a.weight": (np.zeros((8, 18), np.uint8), "Q4_0"), "b.weight": np.ones(32, np.float16)}
    assert precision_of(GgufFile(write_gguf(tmp_path / "a.gguf", tensors, metadata))) == want
