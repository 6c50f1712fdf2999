"""The page that shows the routes and tries them, in Debian's chromium. Nothing is timed: every step waits for what it expects."""

import json
import re
import shlex
from typing import Any

import pytest
from fake_frontend import MODEL, Running, running_server
from web_page import check_accessible

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
expect = sync_api.expect
CHAT = "post_v1_chat_completions"


def opened(page: Any, url: str, operation: str) -> Any:
    """The form of an operation."""
    page.goto(f"{url}/ui/#api/{operation}")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return page


def body(page: Any) -> Any:
    return page.get_by_label("Body", exact=True)


def reply(page: Any) -> Any:
    return page.get_by_role("region", name="Reply")


def send(page: Any) -> Any:
    page.get_by_role("button", name="Send").click()
    expect(reply(page)).to_contain_text("complete after")
    return reply(page)


def key(page: Any, value: str) -> None:
    page.get_by_label("Key", exact=True).fill(value)
    page.keyboard.press("Enter")


def test_docs_leads_to_the_routes_and_a_reply_is_streamed(page: Any, server: Running):
    page.goto(f"{server.url}/docs")
    expect(page.get_by_role("link", name="API", exact=True)).to_have_attribute("aria-current", "page")
    page.get_by_label("Filter").fill("post chat")
    links = page.get_by_role("navigation", name="Routes").get_by_role("link")
    expect(links.locator("visible=true")).to_have_text(
        ["POST/v1/chat/completions", "POST/chat/completions", "POST/api/chat"]
    )
    links.filter(has_text="/v1/chat/completions").click()
    expect(page.get_by_role("heading", name="POST /v1/chat/completions")).to_be_focused()

    page.get_by_label("Example").select_option("Streamed")
    server.frontend.script.hold_at = 5
    page.get_by_role("button", name="Send").click()
    expect(reply(page)).to_contain_text('"content":"o"')
    expect(reply(page)).to_contain_text("200 OK")
    expect(reply(page)).not_to_contain_text("[DONE]")
    page.get_by_role("button", name="Stop").click()
    expect(reply(page)).to_contain_text("Stopped.")
    assert server.frontend.closed_early.wait(20), "the server is told"

    server.frontend.script.hold_at = None
    body(page).press("Control+Enter")
    expect(reply(page)).to_contain_text("data: [DONE]")
    expect(reply(page)).to_contain_text("complete after")
    page.get_by_text("Headers").click()
    expect(reply(page)).to_contain_text("content-type: text/event-stream")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_what_was_typed_and_answered_stays(page: Any, server: Running):
    opened(page, server.url, CHAT)
    box = body(page)
    assert json.loads(box.input_value())["model"] == MODEL
    box.fill("{")
    expect(page.locator(f"#{CHAT}-problem")).to_contain_text("not valid JSON")
    typed = '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "seed": 9007199254740993}'
    box.fill(typed)
    expect(page.locator(f"#{CHAT}-problem")).to_be_hidden()
    expect(send(page)).to_contain_text('"content": "He"')
    (call,) = server.frontend.calls
    assert call.sampling_params.seed == 9007199254740993, "the text is sent as it was typed"
    page.goto(f"{server.url}/ui/#api/post_generate")
    expect(body(page)).to_have_value(re.compile("sampling_params"))
    page.go_back()
    expect(body(page)).to_have_value(typed)
    expect(reply(page)).to_contain_text('"content": "He"')
    box.fill('{"messages": 5}')
    expect(send(page)).to_contain_text("400 Bad Request")
    expect(reply(page)).to_contain_text("messages")
    assert len(page.errors) == 1
    assert "400" in page.errors.pop()


def test_parameters_are_part_of_the_address(page: Any, server: Running):
    opened(page, server.url, "get_v1_models__id_")
    page.get_by_role("button", name="Send").click()
    assert page.get_by_label("id", exact=True).evaluate("one => one.validity.valueMissing"), (
        "nothing is sent without it"
    )
    page.get_by_label("id", exact=True).fill(MODEL)
    expect(send(page)).to_contain_text(f'"id": "{MODEL}"')
    server.frontend.samples = [{"rid": "one"}, {"rid": "two"}]
    opened(page, server.url, "get_v1_requests")
    page.get_by_label("limit").fill("1")
    expect(send(page)).to_contain_text('"rid": "one"')
    expect(reply(page)).not_to_contain_text("two")


def test_a_request_can_be_copied_as_a_command(page: Any, server: Running):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page, server.url, "post_tokenize")
    body(page).fill('{"prompt": "it\'s"}')
    page.get_by_role("button", name="Copy as curl").click()
    expect(page.locator(".toast")).to_have_text("Copied")
    command = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    expected = ["curl", f"{server.url}/tokenize", "-H", "Content-Type: application/json", "-d", '{"prompt": "it\'s"}']
    assert command == expected


def test_the_key_is_asked_for_and_another_one_where_it_does_not_do(page: Any):
    with running_server(api_key="user", admin_api_key="admin") as server:
        page.goto(f"{server.url}/docs")
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("The server needs a key.")
        key(page, "user")
        opened(page, server.url, "get_internal_state")
        expect(page.locator("#operation")).to_contain_text("Needs the admin key")
        page.get_by_role("button", name="Send").click()
        expect(dialog).to_contain_text("does not accept this key")
        page.get_by_role("button", name="Cancel").click()
        expect(reply(page)).to_contain_text("401 Unauthorized")
        page.get_by_role("button", name="Send").click()
        key(page, "admin")
        expect(reply(page)).to_contain_text("200 OK")
        assert page.evaluate("Object.values(sessionStorage)") == ["admin"]
        assert page.evaluate("JSON.stringify({...localStorage})").count("admin") == 0
    assert all("401" in error for error in page.errors)
    page.errors.clear()


def test_a_server_that_does_not_describe_itself_says_so(page: Any):
    with running_server(disable_openapi=True) as server:
        page.goto(f"{server.url}/ui/#api")
        expect(page.get_by_role("alert")).to_contain_text("--disable-openapi")
    assert all("404" in error for error in page.errors)
    page.errors.clear()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_it_fits_a_telephone(page: Any, server: Running, theme: str):
    page.emulate_media(color_scheme=theme)
    opened(page, server.url, CHAT)
    page.get_by_text("Fields of the body").click()
    page.locator("summary", has_text="ChatMessage").first.click()
    expect(page.locator("#operation .fields .fields")).to_contain_text("content")
    send(page)
    check_accessible(page)
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
    page.get_by_role("link", name="All routes").click()
    link = page.get_by_role("navigation", name="Routes").get_by_role("link", name="/v1/chat/completions")
    expect(link).to_be_focused()
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
    check_accessible(page)
