"""Images in every chat API: the same prompt, with one image token for each, and the images beside it."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import IMAGE_TOKENS, MODEL, TEMPLATE, Running, running_server, served_model

from headrace.api.arguments import chat_fields
from headrace.api.engine_chat import EngineChat
from headrace.config.server_args import ServerArgs
from headrace.media_kinds import ImageRef, MediaRefs
from headrace.messages.media import MediaSupport
from headrace.server.context import ServerStatus, ServingContext

INFO = MediaSupport("llava", {"image": "<image>"})
URL = "data:image/png;base64,aGVsbG8="
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ONLY_PARTS = PARTS.replace("{% if m.content is string %}{{ m.content }}{% else %}", "").replace(
    "{% endfor %}{% endif %}{{ '", "{% endfor %}{{ '"
)
NO_MEDIA = PARTS.replace("<image>", "")


def server_with(template: str) -> Iterator[Running]:
    with running_server(
        template, 1024, special_tokens=("<image>",), media_support=INFO, max_images=3, max_stored_responses=9
    ) as running:
        yield running


@pytest.fixture(
    scope="module", params=[TEMPLATE, PARTS, ONLY_PARTS, NO_MEDIA], ids=["texts", "parts", "only parts", "no images"]
)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    yield from server_with(request.param)


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    server.frontend.reset()
    with httpx.Client(base_url=server.url, timeout=20) as made:
        yield made


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], **fields}


def image(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asked(server: Running) -> tuple[str, list[ImageRef]]:
    """The text of the last prompt, and its images."""
    call = server.frontend.calls[-1]
    return server.frontend.tokenizer.decode(call.input_ids, skip_special_tokens=False), call.image_data


CODED = "aGVsbG8="
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat completions": ("/v1/chat/completions", chat(image(), text("what?"))),
    "fields that ask for nothing": (
        "/v1/chat/completions",
        chat(image(detail=None, format=None, file_id="") | {"text": None}, text("what?")),
    ),
    "a bare url": ("/v1/chat/completions", chat({"type": "image_url", "image_url": URL}, text("what?"))),
    "responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
                        {"type": "input_text", "text": "what?"},
                    ],
                }
            ],
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": URL, "data": None}, "cache_control": None},
                        {"type": "text", "text": "what?"},
                    ],
                }
            ],
        },
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "what?", "images": [CODED]}], "stream": False},
    ),
    "ollama's generate": ("/api/generate", {"prompt": "what?", "images": [CODED], "stream": False}),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_api_gives_the_same_prompt(server: Running, client: httpx.Client, name: str):
    path, body = BODIES[name]
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text

    prompt, images = asked(server)
    assert prompt.replace("<image>\nwhat?", "<image>what?") == "<|user|><image>what?\n<|assistant|>"
    assert images in ([ImageRef(url=URL)], [ImageRef(url=CODED)])
    token = server.frontend.tokenizer.token_to_id("<image>")
    assert server.frontend.calls[-1].input_ids.count(token) == 1


def test_a_limit_beside_an_image_is_lowered_where_the_image_s_tokens_are_known(client: httpx.Client, server: Running):
    body = chat(text("hi"), image(), max_tokens=1000)
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    params = server.frontend.calls[-1].sampling_params
    assert (params.max_new_tokens, server.frontend.resolved[-1].max_new_tokens) == (None, 1000)
    assert client.post("/v1/chat/completions", json=chat(text("hi"), max_tokens=1000)).status_code == 200
    assert server.frontend.calls[-1].sampling_params.max_new_tokens == 1000


def test_what_a_user_writes_is_no_image(server: Running, client: httpx.Client):
    reply = client.post("/v1/chat/completions", json=chat(text("<image> is "), image(detail="low"), text("<image>")))
    assert reply.status_code == 200, reply.text

    assert server.frontend.calls[-1].input_ids.count(server.frontend.tokenizer.token_to_id("<image>")) == 1
    assert asked(server)[1] == [ImageRef(url=URL, detail="low")]


def test_images_of_several_messages_keep_their_order(server: Running, client: httpx.Client):
    messages = [
        {"role": "user", "content": [image("data:,a"), text("one")]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [text("two"), image("data:,b"), image("data:,c")]},
    ]
    assert client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}).status_code == 200

    prompt, images = asked(server)
    assert [one.url for one in images] == ["data:,a", "data:,b", "data:,c"]
    assert prompt.count("<image>") == 3
    assert "<|assistant|>yes" in prompt
    assert prompt.index("one") < prompt.index("two") < prompt.rindex("<image>")


def test_the_result_of_a_tool_may_be_an_image(server: Running, client: httpx.Client):
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CODED}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [shown]}]},
    ]
    reply = client.post("/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": messages})
    assert reply.status_code == 200, reply.text

    prompt, images = asked(server)
    assert prompt.count("<image>") == 1
    assert images == [ImageRef(url=CODED)]


def test_an_image_beside_a_call_is_shown_by_templates_without_tools(server: Running, client: httpx.Client):
    call = {"id": "a", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [text("here"), image()], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [image(), text("there")]},
    ]
    reply = client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert reply.status_code == 200, reply.text

    prompt, images = asked(server)
    assert len(images) == prompt.count("<image>") == 2
    assert prompt.index("here") < prompt.index("<image>") < prompt.index('<tool_call>\n{"name": "see"')


def test_counts_have_the_tokens_of_images(server: Running, client: httpx.Client):
    path, body = BODIES["messages"]
    body = {name: value for name, value in body.items() if name != "max_tokens"}
    counted = client.post(f"{path}/count_tokens", json=body).json()["input_tokens"]

    ids, media = server.frontend.counted
    assert counted == len(ids) - 1 + IMAGE_TOKENS
    assert media == MediaRefs((ImageRef(url=URL),))


def test_tokenizing_messages_gives_the_tokens_of_images_too(server: Running, client: httpx.Client):
    body = {"messages": chat(image(), text("what?"))["messages"]}
    reply = client.post("/tokenize", json=body).json()

    ids, media = server.frontend.counted
    assert reply["count"] == len(reply["tokens"]) == len(ids) - 1 + IMAGE_TOKENS
    assert media == MediaRefs((ImageRef(url=URL),))


def test_the_output_of_a_tool_may_be_an_image_in_responses(server: Running, client: httpx.Client):
    shown = [{"type": "input_text", "text": "the screen"}, {"type": "input_image", "image_url": URL, "detail": "low"}]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": shown},
    ]
    first = client.post("/v1/responses", json={"model": MODEL, "input": items})
    assert first.status_code == 200, first.text
    assert asked(server)[1] == [ImageRef(url=URL, detail="low")]

    body = {"model": MODEL, "input": "and now?", "previous_response_id": first.json()["id"]}
    second = client.post("/v1/responses", json=body)
    assert second.status_code == 200, second.text
    prompt, images = asked(server)
    assert images == [ImageRef(url=URL, detail="low")]
    assert prompt.index("the screen") < prompt.index("<image>") < prompt.index("and now?")


def test_bytes_are_images_in_chats_of_the_engine(server: Running):
    file = b"\x89PNG of some bytes"
    parts = [{"type": "image_url", "image_url": {"url": file, "detail": "low"}}, text("what?")]
    context = ServingContext(
        server.frontend,
        served_model(server.frontend.tokenizer, media_support=INFO),
        ServerArgs(max_images=3),
        ServerStatus(started=True),
    )
    asyncio.run(EngineChat(context).whole(chat_fields([{"role": "user", "content": parts}], None, False, {})))

    assert asked(server)[1] == [ImageRef(url=base64.b64encode(file).decode(), detail="low")]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (chat(*[image()] * 4), "messages", "there are 4 images; the limit is 3"),
        (chat(image(detail="huge")), "messages[0].content[0].image_url.detail", "must be auto, low or high"),
        (chat(image("")), "messages[0].content[0].image_url", "must be a URL"),
        (chat(image(size=5)), "messages[0].content[0].image_url.size", "the field 'size' is not known here"),
        (chat(image() | {"text": "a"}), "messages[0].content[0].text", "does not belong"),
        (chat({"type": "file", "file": {"file_id": "a"}}), "messages[0].content[0].type", "not supported"),
        (chat(image(), truncate_prompt_tokens=2), "truncate_prompt_tokens", "cannot be cut"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused(client: httpx.Client, body: dict[str, Any], param: str, words: str):
    reply = client.post("/v1/chat/completions", json=body)

    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


def test_empty_lists_of_images_ask_for_nothing(client: httpx.Client):
    body = {"messages": [{"role": "user", "content": "a", "images": []}], "stream": False}
    assert client.post("/api/chat", json=body).status_code == 200
    assert client.post("/api/generate", json={"prompt": "a", "images": None, "stream": False}).status_code == 200


@pytest.mark.parametrize("url", ["https://example.com/a.png", "file:///etc/passwd", 5, ""])
def test_base64_is_no_url(client: httpx.Client, url: object):
    source = {"type": "base64", "media_type": "image/png", "data": url}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    for path, body in (
        ("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": messages}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [url]}], "stream": False}),
    ):
        assert client.post(path, json=body).status_code == 400


def test_a_body_above_the_limit_names_the_option():
    with running_server(max_body_bytes=1 << 16) as running:
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=chat(image("data:," + "a" * (1 << 16))))
    assert reply.status_code == 413
    assert "--max-body-bytes" in reply.json()["error"]["message"]


def test_clients_are_told_that_the_model_sees(client: httpx.Client):
    info = client.get("/get_model_info").json()
    assert (info["has_image_understanding"], info["image_token"]) == (True, "<image>")
    assert "vision" in client.post("/api/show", json={"model": MODEL}).json()["capabilities"]


@pytest.mark.parametrize("name", BODIES)
def test_a_model_without_eyes_says_so(name: str, blind: httpx.Client):
    path, body = BODIES[name]
    reply = blind.post(path, json=body)

    assert reply.status_code == 400
    assert "this model does not support images" in reply.text


@pytest.fixture(scope="module")
def blind() -> Iterator[httpx.Client]:
    with running_server() as running, httpx.Client(base_url=running.url, timeout=20) as made:
        yield made
