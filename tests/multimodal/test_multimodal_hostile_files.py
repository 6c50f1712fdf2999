"""Files of every kind, as a client may send them: an image, or a refusal in words. Never an end of the server, and no memory that stays."""

import io
import os
import random
import signal
import struct
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps
from seeing_checkpoints import PROCESSOR, file_of, picture

from headrace.checkpoint.preprocessor_config import image_settings
from headrace.child_pool.child_side import MIB
from headrace.errors import CapacityError, ExecutionError
from headrace.multimodal.images import read_image
from headrace.multimodal.limits import MediaRefusedError
from headrace.multimodal.loader import MediaPool
from headrace.multimodal.media_messages import ImageJob, MediaSettings

SETTINGS = image_settings(PROCESSOR["llava"])
PNG, JPEG = file_of(picture(60, 80)), file_of(picture(60, 80), "JPEG")


def chunk(name: bytes, data: bytes, crc: int | None = None) -> bytes:
    return (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data) if crc is None else crc)
    )


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, data: bytes = b"", more: bytes = b"") -> bytes:
    """A PNG whose header says anything."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", width, height, 0, 0, 0)
        + b",\0\0\0\0"
        + struct.pack("<HHB", width, height, 0)
        + b"\x02\x01\0\0;"
    )


def bmp(width: int, height: int) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 100, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
        + b"\0" * 46
    )


def frames(kind: str) -> bytes:
    data = io.BytesIO()
    picture(8, 8).save(data, kind, save_all=True, append_images=[picture(8, 8, seed=1), picture(8, 8, seed=2)])
    return data.getvalue()


def cut(data: bytes, part: float) -> bytes:
    return data[: int(len(data) * part)]


def noise(data: bytes, seed: int) -> bytes:
    spoiled = bytearray(data)
    for at in random.Random(seed).sample(range(20, len(data)), 40):
        spoiled[at] ^= 0xFF
    return bytes(spoiled)


REFUSED = {
    "empty": (b"", "empty"),
    "one byte": (b"\x89", "not a known image format"),
    "text": (b"hello, world", "not a known image format"),
    "zeros": (bytes(1000), "not a known image format"),
    "random": (random.Random(1).randbytes(5000), "not a known image format"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "SVG"),
    "xml": (b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><svg>&a;</svg>', "XML"),
    "html": (b"<!DOCTYPE html><html></html>", "HTML"),
    "pdf": (b"%PDF-1.7\n", "PDF"),
    "zip": (b"PK\x03\x04" + bytes(100), "ZIP"),
    "gzip": (b"\x1f\x8b\x08" + bytes(50), "gzip"),
    "tiff": (file_of(picture(5, 5), "TIFF"), "TIFF"),
    "ico": (file_of(picture(16, 16), "ICO"), "ICO"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(50), "HEIC"),
    "avif": (b"\0\0\0\x18ftypavif" + bytes(50), "AVIF"),
    "mp4": (b"\0\0\0\x18ftypisom" + bytes(50), "MP4"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not a known image format"),
    "ppm": (file_of(picture(5, 5), "PPM"), "not a known image format"),
    "psd": (b"8BPS" + bytes(50), "Photoshop"),
    "wav": (b"RIFF\x24\0\0\0WAVEfmt ", "RIFF"),
    "json": (b'{"url": "x"}', "JSON"),
    "animated gif": (frames("GIF"), "several frames"),
    "animated webp": (frames("WEBP"), "several frames"),
    "animated png": (frames("PNG"), "several frames"),
    "png bomb": (png(50_000, 50_000), "50000 x 50000"),
    "png of billions": (png(2**31 - 1, 2**31 - 1), "pixels"),
    "png that is long": (png(1, 100_000), "100000"),
    "png of nothing": (png(0, 5), "header|pixels"),
    "gif bomb": (gif(65535, 65535), "65535 x 65535"),
    "bmp bomb": (bmp(40_000, 40_000), "40000 x 40000"),
    "bmp upside down": (bmp(1 << 20, -(1 << 20)), "pixels|header"),
    "png without pixels": (png(100, 100), "broken"),
    "png with too few pixels": (png(100, 100, data=bytes(500)), "broken"),
    "png of unknown depth": (png(10, 10, depth=3), "header|decoded"),
    "png with a text bomb": (png(10, 10, data=bytes(310), more=chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(64 * MIB)))), "header|broken"),
    "png with a wrong sum": (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 5, 8, 2, 0, 0, 0), 1), "header|decoded"),
    "png cut": (cut(PNG, 0.5), "incomplete|header"),
    "jpeg cut": (cut(JPEG, 0.5), "incomplete"),
    "jpeg header only": (JPEG[:20], "header"),
    "jpeg bomb": (JPEG.replace(struct.pack(">HH", 60, 80), struct.pack(">HH", 65000, 65000), 1), "65000 x 65000"),
    "webp cut": (cut(file_of(picture(60, 80), "WEBP"), 0.5), "incomplete|header"),
    "gif cut": (cut(file_of(picture(60, 80), "GIF"), 0.3), "incomplete|header|decoded"),
    "bmp cut": (cut(file_of(picture(60, 80), "BMP"), 0.5), "incomplete"),
}  # fmt: skip


def upright(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(picture(6, 9), "PNG", exif=exif)


TAKEN = {
    "png": PNG,
    "jpeg": JPEG,
    "webp": file_of(picture(60, 80), "WEBP"),
    "gif": file_of(picture(60, 80), "GIF"),
    "bmp": file_of(picture(60, 80), "BMP"),
    "one pixel": file_of(picture(1, 1)),
    "cmyk jpeg": file_of(picture(20, 20).convert("CMYK"), "JPEG"),
    "grey jpeg": file_of(picture(20, 20, "L"), "JPEG"),
    "grey of 16 bits": file_of(Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 160)),
    "colours of 16 bits": png(10, 10, depth=16, data=bytes(10 * 61)),
    "one bit": file_of(picture(20, 20, "1")),
    "palette": file_of(picture(20, 20).quantize(7)),
    "transparent": file_of(picture(20, 20, "RGBA")),
    "transparent grey": file_of(picture(20, 20, "LA")),
    "progressive": file_of(picture(20, 20), "JPEG", progressive=True),
    "jpeg with a zip behind it": JPEG + b"PK\x03\x04" + bytes(1000),
    "gif that is a script": file_of(picture(20, 20), "GIF") + b"*/=1;alert(1);/*",
    "png with html behind it": PNG + b"<script>alert(1)</script>",
    "profile that is none": file_of(picture(20, 20), "JPEG", icc_profile=b"x" * 200),
    "exif that is none": file_of(picture(20, 20), "JPEG", exif=b"Exif\0\0" + b"\xff" * 60),
}


@pytest.fixture(scope="module")
def pool():
    pool = MediaPool(MediaSettings(images=SETTINGS))
    yield pool
    pool.close()


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_in_words(pool: MediaPool, name: str):
    data, words = REFUSED[name]
    with pytest.raises(MediaRefusedError, match=words) as error:
        pool.prepare(ImageJob(data))
    assert len(error.value.message) < 200
    assert "/etc" not in error.value.message
    assert pool.prepare(ImageJob(PNG)).shape == (1, 3, 28, 28)
    assert pool.num_killed == 0


@pytest.mark.parametrize("name", TAKEN)
def test_a_file_is_an_image(pool: MediaPool, name: str):
    done = pool.prepare(ImageJob(TAKEN[name]))
    assert np.isfinite(np.frombuffer(done.values, np.float32)).all()
    assert pool.num_killed == 0


def test_spoiled_files_are_images_or_refused(pool: MediaPool):
    for seed in range(60):
        for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
            try:
                pool.prepare(ImageJob(noise(file_of(picture(40, 40), kind), seed)))
            except MediaRefusedError as error:
                assert error.kind in ("broken", "pixels", "frames", "format", "memory")  # noqa: PT017
    assert pool.prepare(ImageJob(PNG)).shape == (1, 3, 28, 28)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_file_says(orientation: int):
    data = upright(orientation)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(read_image(data)), np.asarray(expected))


def test_an_orientation_that_is_none_turns_nothing():
    assert np.array_equal(np.asarray(read_image(upright(77))), np.asarray(picture(6, 9)))


def test_a_photo_with_a_second_picture_is_its_first(pool: MediaPool):
    data = frames("MPO")
    assert np.array_equal(np.asarray(read_image(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_the_largest_image_is_taken_and_leaves_nothing(pool: MediaPool):
    pool.prepare(ImageJob(PNG))
    (pid,) = pool.pids
    data = file_of(Image.new("L", (7000, 7000), 3), "JPEG")
    before = psutil.Process(os.getpid()).memory_info().rss
    for _ in range(3):
        assert pool.prepare(ImageJob(data)).left_bytes < 32 * MIB
    assert pool.pids == [pid]
    assert psutil.Process(pid).memory_info().rss < 200 * MIB
    assert psutil.Process(os.getpid()).memory_info().rss - before < 32 * MIB


def test_what_takes_too_much_memory_is_refused():
    pool = MediaPool(MediaSettings(images=SETTINGS), memory_bytes=64 * MIB)
    try:
        with pytest.raises(MediaRefusedError, match="memory"):
            pool.prepare(ImageJob(file_of(Image.new("RGB", (6000, 6000)), "JPEG")))
        assert pool.prepare(ImageJob(PNG)).shape == (1, 3, 28, 28)
    finally:
        pool.close()


STUB = """
import os
from headrace.multimodal import media_child as child
real = child.prepare_job

def prepare_job(job, *more):
    if job.data == b"hang":
        while True: pass
    if job.data == b"die":
        os.abort()
    if job.data.endswith(b"/pipe") and os.path.exists(job.data):
        open(job.data).read()
    if job.data.endswith(b"/pipe"):
        job = child.ImageJob(open(job.data + b".png", "rb").read())
    if job.data == b"environment":
        return child.Refused(repr(sorted(os.environ)), "")
    return real(job, *more)

child.prepare_job = prepare_job
child.main()
"""


def test_what_ends_or_holds_a_child_is_refused_and_others_are_not(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    pool = MediaPool(MediaSettings(images=SETTINGS), limit_s=0.5, program=(sys.executable, "-c", STUB))
    try:
        assert pool.pids == []
        for data, kind, words in ((b"hang", "time", "longer than 0.5 s"), (b"die", "memory", "broken")):
            with pytest.raises(MediaRefusedError, match=words) as error:
                pool.prepare(ImageJob(data))
            assert error.value.kind == kind
            assert pool.pids == []
        assert pool.num_killed == 2
        with pytest.raises(MediaRefusedError) as error:
            pool.prepare(ImageJob(b"environment"))
        assert "SOME_API_KEY" not in error.value.message
        assert pool.prepare(ImageJob(PNG)).shape == (1, 3, 28, 28)
    finally:
        pool.close()
    with pytest.raises(ExecutionError, match="stopping"):
        pool.prepare(ImageJob(PNG))


def test_an_image_whose_child_is_killed_is_decoded_by_another(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "pipe.png").write_bytes(PNG)
    pool = MediaPool(MediaSettings(images=SETTINGS), limit_s=60, program=(sys.executable, "-c", STUB))

    def kill_at_work() -> None:
        writer = os.open(pipe, os.O_WRONLY)  # returns when the child has opened its end
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        os.close(writer)
        while pid in pool.pids:
            time.sleep(0.001)

    try:
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(pool.prepare, ImageJob(bytes(pipe)))
            kill_at_work()
            kill_at_work()
            with pytest.raises(CapacityError, match="killed"):
                done.result()
            done = threads.submit(pool.prepare, ImageJob(bytes(pipe)))
            kill_at_work()
            pipe.unlink()
            assert done.result().shape == (1, 3, 28, 28)
        assert pool.num_killed == 3
    finally:
        pool.close()
