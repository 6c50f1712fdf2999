"""The web pages' files: what is served, to whom, with which headers."""

import gzip
import hashlib
import json
import re

import httpx
import pytest
from fake_frontend import running_server

from headrace.server.ui.pages import STATIC, read_files

MAX_BYTES = 150_000
VENDOR = STATIC / "vendor"


def test_each_file_is_served_with_its_type_and_a_strict_policy(client: httpx.Client):
    for name, file in read_files().items():
        reply = client.get(f"/ui/{name}")
        assert (reply.status_code, reply.content) == (200, file.body)
        assert reply.headers["content-type"].encode() == file.content_type
        rules = dict(rule.strip().split(" ", 1) for rule in reply.headers["content-security-policy"].split(";"))
        assert rules.pop("default-src") == "'self'"
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert rules.pop("trusted-types") == "dompurify"
        assert rules.pop("img-src") == "'self' data:", "and the images that the user sends"
        assert rules.pop("media-src") == "data:", "the sounds that the user sends"
        assert set(rules.values()) == {"'self'", "'none'"}, "no other host, nothing inline"
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_the_browser_has_is_not_sent_again(client: httpx.Client):
    first = client.get("/ui/main.js")
    again = client.get("/ui/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/ui/main.js", headers={"if-none-match": 'W/"other"'}).status_code == 200
    assert client.get("/ui/app.css").headers["etag"] != first.headers["etag"]


def test_files_are_compressed_for_those_who_can_read_it(client: httpx.Client):
    with client.stream("GET", "/ui/app.css", headers={"accept-encoding": "gzip, br"}) as reply:
        raw = b"".join(reply.iter_raw())
        assert reply.headers["content-encoding"] == "gzip"
    plain = client.get("/ui/app.css", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(raw) == plain.content
    assert plain.headers["vary"] == "accept-encoding"


@pytest.mark.parametrize(
    "path", ["/ui/nothing.js", "/ui/../app.py", "/ui/%2e%2e/pages.py", "/ui//index.html", "/ui/vendor"]
)
def test_nothing_else_is_served(client: httpx.Client, path: str):
    reply = client.get(path)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "route_not_found"


def test_browsers_are_sent_to_the_page(client: httpx.Client):
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path in ("/", "/ui"):
        reply = client.get(path, headers=browser)
        assert (reply.status_code, reply.headers["location"]) == (307, "ui/")
    assert client.get("/", headers=browser, follow_redirects=True).text.startswith("<!doctype html>")
    assert client.head("/ui/").status_code == 200


def test_the_files_are_public_and_the_data_is_not():
    with running_server(api_key="k") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/ui/").status_code == 200
        assert client.get("/model_info").status_code == 401


def test_they_can_be_switched_off():
    with running_server(disable_ui=True) as server, httpx.Client(base_url=server.url) as client:
        for path in ("/ui", "/ui/", "/ui/main.js", "/docs"):
            assert client.get(path).status_code == 404
        assert client.get("/", headers={"accept": "text/html"}).status_code == 200


def loaded_with(*names: str) -> set[str]:
    """Files that are loaded with these: what HTML names, what modules import at once, and so on."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        text = (STATIC / name).read_text()
        if name.endswith(".html"):
            waiting += re.findall(r'<(?:link|script)[^>]* (?:href|src)="([^"]+)"', text)
        elif name.endswith(".js") and not name.startswith("vendor/"):
            waiting += re.findall(r"^import (?:[^;]* from )?'\./([^']+)';", text, re.MULTILINE)
    return found


def test_the_chat_loads_little_and_the_other_pages_only_what_is_theirs():
    files = read_files()
    chat = loaded_with("index.html")
    assert {"main.js", "app.css", "icon.svg", "store.js", "vendor/marked.esm.js", "vendor/purify.min.js"} <= chat
    assert sum(len(files[name].body) for name in chat) < MAX_BYTES
    assert sum(len(files[name].compressed) for name in chat) < MAX_BYTES / 2.5, "what is sent"
    dashboard = loaded_with("dashboard.js", "dashboard.css") - chat
    api = loaded_with("explorer.js", "explorer.css") - chat
    assert dashboard == {"dashboard.js", "dashboard.css", "metrics.js", "plots.js"}
    assert api == {"explorer.js", "explorer.css", "operation.js", "schema.js"}
    rest = {name for name in files if not name.endswith((".LICENSE", "SOURCES.json"))} - chat - dashboard - api
    media = {"waiting.js", "media.js", "media.css"}
    assert rest == {"export.js", "tokens.js", *media}, (
        "loaded for an export, for probabilities, and once the model is known"
    )


def test_the_pages_name_no_other_host():
    """Links for people aside, which only the libraries' comments and the licences hold."""
    for path in STATIC.iterdir():
        if path.is_file():
            hosts = re.findall(r"https?://[\w.]+", path.read_text())
            assert set(hosts) <= {"http://www.w3.org"}, "the name of the SVG namespace"


def test_vendored_files_are_those_of_the_list():
    listed = json.loads((VENDOR / "SOURCES.json").read_text())
    assert {entry["file"] for entry in listed} | {"SOURCES.json"} == {path.name for path in VENDOR.iterdir()}
    for entry in listed:
        assert hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"], entry["file"]
        assert entry["version"] in entry["package"]
        assert (VENDOR / f"{entry['file'].split('.')[0]}.LICENSE").is_file(), "with its licence"
