"""Sounds and videos in the chat APIs: the same prompt, with one token for each, and the media beside it."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import IMAGE_TOKENS, MODEL, Running, Script, running_server, served_model

from headrace.api.arguments import chat_fields
from headrace.api.engine_chat import EngineChat
from headrace.config.server_args import ServerArgs
from headrace.errors import RequestError
from headrace.media_kinds import AudioRef, ImageRef, MediaRefs, VideoRef
from headrace.messages.media import MediaSupport
from headrace.server.context import ServerStatus, ServingContext

TOKENS = ("<image>", "<sound>", "<video>")
SUPPORT = MediaSupport("fake", {"image": "<image>", "audio": "<sound>", "video": "<video>"})
CODED = base64.b64encode(b"a file").decode()
FRAMES_URL = "data:video/jpeg;base64,"
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'audio' %}<sound>{% elif part.type == 'video' %}<video>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
ONLY_IMAGES = PARTS.replace("<sound>", "").replace("<video>", "")


@pytest.fixture(scope="module", params=[PARTS, TEXTS, ONLY_IMAGES], ids=["parts", "texts", "only images"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running_server(
        request.param, 1024, special_tokens=TOKENS, media_support=SUPPORT, max_audios=2, max_videos=1
    ) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    server.frontend.reset()
    with httpx.Client(base_url=server.url, timeout=20) as made:
        yield made


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], **fields}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def sound(data: str = CODED, **fields: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav", **fields}}


def video(given: object) -> dict[str, Any]:
    return {"type": "video_url", "video_url": given}


IMAGE = {"type": "image_url", "image_url": {"url": CODED}}


def asked(server: Running) -> tuple[str, MediaRefs]:
    """The text of the last prompt, and its media."""
    call = server.frontend.calls[-1]
    given = (call.image_data, call.audio_data, call.video_data)
    media = MediaRefs(*(tuple(one or ()) for one in given))
    return server.frontend.tokenizer.decode(call.input_ids, skip_special_tokens=False), media


def test_every_kind_has_its_token_in_its_place(server: Running, client: httpx.Client):
    parts = [
        text("a "),
        sound(),
        text(" b "),
        IMAGE,
        video({"frames": [CODED, {"url": CODED}], "fps": 4}),
        sound("YQ=="),
    ]
    reply = client.post("/v1/chat/completions", json=chat(*parts, text("?")))
    assert reply.status_code == 200, reply.text

    prompt, media = asked(server)
    assert prompt.replace("\n", "") == "<|user|>a <sound> b <image><video><sound>?<|assistant|>"
    image = ImageRef(url=CODED)
    assert media == MediaRefs(
        (image,), (AudioRef(url=CODED), AudioRef(url="YQ==")), (VideoRef(frames=(image, image), fps=4.0),)
    )
    ids, tokenizer = server.frontend.calls[-1].input_ids, server.frontend.tokenizer
    assert [ids.count(tokenizer.token_to_id(token)) for token in TOKENS] == [1, 2, 1]


@pytest.mark.parametrize(
    ("part", "media"),
    [
        (sound(f"data:audio/wav;base64,{CODED}", format=None), (AudioRef(url=f"data:audio/wav;base64,{CODED}"),)),
        ({"type": "audio_url", "audio_url": {"url": "https://a.example/b.mp3"}}, (AudioRef(url="https://a.example/b.mp3"),)),
        ({"type": "audio_url", "audio_url": CODED}, (AudioRef(url=CODED),)),
        (video(f"{FRAMES_URL}{CODED},YQ=="), (VideoRef(frames=(ImageRef(url=CODED), ImageRef(url="YQ=="))),)),
        (video({"url": f"{FRAMES_URL}{CODED}"}), (VideoRef(frames=(ImageRef(url=CODED),)),)),
        (video({"frames": [CODED], "fps": None}), (VideoRef(frames=(ImageRef(url=CODED),)),)),
        (video({"url": f"{FRAMES_URL}{CODED}", "fps": 5}), (VideoRef(frames=(ImageRef(url=CODED),), fps=5.0),)),
        (sound(CODED, format="WAV"), (AudioRef(url=CODED),)),
    ],
)  # fmt: skip
def test_other_shapes(server: Running, client: httpx.Client, part: dict[str, Any], media: tuple[Any, ...]):
    reply = client.post("/v1/chat/completions", json=chat(part, text("?")))
    assert reply.status_code == 200, reply.text
    found = asked(server)[1]
    assert found.audios + found.videos == media


def test_responses_take_sounds(server: Running, client: httpx.Client):
    part = {"type": "input_audio", "input_audio": {"data": CODED, "format": "mp3"}}
    body = {"model": MODEL, "input": [{"role": "user", "content": [part, {"type": "input_text", "text": "what?"}]}]}
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert asked(server)[1] == MediaRefs(audios=(AudioRef(url=CODED),))


def test_counts_have_the_tokens_of_sounds(server: Running, client: httpx.Client):
    reply = client.post("/tokenize", json={"messages": chat(sound(), text("what?"))["messages"]}).json()
    ids, media = server.frontend.counted
    assert reply["count"] == len(ids) - 1 + IMAGE_TOKENS
    assert media == MediaRefs(audios=(AudioRef(url=CODED),))


def test_bytes_are_sounds_in_chats_of_the_engine(server: Running):
    parts = [{"type": "input_audio", "input_audio": {"data": b"a file", "format": "wav"}}, text("what?")]
    parts.append(video({"frames": [b"a file"]}))
    context = ServingContext(
        server.frontend,
        served_model(server.frontend.tokenizer, media_support=SUPPORT),
        ServerArgs(),
        ServerStatus(started=True),
    )
    asyncio.run(EngineChat(context).whole(chat_fields([{"role": "user", "content": parts}], None, False, {})))
    assert asked(server)[1] == MediaRefs((), (AudioRef(url=CODED),), (VideoRef(frames=(ImageRef(url=CODED),)),))


WHERE = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        (sound(""), f"{WHERE}.input_audio.data", "data is empty"),
        (sound(5), f"{WHERE}.input_audio", 'an object with "data"'),
        (sound("https://a.example/b.wav"), f"{WHERE}.input_audio.data", "a URL goes into a part of type audio_url"),
        (sound(format="pcm16"), f"{WHERE}.input_audio.format", "must be one of wav, mp3"),
        (sound(speed=2), f"{WHERE}.input_audio", "the field 'speed' is not known here"),
        (sound() | {"text": "a"}, f"{WHERE}.text", "does not belong to a part of type input_audio"),
        (sound() | {"image_url": "a"}, f"{WHERE}.image_url", "does not belong to a part of type input_audio"),
        ({"type": "audio_url", "audio_url": {"url": ""}}, f"{WHERE}.audio_url", "must be a URL"),
        (video("https://a.example/b.mp4"), f"{WHERE}.video_url", "video files are not decoded. Take frames"),
        (video({"frames": ["a"], "fps": "fast"}), f"{WHERE}.video_url.fps", "must be a number"),
        (video({"frames": [5]}), f"{WHERE}.video_url.frames[0]", "must be a URL"),
        (video({"frames": ["a"], "size": 5}), f"{WHERE}.video_url.size", "the field 'size' is not known here; those that are: frames, fps"),
        (video({"frames": []}), f"{WHERE}.video_url", "a video has no frames"),
        (video({"frames": ["a"], "fps": 1e-9}), f"{WHERE}.video_url", "from 0.001 to 240"),
        (video(5), f"{WHERE}.video_url", "must be a URL, or an object"),
        ({"type": "text", "text": "a", "input_audio": {"data": "b"}}, f"{WHERE}.input_audio", "does not belong to a part of type text"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused(client: httpx.Client, part: dict[str, Any], param: str, words: str):
    reply = client.post("/v1/chat/completions", json=chat(part))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([sound()] * 3, "there are 3 audio clips; the limit is 2 (--max-audios)"),
        ([video({"frames": [CODED]})] * 2, "there are 2 videos; the limit is 1 (--max-videos)"),
    ],
)
def test_too_many_are_refused(client: httpx.Client, parts: list[dict[str, Any]], words: str):
    reply = client.post("/v1/chat/completions", json=chat(*parts))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert words in reply.json()["error"]["message"]


def test_an_error_of_the_engine_is_told_in_words_of_the_messages(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    refused = RequestError("audio_data[1]: it is broken", "audio_data", "invalid_audio")
    monkeypatch.setattr(server.frontend, "script", Script(fail_at=0, error=refused))
    error = client.post("/v1/chat/completions", json=chat(sound(), sound())).json()["error"]
    assert (error["message"], error["param"], error["code"]) == (
        "audio clip 2 of the messages: it is broken",
        "messages",
        "invalid_audio",
    )


def test_clients_are_told_what_the_model_takes(client: httpx.Client):
    info = client.get("/model_info").json()
    assert [info[f"has_{name}_understanding"] for name in ("image", "audio", "video")] == [True] * 3
    assert [info[f"{name}_token"] for name in ("image", "audio", "video")] == list(TOKENS)


@pytest.mark.parametrize("name", ["images", "audios", "videos"])
def test_media_beside_the_content_of_a_message_are_not_lost(client: httpx.Client, name: str):
    message = {"role": "user", "content": "a", name: [CODED]}
    reply = client.post("/v1/chat/completions", json={"model": MODEL, "messages": [message]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, f"messages[0].{name}")
    if name != "images":
        assert client.post("/api/chat", json={"messages": [message], "stream": False}).status_code == 400
    nothing = {"model": MODEL, "messages": [message | {name: []}]}
    assert client.post("/v1/chat/completions", json=nothing).status_code == 200


@pytest.mark.parametrize(
    ("part", "words", "code"),
    [
        (sound(), "this model does not support audio", "unsupported_audio"),
        (video({"frames": [CODED]}), "this model does not support videos", "unsupported_videos"),
    ],
)
def test_a_model_that_takes_none_says_so(deaf: httpx.Client, part: dict[str, Any], words: str, code: str):
    reply = deaf.post("/v1/chat/completions", json=chat(part))
    assert reply.status_code == 400
    assert (reply.json()["error"]["message"], reply.json()["error"]["code"]) == (words, code)
    info = deaf.get("/model_info").json()
    assert (info["has_audio_understanding"], info["audio_token"]) == (False, None)


@pytest.fixture(scope="module")
def deaf() -> Iterator[httpx.Client]:
    with running_server() as running, httpx.Client(base_url=running.url, timeout=20) as made:
        yield made
