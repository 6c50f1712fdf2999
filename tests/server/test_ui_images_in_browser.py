"""Images on the chat page, in Debian's chromium: chosen, pasted, dropped, sent and kept."""

import base64
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from fake_frontend import Running, running_server
from web_page import check_accessible

from headrace.messages.media import ImageRef, Senses

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
expect = sync_api.expect

TRANSFER = """([name, type, text]) => {
  const made = new DataTransfer();
  made.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type }));
  return made;
}"""


def png(side: int = 2) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = side.to_bytes(4, "big")
    rows = zlib.compress((b"\0" + b"\x80" * 3 * side) * side)
    head = chunk(b"IHDR", size + size + b"\x08\x02\0\0\0")
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PNG = png()
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    with running_server(special_tokens=("<image>",), senses=Senses("llava", {"image": "<image>"})) as running:
        yield running


@pytest.fixture
def chat(page: Any, seeing: Running) -> Any:
    seeing.frontend.reset()
    return opened(page, seeing.url)


def opened(page: Any, url: str) -> Any:
    page.goto(f"{url}/ui/")
    expect(page.locator("#model-about")).to_contain_text("org/tiny")
    expect(page.locator("ul.waiting-images")).to_have_count(1)
    return page


def choose(page: Any, *names: str, data: bytes = PNG, kind: str = "image/png") -> None:
    files = [{"name": name, "mimeType": kind, "buffer": data} for name in names]
    page.get_by_label("Image", exact=True).set_input_files(files)


def hand_over(page: Any, event: str, name: str, kind: str = "image/png") -> None:
    """Drop or paste a file on the box."""
    coded = base64.b64encode(PNG).decode()
    transfer = page.evaluate_handle(TRANSFER, [name, kind, coded])
    page.evaluate(
        """([event, transfer]) => {
          const field = event === 'paste' ? 'clipboardData' : 'dataTransfer';
          const Kind = event === 'paste' ? ClipboardEvent : DragEvent;
          const made = new Kind(event, { bubbles: true, cancelable: true, [field]: transfer });
          document.getElementById('input').dispatchEvent(made);
        }""",
        [event, transfer],
    )


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(page.locator("article.assistant").last).to_have_attribute("aria-busy", "false")


def asked(server: Running) -> tuple[str, list[ImageRef] | None]:
    call = server.frontend.calls[-1]
    return server.frontend.tokenizer.decode(call.input_ids, skip_special_tokens=False), call.image_data


def waiting(page: Any) -> Any:
    return page.get_by_role("list", name="Images of the next message").get_by_role("img")


def test_images_are_chosen_pasted_and_dropped_and_go_with_one_message(chat: Any, seeing: Running):
    choose(chat, "chosen.png")
    expect(waiting(chat)).to_have_count(1)
    hand_over(chat, "paste", "pasted.png")
    expect(waiting(chat)).to_have_count(2)
    hand_over(chat, "drop", "dropped.png")
    expect(waiting(chat)).to_have_count(3)
    expect(chat.get_by_role("status").first).to_contain_text("3 images go with the next message")
    check_accessible(chat)
    send(chat, "what?")

    prompt, images = asked(seeing)
    assert images == [ImageRef(url=URL)] * 3
    assert prompt.count("<image>") == 3
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(3)
    assert chat.locator("article.user img").first.evaluate("(image) => image.naturalWidth") == 2, "it is shown"
    check_accessible(chat)
    send(chat, "and now?")
    assert len(asked(seeing)[1] or []) == 3, "they stay in the conversation, and no other came"


def test_an_image_is_removed_by_the_keyboard(chat: Any, seeing: Running):
    choose(chat, "a.png", "b.png")
    expect(waiting(chat)).to_have_count(2)
    chat.get_by_role("button", name="Remove a.png").focus()
    chat.keyboard.press("Enter")
    expect(chat.get_by_role("button", name="Remove b.png")).to_be_focused()
    chat.keyboard.press("Enter")
    expect(waiting(chat)).to_have_count(0)
    expect(chat.get_by_label("Message", exact=True)).to_be_focused()
    send(chat, "hello")
    assert asked(seeing)[1] is None


def test_an_image_alone_is_a_message_and_survives_a_reload_and_an_edit(chat: Any, seeing: Running):
    choose(chat, "a.png")
    expect(waiting(chat)).to_have_count(1)
    send(chat, "")
    assert asked(seeing) == ("<|user|><image>\n<|assistant|>", [ImageRef(url=URL)])
    chat.reload()
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(1)
    chat.locator("article.user").get_by_role("button", name="Edit").click()
    chat.get_by_label("Edit your message").fill("what?")
    chat.get_by_label("Edit your message").press("Control+Enter")
    expect(chat.locator("article.user .branches")).to_contain_text("2/2")
    expect(chat.locator("article.assistant").last).to_have_attribute("aria-busy", "false")
    assert asked(seeing) == ("<|user|><image>\nwhat?\n<|assistant|>", [ImageRef(url=URL)])


def test_an_image_that_the_browser_has_no_room_for_is_not_kept_and_the_text_is(chat: Any, seeing: Running):
    choose(chat, "large.png", data=PNG + bytes(8 << 20))
    expect(waiting(chat)).to_have_count(1)
    send(chat, "a large one")
    expect(chat.get_by_text("images of this conversation are not kept")).to_be_visible()
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(1)
    chat.reload()
    expect(chat.locator("article.user")).to_contain_text("a large one")
    expect(chat.locator("article.user")).to_contain_text("An image that was too large to keep")
    send(chat, "still there?")
    assert asked(seeing)[1] is None


def test_other_files_are_refused(chat: Any):
    choose(chat, "notes.txt", data=b"secret", kind="text/plain")
    expect(chat.get_by_text("notes.txt is not sent")).to_be_visible()
    hand_over(chat, "drop", "picture.svg", "image/svg+xml")
    expect(chat.get_by_text("picture.svg is not sent")).to_be_visible()
    expect(waiting(chat)).to_have_count(0)


def test_a_model_without_eyes_has_no_button_and_refuses_a_drop(page: Any, server: Running):
    opened(page, server.url)
    expect(page.get_by_label("Image", exact=True)).to_be_hidden()
    hand_over(page, "drop", "a.png")
    expect(page.get_by_text("This model does not see images.")).to_be_visible()
    expect(waiting(page)).to_have_count(0)


def test_what_the_server_says_of_an_image_is_shown(chat: Any):
    choose(chat, *(f"{number}.png" for number in range(9)))
    expect(waiting(chat)).to_have_count(9)
    send(chat, "what?")
    expect(chat.locator("article.assistant")).to_contain_text("there are 9 images; the limit is 8")
    chat.errors.clear()  # the browser logs the 400


def test_an_edit_leaves_out_an_image_that_the_server_refused(chat: Any, seeing: Running):
    choose(chat, *(f"{number}.png" for number in range(9)))
    expect(waiting(chat)).to_have_count(9)
    send(chat, "what?")
    chat.locator("article.user").get_by_role("button", name="Edit").click()
    check_accessible(chat)
    chat.get_by_role("button", name="Remove image 9").focus()
    chat.keyboard.press("Enter")
    expect(chat.get_by_role("button", name="Remove image 8")).to_be_focused()
    chat.get_by_role("button", name="Send", exact=True).first.click()
    expect(chat.locator("article.user .branches")).to_contain_text("2/2")
    expect(chat.locator("article.assistant").last).to_have_attribute("aria-busy", "false")
    assert len(asked(seeing)[1] or []) == 8
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(8)
    chat.errors.clear()  # the browser logs the 400
