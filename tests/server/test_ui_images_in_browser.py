"""Images on the chat page, in Debian's chromium: chosen, pasted, dropped, sent and kept."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_frontend import Running, running_server
from media_page import PNG, asked, choose, expect, hand_over, opened, replied, send, waiting
from web_page import check_accessible

from headrace.media_kinds import ImageRef, MediaRefs
from headrace.messages.media import MediaSupport

URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    with running_server(
        special_tokens=("<image>",), media_support=MediaSupport("llava", {"image": "<image>"})
    ) as running:
        yield running


@pytest.fixture
def chat(page: Any, seeing: Running) -> Any:
    seeing.frontend.reset()
    return opened(page, seeing.url)


def choose_images(page: Any, *names: str, data: bytes = PNG, kind: str = "image/png") -> None:
    choose(page, "Image", *names, data=data, kind=kind)


def of_images(count: int) -> MediaRefs:
    return MediaRefs((ImageRef(url=URL),) * count)


def test_images_are_chosen_pasted_and_dropped_and_go_with_one_message(chat: Any, seeing: Running):
    choose_images(chat, "chosen.png")
    expect(waiting(chat)).to_have_count(1)
    hand_over(chat, "paste", ("pasted.png", "image/png", PNG))
    expect(waiting(chat)).to_have_count(2)
    hand_over(chat, "drop", ("dropped.png", "image/png", PNG))
    expect(waiting(chat).get_by_role("img")).to_have_count(3)
    expect(chat.get_by_role("status").first).to_contain_text("3 images go with the next message")
    check_accessible(chat)
    send(chat, "what?")

    prompt, media = asked(seeing)
    assert media == of_images(3)
    assert prompt.count("<image>") == 3
    expect(waiting(chat)).to_have_count(0)
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(3)
    expect(chat.locator("article.user img").first).to_have_js_property("naturalWidth", 2)
    check_accessible(chat)
    send(chat, "and now?")
    assert asked(seeing)[1] == of_images(3), "they stay in the conversation, and no other came"


def test_an_image_is_removed_by_the_keyboard(chat: Any, seeing: Running):
    choose_images(chat, "a.png", "b.png")
    expect(waiting(chat)).to_have_count(2)
    chat.get_by_role("button", name="Remove a.png").focus()
    chat.keyboard.press("Enter")
    expect(chat.get_by_role("button", name="Remove b.png")).to_be_focused()
    chat.keyboard.press("Enter")
    expect(waiting(chat)).to_have_count(0)
    expect(chat.get_by_label("Message", exact=True)).to_be_focused()
    send(chat, "hello")
    assert asked(seeing)[1] == MediaRefs()


def test_an_image_alone_is_a_message_and_survives_a_reload_and_an_edit(chat: Any, seeing: Running):
    choose_images(chat, "a.png")
    expect(waiting(chat)).to_have_count(1)
    send(chat, "")
    assert asked(seeing) == ("<|user|><image>\n<|assistant|>", of_images(1))
    chat.reload()
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(1)
    chat.locator("article.user").get_by_role("button", name="Edit").click()
    chat.get_by_label("Edit your message").fill("what?")
    chat.get_by_label("Edit your message").press("Control+Enter")
    expect(chat.locator("article.user .branches")).to_contain_text("2/2")
    replied(chat)
    assert asked(seeing) == ("<|user|><image>\nwhat?\n<|assistant|>", of_images(1))


def test_an_image_that_the_browser_has_no_room_for_is_not_kept_and_the_text_is(chat: Any, seeing: Running):
    choose_images(chat, "large.png", data=PNG + bytes(8 << 20))
    expect(waiting(chat)).to_have_count(1)
    send(chat, "a large one")
    expect(chat.get_by_text("images and sounds of this conversation are not kept")).to_be_visible()
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(1)
    chat.reload()
    expect(chat.locator("article.user")).to_contain_text("a large one")
    expect(chat.locator("article.user")).to_contain_text("An image that was too large to keep")
    send(chat, "still there?")
    assert asked(seeing)[1] == MediaRefs()


def test_images_of_conversations_from_before_there_were_sounds_are_still_there(
    chat: Any, seeing: Running, tmp_path: Path
):
    choose_images(chat, "a.png")
    expect(waiting(chat)).to_have_count(1)
    send(chat, "what?")
    with chat.expect_download() as info:
        chat.get_by_role("button", name="Export JSON").click()
    conversation = json.loads(Path(info.value.path()).read_text())
    for node in conversation["nodes"].values():
        if media := node.pop("media", None):
            node["images"] = [item["url"] for item in media]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(conversation))
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator("article")).to_have_count(0)
    chat.locator("#import").set_input_files(old)
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(1)
    send(chat, "and now?")
    assert asked(seeing)[1] == of_images(1)

    old.write_text(json.dumps(conversation).replace("data:image/png", "https://a.example/b"))
    chat.locator("#import").set_input_files(old)
    expect(chat.get_by_text("this is not a conversation of this page")).to_be_visible()


def test_other_files_are_refused(chat: Any):
    choose_images(chat, "notes.txt", data=b"secret", kind="text/plain")
    expect(chat.get_by_text("notes.txt is not sent: it is no PNG, JPEG, WEBP, GIF or BMP image.")).to_be_visible()
    hand_over(chat, "drop", ("picture.svg", "image/svg+xml", PNG))
    expect(chat.get_by_text("picture.svg is not sent")).to_be_visible()
    expect(waiting(chat)).to_have_count(0)


def test_a_model_without_eyes_has_no_button_and_refuses_a_drop(page: Any, server: Running):
    opened(page, server.url)
    expect(page.get_by_label("Image", exact=True)).to_be_hidden()
    hand_over(page, "drop", ("a.png", "image/png", PNG), ("b.png", "image/png", PNG))
    expect(page.get_by_text("This model does not support images.")).to_have_count(1)
    hand_over(page, "drop", ("notes.txt", "text/plain", b"secret"))
    expect(page.get_by_text("notes.txt is not sent: this model takes text only.")).to_be_visible()
    expect(waiting(page)).to_have_count(0)


def test_what_the_server_says_of_an_image_is_shown(chat: Any):
    choose_images(chat, *(f"{number}.png" for number in range(9)))
    expect(waiting(chat)).to_have_count(9)
    send(chat, "what?")
    expect(chat.locator("article.assistant")).to_contain_text("there are 9 images; the limit is 8")
    chat.errors.clear()  # the browser logs the 400


def test_an_edit_leaves_out_an_image_that_the_server_refused(chat: Any, seeing: Running):
    choose_images(chat, *(f"{number}.png" for number in range(9)))
    expect(waiting(chat)).to_have_count(9)
    send(chat, "what?")
    chat.locator("article.user").get_by_role("button", name="Edit").click()
    expect(chat.get_by_role("button", name="Remove Image 9")).to_be_visible()
    check_accessible(chat)
    chat.get_by_role("button", name="Remove Image 9").focus()
    chat.keyboard.press("Enter")
    expect(chat.get_by_role("button", name="Remove Image 8")).to_be_focused()
    chat.get_by_role("button", name="Send", exact=True).first.click()
    expect(chat.locator("article.user .branches")).to_contain_text("2/2")
    replied(chat)
    assert asked(seeing)[1] == of_images(8)
    expect(chat.locator("article.user").get_by_role("img")).to_have_count(8)
    chat.errors.clear()  # the browser logs the 400
