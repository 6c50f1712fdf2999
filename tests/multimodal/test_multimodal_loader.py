"""The loader: one decode for the same content, few places for one request, and nothing left of requests that have gone."""

import asyncio
import base64
import os
import threading
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from urllib.parse import quote

import pytest
from aiohttp import web
from seeing_checkpoints import file_of, picture, write_checkpoint

from headrace.config.web import MediaArgs, parse_media_domains
from headrace.errors import CapacityError, ExecutionError, RequestError
from headrace.media_kinds import ImageRef, MediaKind
from headrace.messages.media import KEY_BYTES
from headrace.multimodal import sources
from headrace.multimodal.limits import MediaRefusedError, png_pixels
from headrace.multimodal.loader import MediaLoader, RecentRefusals, make_loader
from headrace.multimodal.media_messages import Done, ImageJob
from headrace.multimodal.sources import FileLimit, inline_bytes
from headrace.turns import work_for

PNG = file_of(picture(40, 40))
TEXT = base64.b64encode(PNG).decode()


class Pool:
    """In place of children: says which images it was asked for, and answers when it is let to."""

    num_killed = 0

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.begun = threading.Semaphore(0)
        self.going = threading.Semaphore(0)
        self.is_closed = False

    def prepare(self, job: ImageJob) -> Done:
        data = job.data
        self.asked.append(data)
        self.begun.release()
        self.going.acquire()
        if self.is_closed:
            raise ExecutionError("the server is stopping")
        if data.startswith(b"costly"):
            raise MediaRefusedError("it takes too long", "time")
        if data.startswith(b"bad"):
            raise MediaRefusedError("it is bad", "broken")
        return Done(data.ljust(16)[:16], data.ljust(64)[:64], (1, 1, 4, 4), (0, 0, 0))

    def close(self) -> None:
        self.is_closed = True
        self.going.release(1000)


@pytest.fixture
def loaders(tmp_path: Path) -> Iterator:
    made: list[MediaLoader] = []

    def make(family: str = "qwen2_vl", **args) -> MediaLoader:
        tokenizer = write_checkpoint(tmp_path, family)
        made.append(make_loader(tmp_path, tokenizer, MediaArgs(**args)))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def slow(loaders) -> tuple[MediaLoader, Pool]:
    loader = loaders("llava")
    loader._pool.close()
    pool = loader._pool = Pool()
    return loader, pool


def refs(*data: bytes | str) -> list[ImageRef]:
    return [ImageRef(data=each) if isinstance(each, bytes) else ImageRef(url=each) for each in data]


async def begun(pool: Pool, count: int = 1) -> None:
    for _ in range(count):
        await asyncio.to_thread(pool.begun.acquire)


async def in_flight(loader: MediaLoader, count: int) -> None:
    for _ in range(20_000):
        if len(loader._flights._flights) == count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(count)


async def waiting(loader: MediaLoader, count: int) -> None:
    """Until so many calls wait for the one image that is being prepared."""
    for _ in range(20_000):
        if [flight.num_waiting for flight in loader._flights._flights.values()] == [count]:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(count)


async def test_an_image_is_one_however_it_comes(loaders, tmp_path):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=PNG)

    app = web.Application()
    app.router.add_get("/a.png", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"127.0.0.1:{runner.addresses[0][1]}"
    (tmp_path / "a b.png").write_bytes(PNG)
    loader = loaders(domains=parse_media_domains(host), folder=tmp_path)
    assert loader._pool.pids == []

    found = await loader.load(
        refs(PNG, TEXT, f"data:image/png;base64,{TEXT}", f"http://{host}/a.png", f"file://{tmp_path}/a%20b.png")
    )
    await runner.cleanup()

    assert len({id(each) for each in found}) == 1
    stats = loader.stats()
    assert (stats.num_loaded, stats.num_cache_hits, stats.num_cached) == ({"image": 5}, 4, 1)
    assert stats.cache_bytes > len(found[0].item.values)
    assert stats.fetch_s > 0
    assert len(loader._pool.pids) == 1


@pytest.mark.parametrize(
    "url",
    [
        TEXT,
        TEXT.rstrip("="),
        "\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)),
        f"data:image/png;base64,{TEXT}",
        f"DATA:;BASE64,{TEXT}",
        f"data:application/pdf;x=y;base64,{TEXT}",
        f"data:image/png;base64,{quote(TEXT)}",
        f"data:image/png;base64,{quote(TEXT, safe='')}",
    ],
    ids=range(8),
)
async def test_forms_of_the_same_bytes(url: str, loaders):
    first, second = await loaders().load(refs(PNG, url))
    assert first is second


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,###", "base64"),
        ("/etc/passwd", "base64"),
        ("C:\\image.png", "scheme 'C'"),
        ("ftp://a.example/x.png", "scheme 'ftp'"),
        ("javascript:alert(1)", "scheme 'javascript'"),
        ("blob:https://a.example/1", "scheme 'blob'"),
        ("gopher://127.0.0.1:6379/_x", "scheme 'gopher'"),
        ("bild.png", "base64"),
        ("ünïcode", "base64"),
        ("https://a.example/x.png", "allowed-media-domains"),
        ("file:///etc/passwd", "allowed-local-media-path"),
        (base64.b64encode(bytes(20_001)).decode(), "larger than 20000"),
        (base64.b64encode(bytes(90_001)).decode(), "larger than 20000"),
        (f"data:image/png,{quote(PNG)}", "not in base64"),
    ],
    ids=lambda value: value[:30],
)
async def test_a_form_is_refused_in_words(url: str, words: str, loaders):
    loader = loaders(max_bytes={MediaKind.IMAGE: 20_000})
    with pytest.raises(RequestError, match=words) as error:
        await loader.load(refs(PNG, url))
    assert error.value.message.startswith("image_data[1]: ")
    assert error.value.param == "image_data"
    assert sum(loader.stats().num_refused.values()) == 1


FILES = {
    "a.png": True, "sub/a.png": True, "sub/../a.png": True, "inner": True, "%61.png": True,
    "outer": False, "outer-folder/secret.png": False, "../secret.png": False, "%2e%2e/secret.png": False, "sub/../../secret.png": False,
    "none.png": False, "sub": False, "": False, "fifo": False, "a.png%00": False, "a.png?x": False, "a.png#x": False,
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
async def test_files_are_read_below_the_folder_only(name: str, loaders, tmp_path):
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for file in (folder / "a.png", folder / "sub" / "a.png", tmp_path / "secret.png"):
        file.write_bytes(PNG)
    (folder / "inner").symlink_to("sub/a.png")
    (folder / "outer").symlink_to(tmp_path / "secret.png")
    (folder / "outer-folder").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    loader = loaders(folder=folder)
    url = f"file://{folder}/{name}"
    if FILES[name]:
        assert len(await loader.load(refs(url))) == 1
        return
    with pytest.raises(RequestError) as error:
        await loader.load(refs(url))
    assert (
        error.value.message == "image_data[0]: there is no such file below --allowed-local-media-path that can be read"
    )


async def test_files_of_other_hosts_and_large_files_are_refused(loaders, tmp_path):
    (tmp_path / "large").write_bytes(bytes(2001))
    loader = loaders(folder=tmp_path, max_bytes={MediaKind.IMAGE: 2000})
    for url, words in (
        (f"file://host{tmp_path}/large", "no such file"),
        (f"file://{tmp_path}/large", "larger than 2000"),
    ):
        with pytest.raises(RequestError, match=words):
            await loader.load(refs(url))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10, 11, 12, 13, 40, 41])
def test_base64_is_decoded_in_pieces(size: int, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 7)
    data = os.urandom(30 + size)
    text = base64.b64encode(data).decode()
    for form in (text, text.rstrip("="), "\n".join(text), text + "\n" * 20):
        assert inline_bytes(ImageRef(url=f"data:;base64,{form}"), FileLimit(100, "--max")) == data
    for form in (text + "=" * 9 + text, "ä" + text, text + "-", "*" + text):
        with pytest.raises(MediaRefusedError, match="base64"):
            inline_bytes(ImageRef(url=f"data:;base64,{form}"), FileLimit(1000, "--max"))


async def test_few_tokens_are_another_image(loaders):
    loader = loaders("idefics3")
    high, low = await loader.load([ImageRef(data=PNG), ImageRef(data=PNG, detail="low")])
    assert high.item.num_tokens > low.item.num_tokens
    loader = loaders("llava")
    same, as_well = await loader.load([ImageRef(data=PNG), ImageRef(data=PNG, detail="low")])
    assert same is as_well


async def test_the_same_image_is_decoded_once_for_all_who_wait(slow):
    loader, pool = slow
    calls = [asyncio.create_task(loader.load(refs(b"same"))) for _ in range(10)]
    await begun(pool)
    await waiting(loader, 10)
    for call in calls[:9]:
        call.cancel()
    await asyncio.wait(calls[:9])
    pool.going.release()
    assert (await calls[9])[0].item.values.startswith(b"same")
    assert pool.asked == [b"same"]
    await loader.load(refs(b"same"))
    assert pool.asked == [b"same"]


async def test_owners_share_no_image(slow):
    loader, pool = slow
    pool.going.release(3)
    mine, yours, again = [await loader.load(refs(b"same"), owner) for owner in ("me", "you", "me")]
    assert pool.asked == [b"same", b"same"]
    assert again == mine
    assert mine[0].item.key != yours[0].item.key
    assert mine[0].item.values == yours[0].item.values
    assert len(mine[0].item.key) == KEY_BYTES


async def test_an_image_that_is_refused_is_refused_for_all_who_wait_and_not_kept(slow):
    loader, pool = slow
    calls = [asyncio.create_task(loader.load(refs(b"bad"))) for _ in range(3)]
    await begun(pool)
    await waiting(loader, 3)
    pool.going.release(2)
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [error.message for error in errors] == ["image_data[0]: it is bad"] * 3
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(RequestError):
        await loader.load(refs(b"bad"))
    assert pool.asked == [b"bad", b"bad"]
    assert loader.stats().num_refused == {"broken": 4}


async def test_a_file_that_took_all_it_may_is_not_tried_again_at_once(slow):
    loader, pool = slow
    pool.going.release(10)
    for _ in range(3):
        with pytest.raises(RequestError, match="too long"):
            await loader.load(refs(b"costly"))
    assert pool.asked == [b"costly"]
    loader._costly = RecentRefusals(seconds=0)
    for _ in range(2):
        with pytest.raises(RequestError, match="too long"):
            await loader.load(refs(b"costly"))
    assert pool.asked == [b"costly"] * 3


def test_the_refusals_of_one_tenant_displace_none_of_another():
    recent = RecentRefusals(max_refusals=4)

    def refuse(tenant: str, count: int) -> None:
        work_for(tenant)
        for number in range(count):
            recent.add(f"{tenant} {number}".encode(), MediaRefusedError("too long", "time"))

    copy_context().run(refuse, "own", 1)
    copy_context().run(refuse, "other", 9)
    for key in (b"own 0", b"other 8"):
        with pytest.raises(MediaRefusedError):
            recent.check(key)
    recent.check(b"other 0")


async def test_what_nobody_waits_for_is_not_decoded(slow):
    loader, pool = slow
    first = asyncio.create_task(loader.load(refs(b"1")))
    await begun(pool)
    gone = asyncio.create_task(loader.load(refs(b"2", b"3")))
    last = asyncio.create_task(loader.load(refs(b"4")))
    await in_flight(loader, 4)
    gone.cancel()
    await asyncio.wait([gone])
    pool.going.release(10)
    await asyncio.gather(first, last)
    assert pool.asked == [b"1", b"4"]


async def test_a_request_with_a_bad_image_gives_up_its_others(slow):
    loader, pool = slow
    call = asyncio.create_task(loader.load(refs(b"bad", b"2", b"3")))
    await begun(pool)
    await in_flight(loader, 3)
    while b"bad" not in pool.asked:  # which one comes first is the threads' choice
        pool.going.release()
        await begun(pool)
    place = len(pool.asked)
    pool.going.release()
    with pytest.raises(RequestError, match=r"image_data\[0\]"):
        await call
    pool.going.release(10)
    await loader.load(refs(b"4"))
    assert pool.asked[-1] == b"4"
    assert len(pool.asked) <= place + 2  # the next one may have begun


async def test_many_images_of_one_request_do_not_hold_up_another(slow):
    loader, pool = slow
    many = asyncio.create_task(loader.load(refs(*(b"many %d" % number for number in range(20)))))
    await begun(pool)
    one = asyncio.create_task(loader.load(refs(b"one")))
    await in_flight(loader, 5)
    pool.going.release(30)
    await asyncio.gather(many, one)
    assert pool.asked.index(b"one") <= 4


async def test_one_tenant_leaves_a_child_to_another(slow):
    async def load(tenant: str, *data: bytes) -> None:
        work_for(tenant)
        await loader.load(refs(*data))

    loader, pool = slow
    many = asyncio.create_task(load("a", *(b"many %d" % number for number in range(20))))
    await begun(pool)
    await in_flight(loader, 4)
    other = asyncio.create_task(load("b", b"other"))
    await begun(pool)
    assert len(pool.asked) == 2
    assert pool.asked[1] == b"other"
    pool.going.release(30)
    await asyncio.gather(many, other)


def test_the_pixels_of_a_png_image_say_how_long_it_takes():
    assert png_pixels(file_of(picture(40, 30))) == 1200
    assert [png_pixels(data) for data in (b"", PNG[:8], b"\xff\xd8\xff" + PNG[3:])] == [0, 0, 0]


async def test_what_is_loaded_when_the_server_stops_fails(slow):
    loader, pool = slow
    calls = [asyncio.create_task(loader.load(refs(b"%d" % number))) for number in range(3)]
    await begun(pool)
    loader.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, ExecutionError | CapacityError)
        assert result.message == "the server is stopping"
