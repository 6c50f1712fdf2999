"""The web pages in Debian's chromium, before a server whose engine is played. Nothing is timed: every step waits for what it expects."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_frontend import Running, Script, running_server
from fake_pooling import EMBEDDING, pooling_server
from web_page import check_accessible

from headrace.messages.control import InternalState, PoolState
from headrace.messages.outputs import FinishReason, SampleEvent, SampleStats
from headrace.metrics.timeline import Timeline

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
expect = sync_api.expect
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture
def chat(page: Any, server: Running) -> Any:
    """The chat page, which knows its model."""
    return opened(page, server.url)


def opened(page: Any, url: str, path: str = "/ui/") -> Any:
    page.goto(url + path)
    expect(page.locator("#model-about")).to_contain_text("org/tiny")
    return page


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def replies(page: Any) -> Any:
    return page.locator("article.assistant")


def finished(page: Any) -> Any:
    """The last reply, once it is complete."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(replies(page).last).to_have_attribute("aria-busy", "false")
    return replies(page).last


def unfold(page: Any, title: str) -> None:
    page.locator("summary", has_text=re.compile(f"^{title}$")).click()


def prompt(server: Running) -> str:
    """What the model was given last."""
    ids = server.frontend.calls[-1].input_ids
    return server.frontend.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_reply_is_streamed_and_can_be_stopped(chat: Any, server: Running):
    server.frontend.script.hold_at = 5
    ask(chat, "Greet me")
    expect(replies(chat).last).to_contain_text("Hello")
    expect(replies(chat).last).to_have_attribute("aria-busy", "true")
    chat.keyboard.press("Escape")
    expect(finished(chat)).to_contain_text("stopped")
    assert server.frontend.closed_early.wait(20), "the server is told"
    expect(chat.get_by_role("status").first).to_contain_text("Stopped. Hello")
    server.frontend.script = Script(text=", you")
    chat.get_by_role("button", name="Continue").click()
    expect(replies(chat)).to_contain_text("Hello, you")
    finished(chat)
    assert prompt(server) == "<|user|>Greet me\n<|assistant|>Hello"
    expect(chat.get_by_label("Message", exact=True)).to_be_focused()


def test_it_shows_how_much_of_the_prompt_is_read(chat: Any, server: Running):
    server.frontend.script = Script(progress=((6615, 0), (6615, 3308)), hold_at=0)
    ask(chat, "Write a short poem")
    expect(replies(chat).last).to_contain_text("Reading the prompt: 3308 of 6615 tokens")
    server.frontend.release()
    reply = finished(chat)
    expect(reply).to_contain_text("Hello")
    expect(reply).not_to_contain_text("Reading")


def test_a_deleted_conversation_stays_deleted(chat: Any, server: Running):
    server.frontend.script.hold_at = 5
    ask(chat, "Doomed")
    expect(replies(chat).last).to_contain_text("Hello")
    chat.on("dialog", lambda dialog: dialog.accept())
    chat.get_by_role("button", name="Delete Doomed").click()
    expect(chat.locator("article")).to_have_count(0)
    assert server.frontend.closed_early.wait(20), "the server is told"
    expect(chat.get_by_role("status").first).to_contain_text("Stopped")
    assert chat.evaluate("Object.keys(localStorage).filter((name) => /chat|meta/.test(name))") == []


def test_a_conversation_goes_on_and_survives_a_reload(chat: Any, server: Running):
    server.frontend.script.text = "**Bold** is `code`"
    ask(chat, "One")
    reply = finished(chat)
    assert reply.locator("strong").inner_text() == "Bold"
    assert re.search(r"\d+ tokens in \(2 cached\) · 18 out", reply.locator(".stats").inner_text())
    ask(chat, "Two")
    finished(chat)
    assert prompt(server) == "<|user|>One\n<|assistant|>**Bold** is `code`\n<|user|>Two\n<|assistant|>"
    chat.reload()
    expect(chat.locator("article")).to_have_count(4)
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("article")).to_have_count(0)
    chat.get_by_role("link", name="One").click()
    expect(chat.locator("article")).to_have_count(4)
    chat.on("dialog", lambda dialog: dialog.accept())
    chat.get_by_role("button", name="Delete One").click()
    expect(chat.locator("article")).to_have_count(0)
    assert chat.evaluate("Object.keys(localStorage).filter((name) => /chat|meta/.test(name))") == []


def test_regenerated_and_edited_messages_are_branches(chat: Any, server: Running):
    server.frontend.script.text = "first"
    ask(chat, "Say one")
    finished(chat)
    server.frontend.script.text = "second"
    chat.get_by_role("button", name="Regenerate").click()
    expect(finished(chat)).to_contain_text("second")
    expect(chat.locator(".branches")).to_contain_text("2/2")
    chat.get_by_role("button", name="Previous version").click()
    expect(replies(chat)).to_contain_text("first")
    expect(chat.get_by_role("button", name="Next version")).to_be_focused()

    server.frontend.script.text = "third"
    chat.locator("article.user").get_by_role("button", name="Edit").click()
    chat.get_by_label("Edit your message").fill("Say two")
    chat.get_by_label("Edit your message").press("Control+Enter")
    expect(finished(chat)).to_contain_text("third")
    assert prompt(server) == "<|user|>Say two\n<|assistant|>"
    expect(chat.locator("article.user .branches")).to_contain_text("2/2")
    chat.locator("article.user").get_by_role("button", name="Previous version").click()
    expect(replies(chat)).to_contain_text("first")


def test_the_settings_are_what_the_server_gets(chat: Any, server: Running):
    chat.get_by_label("System prompt").fill("Be brief")
    unfold(chat, "Sampling")
    expect(chat.get_by_label("Temperature")).to_have_attribute("placeholder", "0.25")
    chat.get_by_label("Temperature").fill("0.5")
    chat.get_by_label("Top k").fill("7")
    chat.get_by_label("Most tokens").fill("4")
    chat.get_by_label("Stop texts, one per line").fill("END\nFIN")
    unfold(chat, "JSON schema")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    box = chat.get_by_label("JSON schema of the reply")
    box.fill("{")
    expect(chat.locator("#schema-problem")).to_contain_text("not valid JSON")
    ask(chat, "Hi")
    expect(finished(chat).get_by_role("alert")).to_contain_text("The JSON schema is not valid JSON")
    assert server.frontend.calls == []
    box.fill(json.dumps(schema))
    chat.get_by_role("button", name="Try again").click()
    expect(chat.locator(".stats").last).to_contain_text("the limit of tokens is reached")
    params = server.frontend.calls[-1].sampling_params
    assert (params.temperature, params.top_k, params.max_new_tokens, params.stop) == (0.5, 7, 4, ["END", "FIN"])
    assert json.loads(params.structural_tag)["format"]["elements"][-1]["json_schema"] == schema
    assert prompt(server).startswith("<|system|>Be brief\n")
    chat.reload()
    expect(chat.get_by_label("System prompt")).to_have_value("Be brief")


def test_a_refusal_is_shown_where_the_reply_would_be(chat: Any, server: Running):
    unfold(chat, "Sampling")
    chat.get_by_label("Temperature").fill("-1")
    ask(chat, "Hi")
    expect(finished(chat).get_by_role("alert")).to_contain_text("temperature")
    assert [error for error in chat.errors if "400" in error] == chat.errors != []
    chat.errors.clear()


def test_a_call_is_shown_and_answered(page: Any):
    with running_server(fake_context_length=4096) as server:
        opened(page, server.url)
        unfold(page, "Tools")
        page.get_by_label("Tools, a JSON list").fill(json.dumps([TOOL]))
        call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        server.frontend.script.text = f"<think>Hm.</think>{call}"
        ask(page, "Weather?")
        folds = finished(page).locator("details")
        expect(folds).to_have_count(2)
        assert folds.evaluate_all("all => all.map((one) => one.open)") == [False, False]
        assert "Hm." in folds.first.text_content()
        assert '"city": "Paris"' in folds.last.text_content()
        page.get_by_label("The model calls them").select_option("required")
        server.frontend.script.text = "It rains."
        page.get_by_label("Result of get_weather").fill("rain")
        page.get_by_role("button", name="Send result").click()
        expect(finished(page)).to_contain_text("It rains.")
        assert "rain" in prompt(server)
        expect(page.get_by_role("article", name="Result of get_weather")).to_contain_text("rain")
        assert server.frontend.calls[-1].sampling_params.structural_tag is None, "after a result it may answer"


def test_probabilities_are_shown_for_each_token(chat: Any, server: Running):
    unfold(chat, "Sampling")
    chat.get_by_label("Token probabilities").check()
    server.frontend.script.text = "Hey"
    ask(chat, "Hi")
    reply = finished(chat)
    expect(reply.locator(".token")).to_have_text(["H", "e", "y"])
    reply.locator(".token").first.hover()
    expect(reply.locator(".tip")).to_contain_text("60.7 %")
    reply.get_by_role("listbox").press("End")
    expect(reply.get_by_role("option", selected=True)).to_have_text("y")
    reply.get_by_role("button", name="Probabilities").click()
    expect(reply.locator(".markdown")).to_have_text("Hey")


def test_what_a_model_writes_cannot_act(chat: Any, server: Running):
    server.frontend.script.text = (
        '<img src="http://127.0.0.1:9/a" onerror="alert(1)"> ![b](http://127.0.0.1:9/b) [c](javascript:alert(2)) '
        '[d](https://example.org "t") <a href="javascript:alert(3)" style="position:fixed">e</a>\n\n<script>alert(4)</script>'
    )
    ask(chat, "Attack")
    body = finished(chat).locator(".markdown")
    assert body.locator("img, script, [style], [onerror]").count() == 0
    links = body.locator("a").evaluate_all("all => all.map((one) => [one.getAttribute('href'), one.rel])")
    assert [link for link in links if link[0]] == [
        ["http://127.0.0.1:9/b", "noopener noreferrer"],
        ["https://example.org", "noopener noreferrer"],
    ]
    expect(body).to_contain_text("<script>alert(4)</script>")


def test_formulas_are_shown_as_they_are_written(chat: Any, server: Running):
    formulas = [r"\(x^2\)", r"\[a*b*c\]", r"$\{1, 2\}$", r"\(unfinished"]
    lines = "\\[\n\\begin{aligned}\na &= b \\\\\n- c &< d\n\\end{aligned}\n\\]"
    server.frontend.script.text = f"**Bold** {' and '.join(formulas)} for $5 or **$6**\n{lines}\nend\\*"
    ask(chat, "Formulas")
    body = finished(chat).locator(".markdown")
    text = body.inner_text()
    assert [formula for formula in [*formulas, lines] if formula not in text] == []
    assert body.locator("strong").all_inner_texts() == ["Bold", "$6"]
    assert body.locator("em, li").count() == 0
    assert text.endswith("end*")


def test_words_in_tables_stay_whole(chat: Any, server: Running):
    chat.set_viewport_size({"width": 360, "height": 640})
    columns = ["Configuration", "Authentication", "Observability", "identifier_of_it"]
    rows = "".join("| " + " | ".join(cells) + " |\n" for cells in (columns, ["---"] * 4, ["some words " * 9] * 4))
    server.frontend.script.text = rows
    ask(chat, "Table")
    cells = finished(chat).locator("th")
    lines = "all => all.map((one) => { const range = document.createRange(); range.selectNodeContents(one); return range.getClientRects().length; })"
    assert max(cells.evaluate_all(lines)) == 1
    assert chat.evaluate("document.scrollingElement.scrollWidth") == 360


def test_what_is_copied_is_told(chat: Any, server: Running):
    server.frontend.script.text = "```\ncode\n```"
    ask(chat, "Hi")
    chat.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {})"
    )  # as where the address is neither https nor localhost
    finished(chat).get_by_role("button", name="Copy").first.click()
    expect(chat.locator(".toast")).to_have_text("Copied")
    expect(chat.locator(".toast")).to_be_visible()


def test_the_key_is_asked_for_and_kept_in_the_tab_only(page: Any):
    with running_server(api_key="sesame") as server:
        page.goto(f"{server.url}/ui/")
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("The server needs a key.")
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not accept this key")
        page.get_by_label("Key", exact=True).fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model-about")).to_contain_text("org/tiny")
        ask(page, "Hi")
        expect(finished(page)).to_contain_text("Hello")
        page.reload()
        expect(page.locator("#model-about")).to_contain_text("org/tiny")
        expect(dialog).to_be_hidden()
        assert page.evaluate("JSON.stringify({...localStorage})").count("sesame") == 0
        assert page.evaluate("Object.values(sessionStorage)") == ["sesame"]
    assert page.errors != []
    assert all("401" in error for error in page.errors)
    page.errors.clear()


def test_a_server_that_was_restarted_is_found_again(page: Any):
    with running_server() as first:
        port = httpx.URL(first.url).port
        assert port is not None
        opened(page, first.url)
        first.frontend.script.hold_at = 5
        ask(page, "Hi")
        expect(replies(page).last).to_contain_text("Hello")
    expect(finished(page).get_by_role("alert")).to_contain_text("The connection was lost")
    expect(page.locator("#offline")).to_be_visible()
    with running_server(port=port):
        expect(page.locator("#offline")).to_be_hidden()
        page.get_by_role("button", name="Try again").click()
        expect(finished(page)).to_contain_text("wörld")
        expect(page.locator("article")).to_have_count(2)
    assert all("net::ERR" in error or "503" in error for error in page.errors)
    page.errors.clear()


def test_conversations_can_be_exported_and_imported(chat: Any, server: Running, tmp_path: Path):
    server.frontend.script.text = "An answer"
    ask(chat, "A question")
    finished(chat)
    with chat.expect_download() as saved:
        chat.get_by_role("button", name="Export Markdown").click()
    assert saved.value.suggested_filename == "A-question.md"
    assert Path(saved.value.path()).read_text() == "# A question\n\n## You\n\nA question\n\n## Assistant\n\nAn answer\n"
    with chat.expect_download() as saved:
        chat.get_by_role("button", name="Export JSON").click()
    file = tmp_path / "saved.json"
    saved.value.save_as(file)
    chat.get_by_label("Import").set_input_files(file)
    expect(chat.locator("#conversations li")).to_have_count(2)
    expect(chat.locator("article")).to_have_count(2)
    broken = json.loads(file.read_text())
    broken["roots"] = []
    file.write_text(json.dumps(broken))
    chat.get_by_label("Import").set_input_files(file)
    expect(chat.locator(".toast")).to_contain_text("not a conversation")


def test_a_conversation_that_cannot_be_read_hides_no_other(chat: Any, server: Running, tmp_path: Path):
    ask(chat, "Sound")
    finished(chat)
    text = chat.evaluate("Object.entries(localStorage).find(([name]) => name.startsWith('headrace.chat.'))[1]")
    file = tmp_path / "saved.json"

    def load(change: dict[str, Any]) -> None:
        saved = json.loads(text)
        for name, value in change.items():
            for holder in saved["nodes"].values() if name not in saved else [saved]:
                holder[name] = value
        file.write_text(json.dumps(saved))
        chat.get_by_label("Import").set_input_files(file)

    absent = dict.fromkeys(["stats", "media", "tool_calls", "tokens", "reasoning", "finish", "error", "images"])
    load(absent)
    expect(chat.locator("#conversations li")).to_have_count(2)
    expect(chat.locator("article")).to_have_count(2)
    chat.reload()
    expect(chat.locator("#conversations li")).to_have_count(2)
    expect(replies(chat)).to_contain_text("Hello")

    bad: list[dict[str, Any]] = [{"stats": "fast"}, {"tool_calls": [{}]}, {"tokens": [["a", "b"]]}, {"media": [None]}]
    bad += [{"settings": None}, {"nodes": None}, {"title": 7}, {"chosen": None}]
    for number, change in enumerate(bad, 1):
        load(change)
        expect(chat.locator(".toast", has_text="not a conversation")).to_have_count(number)

    spoil = "([name, value]) => { localStorage.setItem('headrace.chat.bad', value); localStorage.setItem('headrace.meta.bad', name); }"
    chat.evaluate(spoil, [json.dumps({"title": "Bad", "updated": 1}), file.read_text()])
    chat.goto(f"{server.url}/ui/#chat/bad")
    expect(chat.locator(".toast", has_text="This conversation cannot be read.")).to_have_count(1)
    expect(chat.locator("#conversations li")).to_have_count(3)
    chat.evaluate("window.confirm = () => true")
    chat.get_by_role("button", name="Delete Bad").click()
    expect(chat.locator("#conversations li")).to_have_count(2)
    chat.get_by_role("link", name="Sound").first.click()
    expect(chat.locator("article")).to_have_count(2)


def test_it_fits_a_telephone(chat: Any, server: Running):
    chat.set_viewport_size({"width": 360, "height": 640})
    server.frontend.script.text = (
        "# T\n\n| a | b |\n|---|---|\n| " + "x" * 60 + " | y |\n\n```\n" + "z" * 90 + "\n```\n" + "w" * 80
    )
    ask(chat, "u" * 80)
    finished(chat)
    assert chat.evaluate("document.scrollingElement.scrollWidth") == 360
    button = chat.get_by_role("button", name="Settings")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    expect(chat.locator("#model")).to_be_focused()
    chat.keyboard.press("Escape")
    expect(chat.locator("#model")).to_be_hidden()
    expect(button).to_be_focused()


def told(rid: str, created_unix_s: float, is_finished: bool = True) -> dict[str, Any]:
    """A timeline as the server tells it."""
    line = Timeline(rid, rid, "", 100.0, created_unix_s, sent_s=100.1, first_token_s=100.5, num_prompt_tokens=30)
    line.runs = True
    if is_finished:
        line.finished_s, line.num_output_tokens, line.finish = 101.5, 12, FinishReason("stop")
        line.stats = SampleStats(30, 16, 0, 0.1, (SampleEvent("admitted", 100.2, 16), SampleEvent("chunk", 100.2, 14)))
    return line.describe()


def tile(page: Any, title: str) -> Any:
    return page.locator("figure", has=page.locator("figcaption", has_text=title)).locator(".value")


def set_running(server: Running, num_running: int) -> None:
    """What the engine tells its metrics after a step."""
    pool = PoolState(1024, 512, 256, 256, 64, 64, True)
    server.frontend.metrics.set_scheduler_state(
        InternalState(pool, num_running, 2, 0, 3, 0, 0, 4, 50, 60, 10, 40, 20, 0, 0, 12.5, 0.5, 7)
    )


def test_the_dashboard_moves(page: Any, server: Running):
    set_running(server, 3)
    server.frontend.samples = [told("one", 1_790_000_000)]
    page.goto(f"{server.url}/ui/#dashboard")
    expect(tile(page, "Running")).to_have_text("3")
    expect(tile(page, "Between tokens")).to_have_text("– / –")
    expect(page.locator("#requests tr")).to_have_count(1)
    page.get_by_role("link", name="one").focus()
    set_running(server, 5)
    server.frontend.metrics.inter_token_latency_s.add(0.04, 100)
    server.frontend.samples.insert(0, told("two", 1_790_000_001, is_finished=False))
    expect(tile(page, "Running")).to_have_text("5")
    expect(tile(page, "Between tokens")).to_have_text("40 ms / 49 ms")
    expect(page.locator("#requests tr").first).to_contain_text("running")
    expect(page.get_by_role("link", name="one")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Request one")).to_be_focused()
    expect(page.locator("#request-body")).to_contain_text("output 1 s")
    expect(page.locator("#request-body tbody tr")).to_have_count(6)
    page.get_by_role("button", name="Pause").click()
    page.goto(f"{server.url}/ui/#dashboard/nothing")
    expect(page.locator("#request-body")).to_contain_text("no such request")
    assert all("404" in error for error in page.errors)
    page.errors.clear()


def test_a_running_request_shows_what_is_known_of_it(page: Any, server: Running):
    server.frontend.samples = [told("live", 1_790_000_001, is_finished=False)]
    page.goto(f"{server.url}/ui/#dashboard/live")
    expect(page.locator("#request-body tbody tr")).to_have_count(3)
    expect(page.locator("#request-body .legend")).to_contain_text("output")


def test_the_dashboard_shows_what_the_key_may_see(page: Any):
    with running_server(api_key="user", admin_api_key="admin") as server:
        page.goto(f"{server.url}/ui/#dashboard")
        expect(tile(page, "Running")).not_to_have_text("")
        expect(page.locator("#replicas-box, #requests-box, #state-box").and_(page.locator(":visible"))).to_have_count(0)
        for key, visible in (
            ("user", ["requests-box", "replicas-box"]),
            ("admin", ["requests-box", "replicas-box", "state-box"]),
        ):
            page.get_by_role("button", name="Enter a key").click()
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
            for name in visible:
                expect(page.locator(f"#{name}")).to_be_visible()
        expect(page.locator("#needs-key")).to_be_hidden()
        page.get_by_role("button", name="Look").click()
        expect(page.locator("#tree")).to_contain_text("40 tokens · in use by 1 · 2 branches")
        expect(page.locator("#tree li")).to_have_count(3)
    assert all("401" in error or "net::ERR" in error or "503" in error for error in page.errors)
    page.errors.clear()


def test_the_dashboard_does_without_metrics(page: Any):
    with running_server(disable_metrics=True) as server:
        page.goto(f"{server.url}/ui/#dashboard")
        expect(tile(page, "Running")).to_have_text("1")
        expect(tile(page, "Output tokens/s")).to_have_text("12.5")
        page.close()
    assert all("404" in error for error in page.errors)
    page.errors.clear()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(chat: Any, server: Running, theme: str):
    chat.emulate_media(color_scheme=theme)
    unfold(chat, "Sampling")
    unfold(chat, "JSON schema")
    unfold(chat, "Tools")
    chat.get_by_label("Token probabilities").check()
    server.frontend.script.text = (
        "<think>Hm.</think># Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```\ncode\n```\n[link](https://example.org)"
    )
    ask(chat, "Hi")
    expect(finished(chat).locator(".token").first).to_be_visible()
    check_accessible(chat)
    chat.get_by_role("button", name="Probabilities").click()
    chat.locator("article.user").get_by_role("button", name="Edit").click()
    check_accessible(chat)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_dashboard(page: Any, server: Running, theme: str):
    page.emulate_media(color_scheme=theme)
    set_running(server, 3)
    server.frontend.samples = [told("one", 1_790_000_000), told("two", 1_790_000_000, is_finished=False)]
    page.goto(f"{server.url}/ui/#dashboard/one")
    expect(page.locator("#request-body tbody tr")).to_have_count(6)
    expect(page.locator("#requests tr")).to_have_count(2)
    page.get_by_role("button", name="Look").click()
    expect(page.locator("#tree li")).to_have_count(3)
    check_accessible(page)
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360


def test_a_model_that_does_not_write_offers_no_chat(page: Any):
    with pooling_server(EMBEDDING) as server:
        opened(page, server.url)
        expect(page.get_by_text("This is an embedding model")).to_be_visible()
        expect(page.locator("#composer")).to_be_hidden()
        expect(page.get_by_text("Ask something")).to_be_hidden()
        check_accessible(page)
