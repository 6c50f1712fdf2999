"""Which URLs are asked, and what of an answer is taken. A local server stands for the Internet; a fake resolver says where its hosts are."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
from aiohttp import web
from seeing_checkpoints import file_of, picture

from headrace.config.server_args import ServerArgs
from headrace.config.web import MediaArgs, MediaDomains, media_args, parse_media_domains, parse_media_folder
from headrace.errors import CapacityError, ConfigError
from headrace.multimodal import fetch
from headrace.multimodal.fetch import Fetcher, is_public
from headrace.multimodal.limits import MediaRefusedError
from headrace.multimodal.sources import FileLimit

PNG = file_of(picture(9, 9))
MOST = 10_000
LIMIT = FileLimit(MOST, "--max-image-bytes")


class Host:
    """A server that says anything. asked: the paths it was asked for, with the headers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.port = 0
        self.running = 0
        self.most_running = 0
        self.is_full = asyncio.Event()
        self.let_go = asyncio.Event()

    async def signed(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=request.raw_path.encode())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.headers)))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running == fetch.AT_A_TIME_OF_HOST:
            self.is_full.set()
        try:
            return await getattr(self, request.path.strip("/").split("/")[0].replace(".", "_"))(request)
        finally:
            self.running -= 1

    async def image_png(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=PNG, content_type="text/html", headers={"Set-Cookie": "a=b"})

    async def missing(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=404, body=PNG)

    async def partial(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=206, body=PNG)

    async def large(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(MOST + 1))

    async def endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(4096))

    async def cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "5000"})
        await response.prepare(request)
        await response.write(PNG[:50])
        request.transport.close()
        return response

    async def zipped(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(bytes(10 * MOST)), headers={"Content-Encoding": "gzip"})

    async def slow(self, request: web.Request) -> web.StreamResponse:
        await self.let_go.wait()
        return web.Response(body=PNG)

    async def drip(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "5000"})
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.02)

    async def to(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": request.query["at"]})

    async def loop(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/loop"})

    async def nowhere(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=301)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    app = web.Application()
    app.router.add_get("/{path:.*}", host.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host.port = runner.addresses[0][1]
    yield host
    host.let_go.set()
    await runner.cleanup()


def fetcher(domains: str, addresses: dict[str, list[str]] | None = None, limit_s: float = 10.0) -> Fetcher:
    async def resolve(name: str, port: int) -> list[str]:
        if addresses is None or name not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return addresses[name]

    return Fetcher(MediaArgs(domains=parse_media_domains(domains)), resolve, limit_s)


def at_its_address(host: Host, limit_s: float = 10.0) -> tuple[Fetcher, str]:
    """What the operator allows by address and port, and the URL of it."""
    return fetcher(f"127.0.0.1:{host.port}", limit_s=limit_s), f"http://127.0.0.1:{host.port}"


async def test_an_image_is_fetched_without_anything_of_the_servers(host: Host, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    client, url = at_its_address(host)
    for _ in range(2):
        assert await get(client, f"{url}/image.png?size=1#part") == PNG
    headers = host.asked[1][1]
    assert headers.keys() == {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}
    assert headers["Accept-Encoding"] == "identity"


async def get(client: Fetcher, url: str) -> bytes:
    async with client.fetched(url, LIMIT) as data:
        return data


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.0.1", "192.0.2.1",
    "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd12:3456::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::1",
    "2001:0:1::1", "2001:db8::1", "100::1", "fec0::1", "not an address", "",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_is_not_public(address: str):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "93.184.216.34"])
def test_an_address_is_public(address: str):
    assert is_public(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("beside", [[], ["8.8.8.8"]], ids=["alone", "beside a public one"])
async def test_a_name_for_a_private_address_is_refused(address: str, beside: list[str], host: Host):
    client = fetcher(f"images.example:{host.port}", {"images.example": [*beside, address]})
    with pytest.raises(MediaRefusedError, match="not a public one") as error:
        await get(client, f"http://images.example:{host.port}/image.png")
    assert address not in error.value.message
    assert host.asked == []


REFUSED = [
    ("http://other.example/x", "operator allows"),
    ("http://images.example.evil.example/x", "operator allows"),
    ("http://evilimages.example/x", "operator allows"),
    ("http://127.0.0.1/x", "operator allows"),
    ("http://127.0.0.1:1/x", "operator allows"),
    ("http://127.1:PORT/x", "operator allows"),
    ("http://2130706433:PORT/x", "operator allows"),
    ("http://0x7f000001:PORT/x", "operator allows"),
    ("http://0177.0.0.1:PORT/x", "operator allows|cannot be read"),
    ("http://[::ffff:127.0.0.1]:PORT/x", "operator allows"),
    ("http://[::1]:PORT/x", "operator allows"),
    ("http://localhost:PORT/x", "operator allows"),
    ("http://images.example:22/x", "operator allows"),
    ("http://images.example:443/x", "operator allows"),
    ("http://images.example@127.0.0.1:PORT/x", "user name"),
    ("http://user:word@images.example/x", "user name"),
    ("http://images.example\\@127.0.0.1:PORT/x", "characters"),
    ("http://images.example /x", "characters"),
    ("http://images.example/x\r\nHost: other", "characters"),
    ("http://127.0.0.1%2f@images.example/x", "user name|cannot be read"),
    ("http:///x", "no host|cannot be read"),
    ("http:x", "no host|cannot be read"),
    ("http://images.example:99999/x", "cannot be read"),
    ("http://[::1/x", "cannot be read"),
    ("http://images.example/" + "x" * 9000, "too long"),
]


@pytest.mark.parametrize(("url", "words"), REFUSED, ids=[url[:40].strip() for url, _ in REFUSED])
async def test_no_request_leaves_for_a_url(url: str, words: str, host: Host):
    looked_up = []

    async def resolve(name: str, port: int) -> list[str]:
        looked_up.append(name)
        return ["127.0.0.1"]

    domains = parse_media_domains(f"images.example,127.0.0.1:{host.port}")
    client = Fetcher(MediaArgs(domains=domains), resolve)
    with pytest.raises(MediaRefusedError, match=words):
        await get(client, url.replace("PORT", str(host.port)))
    assert looked_up == host.asked == []


async def test_a_url_is_asked_for_as_it_is_written(host: Host):
    client, url = at_its_address(host)
    path = "/signed/a%2Fb%7Ec+d~e?X-Signature=%2b%2B+%7e'()&x=%41"
    assert (await get(client, url + path)).decode() == path
    assert (await get(client, f"{url}/to?at={quote(path, safe='')}")).decode() == path
    assert (await get(client, f"{url}/signed/ü")).decode() == "/signed/%C3%BC"


async def test_by_default_nothing_is_fetched(host: Host):
    with pytest.raises(MediaRefusedError, match="allowed-media-domains"):
        await get(Fetcher(MediaArgs()), f"http://127.0.0.1:{host.port}/image.png")
    assert host.asked == []


async def test_the_address_that_was_checked_is_asked(host: Host, monkeypatch):
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    name = f"IMAGES.example.:{host.port}"

    async def resolve(name: str, port: int) -> list[str]:
        return answers.pop(0)

    client = Fetcher(MediaArgs(domains=parse_media_domains(f"images.example:{host.port}")), resolve)
    assert await get(client, f"http://{name}/image.png") == PNG
    assert host.asked[0][1]["Host"].lower() == f"images.example:{host.port}"
    with pytest.raises(MediaRefusedError, match="not a public one"):
        await get(client, f"http://{name}/image.png")
    assert len(host.asked) == 1


ANSWERS = {
    "/missing": "404",
    "/partial": "206",
    "/large": "larger than 10000",
    "/endless": "larger than 10000",
    "/cut": "does not answer",
    "/zipped": "compressed",
    "/loop": "3 redirects",
    "/nowhere": "404|redirect|does not answer|3 redirects",
    "/to?at=http://10.0.0.1:80/secret-host": "another one",
    "/to?at=//metadata.internal/x": "another one",
    "/to?at=http://localhost:{port}/image.png": "another one",
    "/to?at=file:///etc/passwd": "another one",
    "/to?at=http://127.0.0.1:1/": "operator allows",
    "/to?at=http://[::1": "cannot be read",
}


@pytest.mark.parametrize("path", ANSWERS)
async def test_an_answer_is_refused(path: str, host: Host):
    client, url = at_its_address(host)
    with pytest.raises(MediaRefusedError, match=ANSWERS[path]) as error:
        await get(client, url + path.format(port=host.port))
    assert not {"10.0.0.1", "metadata", "passwd"} & set(error.value.message.replace("/", " ").replace(":", " ").split())
    assert all(asked[0].startswith(path.partition("?")[0]) for asked in host.asked)


async def test_a_redirect_at_the_host_is_followed(host: Host):
    client, url = at_its_address(host)
    assert await get(client, f"{url}/to?at=/to%3Fat%3D/image.png") == PNG


@pytest.mark.parametrize("path", ["/slow", "/drip"])
async def test_what_takes_too_long_is_given_up(path: str, host: Host):
    client, url = at_its_address(host, limit_s=0.3)
    with pytest.raises(MediaRefusedError, match=r"longer than 0\.3 s"):
        await get(client, url + path)


async def test_nobody_answers():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        client = fetcher(f"127.0.0.1:{port},gone.example")
        with pytest.raises(MediaRefusedError, match="does not answer"):
            await get(client, f"http://127.0.0.1:{port}/")
        with pytest.raises(MediaRefusedError, match="does not answer"):
            await get(client, f"https://127.0.0.1:{port}/")
    with pytest.raises(MediaRefusedError, match="not known"):
        await get(client, "http://gone.example/")


async def test_a_server_without_tls_is_no_https_server(host: Host):
    client, url = at_its_address(host)
    with pytest.raises(MediaRefusedError):
        await get(client, url.replace("http:", "https:") + "/image.png")


async def test_a_slow_host_leaves_places_for_others(host: Host):
    client, url = at_its_address(host)
    slow = [asyncio.create_task(get(client, f"{url}/slow")) for _ in range(fetch.AT_A_TIME_OF_HOST + 5)]
    await host.is_full.wait()
    slow[-1].cancel()
    await asyncio.wait(slow[-1:])
    assert client._places.num_taken == fetch.AT_A_TIME_OF_HOST
    host.let_go.set()
    done = await asyncio.gather(*slow, return_exceptions=True)
    assert done[:-1] == [PNG] * (len(slow) - 1)
    assert host.most_running == fetch.AT_A_TIME_OF_HOST
    assert client._places.num_taken == 0


async def test_who_finds_no_place_is_told_to_come_again(host: Host):
    client, url = at_its_address(host, limit_s=0.4)
    for _ in range(fetch.AT_A_TIME_OF_HOST):
        await client._places.take(host="127.0.0.1")
    with pytest.raises(CapacityError):
        await get(client, f"{url}/image.png")


@pytest.mark.parametrize(
    ("text", "names", "addresses"),
    [
        ("", set(), set()),
        (
            "a.example, B.Example:8443,*.c.example",
            {("a.example", None), ("b.example", 8443), ("*.c.example", None)},
            set(),
        ),
        ("127.0.0.1:80,[::1]:8080", set(), {("127.0.0.1", 80), ("::1", 8080)}),
    ],
)
def test_hosts_are_read(text: str, names: set, addresses: set):
    assert parse_media_domains(text) == MediaDomains(frozenset(names), frozenset(addresses))
    assert ServerArgs(allowed_media_domains=text).allowed_media_domains == text


@pytest.mark.parametrize(
    "text",
    ["*", "http://a.example", "a.example/x", "127.0.0.1", "[::1]", "a..b", "*.10.0.0.1:80", "127.1", "a b", "0x7f.1"],
)
def test_hosts_that_are_none_are_refused(text: str):
    with pytest.raises(ConfigError, match="allowed-media-domains"):
        ServerArgs(allowed_media_domains=text)


def test_hosts_below_a_name():
    domains = parse_media_domains("*.b.example,a.example:8000")
    assert domains.allows_name("x.b.example", 443, 443)
    assert domains.allows_name("x.y.b.example", 80, 80)
    assert domains.allows_name("a.example", 8000, 80)
    for name, port in (
        ("b.example", 443),
        ("xb.example", 443),
        ("x.b.example", 8000),
        ("a.example", 80),
        ("x.a.example", 8000),
    ):
        assert not domains.allows_name(name, port, 443 if port == 443 else 80)


def test_the_folder_is_one(tmp_path):
    assert parse_media_folder(None) is None
    (tmp_path / "link").symlink_to(tmp_path)
    assert media_args(ServerArgs(allowed_local_media_path=str(tmp_path / "link"))).folder == tmp_path
    with pytest.raises(ConfigError, match="not a folder"):
        parse_media_folder(str(tmp_path / "none"))
