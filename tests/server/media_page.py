"""The chat page of a server whose model sees or hears: files are handed to it, messages sent, and what was asked is read."""

import base64
import zlib
from typing import Any

import pytest
from fake_frontend import Running

from headrace.media_kinds import MediaRefs

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
expect = sync_api.expect

_TRANSFER = """(files) => {
  const made = new DataTransfer();
  for (const [name, type, text] of files) {
    made.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type }));
  }
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


def opened(page: Any, url: str) -> Any:
    """The chat page, which knows its model."""
    page.goto(f"{url}/ui/")
    expect(page.locator("#model-about")).to_contain_text("org/tiny")
    expect(page.locator("ul.waiting-media")).to_have_count(1)
    return page


def choose(page: Any, label: str, *names: str, data: bytes, kind: str) -> None:
    """Choose files with the button of this label."""
    files = [{"name": name, "mimeType": kind, "buffer": data} for name in names]
    page.get_by_label(label, exact=True).set_input_files(files)


def hand_over(page: Any, event: str, *files: tuple[str, str, bytes]) -> None:
    """Drop or paste files on the box. files: name, type and content."""
    coded = [[name, kind, base64.b64encode(data).decode()] for name, kind, data in files]
    transfer = page.evaluate_handle(_TRANSFER, coded)
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
    replied(page)


def replied(page: Any) -> None:
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(page.locator("article.assistant").last).to_have_attribute("aria-busy", "false")


def asked(server: Running) -> tuple[str, MediaRefs]:
    """The text of the last prompt, and its media."""
    call = server.frontend.calls[-1]
    media = MediaRefs(tuple(call.image_data or ()), tuple(call.audio_data or ()))
    return server.frontend.tokenizer.decode(call.input_ids, skip_special_tokens=False), media


def waiting(page: Any) -> Any:
    """What goes with the next message."""
    return page.get_by_role("list", name="Images and sounds of the next message").get_by_role("listitem")
