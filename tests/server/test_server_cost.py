"""What a body may cost: counted before it is decoded, decoded beside the event loop, and bounded in memory."""

import asyncio
import base64
import gc
import json
import queue
import sys
import threading
from types import SimpleNamespace, UnionType
from typing import Union, get_args, get_origin

import httpx
import msgspec
import pytest
from fake_frontend import CONTEXT_LENGTH, MODEL, Running
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.errors import CapacityError, HeadraceError, RequestError, TooLargeError
from headrace.messages.packing import pack_float32
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server import body as body_module
from headrace.server import http
from headrace.server.body import (
    SMALL_BODY_BYTES,
    Bodies,
    count_body,
    embeds_to_base64,
    has_long_number,
)
from headrace.server.listener import SWITCH_INTERVAL_S
from headrace.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from headrace.server.openai.tokenize import DetokenizeBody, TokenizeBody
from headrace.turns import work_for

JSON = {"content-type": "application/json"}
HIDDEN_SIZE = 8
ROUTES = {
    "/generate": (GenerateReqInput, {"text": "hi"}),
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "hi"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
    "/tokenize": (TokenizeBody, {}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(',:[]{}"\\é', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(',:["\\', max_size=3), inner, max_size=4)
    ),
)


def post(client: httpx.Client, route: str, content: bytes) -> httpx.Response:
    return client.post(route, content=content, headers=JSON)


# -- counting


def walk(value: object) -> tuple[int, int, int]:
    """Separators, lists and objects, fields."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [walk(each) for each in (value.values() if isinstance(value, dict) else value)]
    own = (max(0, len(value) - 1), 1, len(value) if isinstance(value, dict) else 0)
    return tuple(map(sum, zip(own, *inner, strict=True)))  # type: ignore[return-value]


@given(value=VALUES, piece=st.integers(1, 9), ascii=st.booleans())
def test_a_body_is_counted_outside_of_its_strings(value: object, piece: int, ascii: bool):
    body = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_PIECE_BYTES", piece)
        patch.setattr(body_module, "MAX_VALUES", 0)
        counts = count_body(body)

    assert (counts.values, counts.lists, counts.fields) == walk(value)


@pytest.mark.parametrize("at", [0, 10, 64 * 1024 - 10, 64 * 1024 - 18, 64 * 1024])
def test_a_long_number_is_seen_wherever_it_is(at: int):
    text = bytearray(b" " * (80 * 1024))
    text[at : at + 18] = b"9" * 18
    assert not has_long_number(bytes(text))
    text[at + 18 : at + 19] = b"9"
    assert has_long_number(bytes(text))


def test_punctuation_within_a_text_is_no_value():
    counts = count_body(b'{"text": "' + b',[{:\\"' * 200_000 + b'"}')

    assert (counts.values, counts.lists, counts.fields) == (0, 1, 1)


@pytest.mark.parametrize(
    "body",
    [b"[" + b"1," * (1 << 19) + b"1]", b"[" + b"[]," * (1 << 15) + b"1]", b'{"a":' * 70_000],
    ids=["values", "lists", "fields"],
)
def test_a_body_that_holds_too_much_is_refused_with_the_numbers(body: bytes):
    with pytest.raises(TooLargeError, match=r"the body holds \d+ .*, at most \d+"):
        count_body(body).check()


# -- every field that may be long


def takes(kind: object, wanted: type) -> bool:
    """Whether the type of a field allows `wanted`."""
    if get_origin(kind) in (Union, UnionType):
        return any(takes(each, wanted) for each in get_args(kind))
    return kind is object or kind is wanted or get_origin(kind) is wanted


def long_fields() -> list[tuple[str, str, bytes]]:
    """(route, field, a value with 3,000 items or characters) for every field that may hold so many; also those of sampling_params."""
    cases = []
    many = {list: b"[" + b"0," * 2999 + b"0]", dict: b"{" + b",".join(b'"%d":1' % i for i in range(3000)) + b"}"}
    for route, (kind, _) in ROUTES.items():
        cases += [
            (route, field.name, value)
            for field in msgspec.structs.fields(kind)
            for wanted, value in many.items()
            if takes(field.type, wanted)
        ]
    cases += [
        ("/generate", "sampling_params", b'{"%b":%b}' % (field.name.encode(), value))
        for field in msgspec.structs.fields(SamplingParams)
        for wanted, value in many.items()
        if takes(field.type, wanted)
    ]
    return cases


def test_every_field_that_may_be_long_is_refused_undecoded_beyond_the_limit(
    client: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body_module, "MAX_VALUES", 2000)
    monkeypatch.setattr(body_module, "INLINE_BODY_BYTES", 1024)
    monkeypatch.setattr(http, "decode_json", lambda body, decoder: pytest.fail("decoded"))
    cases = long_fields()
    assert len(cases) > 40

    for route, name, value in cases:
        good = json.dumps({k: v for k, v in ROUTES[route][1].items() if k != name}).encode()[:-1]
        separator = b", " if good != b"{" else b""
        reply = post(client, route, good + separator + b'"%b": %b}' % (name.encode(), value))
        assert reply.status_code == 413, (route, name, reply.text)

    assert not server.frontend.calls


def test_every_field_that_may_be_long_is_decoded_beside_the_loop_and_answered(
    client: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body_module, "INLINE_BODY_BYTES", 1024)
    threads = []
    decode = http.decode_json
    monkeypatch.setattr(
        http, "decode_json", lambda *args: (threads.append(threading.current_thread().name), decode(*args))[1]
    )
    cases = long_fields()
    for route, name, value in cases:
        good = json.dumps({k: v for k, v in ROUTES[route][1].items() if k != name}).encode()[:-1]
        separator = b", " if good != b"{" else b""
        reply = post(client, route, good + separator + b'"%b": %b}' % (name.encode(), value))
        # Labels without effect may be as long as they like; all else is refused, or has cost a sample at most.
        assert reply.status_code in (200, 400), (route, name, reply.text)

    assert {name[:13] for name in threads} == {"headrace-body"}


@pytest.mark.parametrize(
    "route, body",
    [
        ("/generate", {"text": ["a"] * 65}),
        ("/generate", {"input_ids": [[1]] * 65}),
        ("/generate", {"input_ids": [[1] * 400] * 65}),
        ("/tokenize", {"prompt": ["a"] * 1025}),
        ("/tokenize", {"prompt": [""] * 20_000}),
        ("/detokenize", {"tokens": [[1]] * 1025}),
        ("/v1/completions", {"model": MODEL, "prompt": ["a"] * 65}),
    ],
)
def test_more_prompts_than_a_request_may_have_are_refused_before_any_is_looked_at(
    client: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, object]
):
    monkeypatch.setattr(server.frontend.tokenizer, "encode_batch", lambda *args: pytest.fail("tokenized"))
    monkeypatch.setattr(server.frontend.tokenizer, "decode", lambda *args: pytest.fail("decoded"))

    reply = client.post(route, json=body)

    assert reply.status_code == 400
    assert "at most" in reply.json()["error"]["message"]


def test_long_replies_of_tokenize_are_what_they_were(client: httpx.Client):
    text = "ab" * (CONTEXT_LENGTH * 128)

    reply = client.post("/tokenize", json={"prompt": text}).json()
    both = client.post("/tokenize", json={"prompt": ["ab", text[:-2]]}).json()

    assert reply["count"] == len(text) == len(reply["tokens"])
    assert both["tokens"] == [reply["tokens"][:2], reply["tokens"][2:]]
    assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"text": text}


# -- memory


def test_bodies_in_memory_are_bounded_together():
    most = 1 << 20
    bodies, size = Bodies(most), most + SMALL_BODY_BYTES
    for _ in range(8):
        bodies.take("a", size)
    with pytest.raises(CapacityError, match="too many large requests"):
        bodies.take("a", SMALL_BODY_BYTES + 1)
    with pytest.raises(CapacityError, match="too many large requests"):
        bodies.take("a", 1, of_body=SMALL_BODY_BYTES)
    for _ in range(200):
        bodies.take("a", SMALL_BODY_BYTES)
    bodies.take("b", size)
    bodies.give_back("a", size)
    bodies.give_back("a", size)
    bodies.take("a", size // 2)
    bodies.close()


async def test_a_large_body_is_joined_beside_the_loop():
    bodies = Bodies(1 << 20)
    parts = [bytes([part]) * (64 << 10) for part in range(3)]
    whole = b"".join(parts)
    joined = bodies.join(parts)
    joining = asyncio.ensure_future(joined)
    await asyncio.sleep(0)

    assert not joining.done()
    assert await joining == whole
    assert not parts
    assert await bodies.join([b"a", b"b"]) == b"ab"
    bodies.close()


async def test_few_bodies_of_many_items_are_decoded_and_not_yet_with_the_engine():
    many = json.dumps([{"role": "user", "content": "a"}] * 4000).encode()
    long = json.dumps(["{[:" * (64 << 10)] * 4).encode()
    context = SimpleNamespace(bodies=Bodies(1 << 20))
    gone = asyncio.Event()

    async def read(exchange: http.Exchange, body: bytes, tenant: str = "a") -> None:
        parts = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict[str, object]:
            if part := next(parts, None):
                return part
            await (gone if exchange is exchanges[-1] else asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        exchange.receive = receive
        work_for(tenant)
        exchange.tenant = tenant
        await exchange.read_json(object, any_content_type=True)

    def exchanges_of(count: int) -> list[http.Exchange]:
        return [http.Exchange({"headers": []}, None, None, context) for _ in range(count)]  # type: ignore[arg-type]

    exchanges, others = exchanges_of(7), exchanges_of(7)
    readings = [asyncio.create_task(read(exchange, many)) for exchange in exchanges]
    done, waiting = set(), set(readings)
    while len(done) < 4:
        ended, waiting = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert ended, "no body was decoded for a minute"
        done |= ended
    await asyncio.wait_for(read(others[0], many, "b"), 60)  # behind those of a that wait
    await asyncio.wait_for(asyncio.gather(*(read(exchange, long) for exchange in others[1:])), 60)
    assert not any(reading.done() for reading in waiting)
    gone.set()
    with pytest.raises(http.ClientGone):
        await asyncio.wait_for(readings[-1], 60)
    for exchange in exchanges:
        exchange.forget_body()
    await asyncio.wait_for(asyncio.gather(*readings[:-1]), 60)
    for exchange in [*exchanges, *others]:
        exchange.end()
    assert context.bodies.places.num_taken == 0
    assert context.bodies.num_bytes == 0
    context.bodies.close()


async def test_memory_of_large_bodies_and_long_replies_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch):
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(body_module, "give_back_free_memory", given_back.release)
    monkeypatch.setattr(body_module, "TRIM_EVERY_S", 0.0)
    bodies = Bodies(1000)
    bodies.note_end(body_module.TRIM_BYTES - 1)
    await asyncio.sleep(0)
    assert not given_back.acquire(blocking=False)
    bodies.note_end(1)
    bodies.note_end(1)
    assert await asyncio.to_thread(given_back.acquire, timeout=60)
    bodies.note_end(body_module.TRIM_BYTES)
    assert await asyncio.to_thread(given_back.acquire, timeout=60)

    bodies.note_end(body_module.TRIM_BYTES)
    bodies.close()
    await asyncio.sleep(0)
    assert not given_back.acquire(blocking=False), "once for both, and not after the end"


async def test_after_many_bytes_what_refers_to_itself_is_collected_too(monkeypatch: pytest.MonkeyPatch):
    """The error of a request that has gone may refer to its body."""
    done = queue.SimpleQueue[str]()
    monkeypatch.setattr(body_module, "give_back_free_memory", lambda: done.put("free"))
    monkeypatch.setattr(body_module, "collect_all", lambda: done.put("all"))
    monkeypatch.setattr(body_module, "TRIM_EVERY_S", 0.0)
    bodies = Bodies(1000)
    parts = []
    for num_bytes in (body_module.COLLECT_BYTES - 1, body_module.TRIM_BYTES, body_module.TRIM_BYTES):
        bodies.note_end(num_bytes)
        parts.append(await asyncio.to_thread(done.get, timeout=60))
    bodies.close()

    assert parts == ["free", "all", "free"]


async def test_a_large_body_of_a_client_that_left_in_the_middle_counts_as_freed(monkeypatch: pytest.MonkeyPatch):
    ended = []
    context = SimpleNamespace(bodies=Bodies(1 << 20))
    monkeypatch.setattr(context.bodies, "note_end", ended.append)
    parts = iter(
        [{"type": "http.request", "body": bytes(40 << 10), "more_body": True}] * 3 + [{"type": "http.disconnect"}]
    )

    async def receive() -> dict[str, object]:
        return next(parts)

    exchange = http.Exchange({"headers": []}, receive, None, context)  # type: ignore[arg-type]
    with pytest.raises(http.ClientGone):
        await exchange.read_body()
    exchange.end()
    context.bodies.close()

    assert ended == [80 << 10]
    assert context.bodies.num_bytes == 0


def test_the_event_loop_gets_pythons_lock_soon_while_the_server_runs(server: Running):
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)


@pytest.mark.parametrize("headers", [JSON, JSON | {"connection": "close"}])
def test_what_is_left_of_requests_goes_without_a_collection(client: httpx.Client, headers: dict[str, str]):
    """But for the last ones, which have hardly ended."""
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(one, RequestResponseCycle) for one in gc.get_objects())
        for route in ["/v1/chat/completions", "/generate"] * 10:
            assert client.post(route, json=ROUTES[route][1], headers=headers).status_code == 200
        assert sum(isinstance(one, RequestResponseCycle) for one in gc.get_objects()) <= before + 9
    finally:
        gc.enable()


@pytest.mark.parametrize("content", [b'{"text": "hi"}', b"{", b'{"text": "' + b"x" * 40_000 + b'"}', b"[" * 40_000])
def test_nothing_of_a_body_counts_after_its_request(client: httpx.Client, server: Running, content: bytes):
    post(client, "/generate", content)

    assert server.app.state.context.bodies.num_bytes == 0


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/generate", {"text": "hi"}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, False),
        ("/tokenize", {"prompt": "hi"}, True),
    ],
)
def test_a_body_counts_until_the_engine_has_what_was_asked(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: object, counts: bool
):
    """While a request waits to be read it is held; one without the engine until it is answered."""
    seen = []
    reply = http.Exchange.reply

    async def noting(exchange, *args, **options):
        seen.append(exchange.context.bodies.num_bytes)
        await reply(exchange, *args, **options)

    monkeypatch.setattr(http.Exchange, "reply", noting)
    assert client.post(path, json=body).status_code == 200
    assert bool(*seen) is counts


# -- embeddings


ROWS = [[0.5, -1, *range(6)], [1e-3] * 8, [0.0] * 8]
PACKED = base64.b64encode(pack_float32(value for row in ROWS for value in row)).decode()


def test_rows_of_numbers_become_the_bytes_that_they_stand_for():
    one = json.dumps({"rid": "[[", "input_embeds": ROWS}, indent=1).encode()
    several = json.dumps({"input_embeds": [ROWS, ROWS[:1]]}).encode()
    first = base64.b64encode(pack_float32(ROWS[0])).decode()

    assert json.loads(embeds_to_base64(one, HIDDEN_SIZE)) == {"rid": "[[", "input_embeds": PACKED}
    assert json.loads(embeds_to_base64(several, HIDDEN_SIZE)) == {"input_embeds": [PACKED, first]}


@pytest.mark.parametrize("value", [None, "AAAA", [], ["AAAA"], [[[ROWS]]], 5, {"a": 1}])
def test_other_embeddings_are_left_to_the_decoder(value: object):
    body = json.dumps({"input_embeds": value}).encode()

    assert embeds_to_base64(body, HIDDEN_SIZE) is body
    assert embeds_to_base64(body[:-1], HIDDEN_SIZE) is not None


@pytest.mark.parametrize(
    "text",
    ["[[1,2]]", "[[]]", "[ROW,3]", "[ROW,[ROW]]", "[[ROW],ROW]", "[[ROW],[]]", "[[ROW],5]", '[{"a":ROW}]', '["]",ROW]',
     "[[1,2,3,4,5,6,7,1e999]]", "[[1,2,3,4,5,6,7,1e39]]", '[["a",2,3,4,5,6,7,8]]', "[[0,0,0,0,0,0,0,0,0]]", "[[true,1,1,1,1,1,1,1]]"],
)  # fmt: skip
def test_what_are_no_rows_is_refused_and_never_read_in_part(client: httpx.Client, text: str):
    value = text.replace("ROW", json.dumps(ROWS[0])).encode()
    for padding in (b"", b" " * 20_000):
        reply = post(client, "/generate", b'{"input_embeds":' + padding + value + b"}")
        assert reply.status_code == 400, reply.text
        if b"1e999" not in value:
            assert "input_embeds" in reply.json()["error"]["message"]


def test_the_fields_beside_the_embeddings_are_counted():
    body = b'{"input_embeds": [' + json.dumps(ROWS[0]).encode() + b"]" + b',"a":1' * (1 << 17) + b"}"

    with pytest.raises(HeadraceError) as refused:
        embeds_to_base64(body, HIDDEN_SIZE)
    assert isinstance(refused.value, TooLargeError)


def test_a_long_row_is_refused_by_its_length(monkeypatch: pytest.MonkeyPatch):
    body = b'{"input_embeds": [[' + b"0," * 500_000 + b"0]]}"

    with pytest.raises(RequestError, match="a row has 500001 values, the model needs 8"):
        embeds_to_base64(body, HIDDEN_SIZE)


def test_embeddings_in_any_form_are_one_call(client: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body_module, "INLINE_BODY_BYTES", 1024)
    rows = [ROWS[0]] * 450
    packed = base64.b64encode(pack_float32(ROWS[0]) * 450).decode()
    for value in (rows, packed):
        assert client.post("/generate", json={"input_embeds": value}).status_code == 200

    assert [call.input_embeds for call in server.frontend.calls] == [pack_float32(ROWS[0]) * 450] * 2
