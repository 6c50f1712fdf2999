"""Faults inside the engine: the request that has one ends alone, the others give what they give alone."""

import json
import pickle
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from reliability_harness import Oracle, Server, Stream, each_at_once, greedy, wait_until

from headrace.messages.outputs import BatchStrOut, BatchTokenIDOut, DecodeOptions, StrOut, TokenIDOut
from headrace.messages.requests import PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.sampling.params import ResolvedSamplingParams

PROMPTS = [f"Request number {i} begins like this" for i in range(7)]
VICTIM = 3
HOLD_S = 0.5


def answers(replies: list[Any]) -> list[tuple[str, list[int]]]:
    return [(reply["text"], reply["output_ids"]) for reply in replies]


@pytest.mark.parametrize(
    "stage, kind, at_token, tracebacks",
    [
        ("admission", "raise", 0, 1),
        ("sampling", "raise", 0, 0),
        ("sampling", "raise", 5, 0),
        ("sampling", "nan", 0, 0),
        ("sampling", "nan", 5, 0),
        ("detokenize", "raise", 1, 1),
        ("detokenize", "raise", 5, 1),
    ],
)
def test_a_fault_of_one_request_is_that_one_500(
    server: Server, client: httpx.Client, oracle: Oracle, stage: str, kind: str, at_token: int, tracebacks: int
):
    oracle.expected_tracebacks = tracebacks  # logged once, at the boundary
    alone = answers([server.generate(client, prompt, 24) for prompt in PROMPTS])

    def send(i: int) -> httpx.Response:
        body = {"text": PROMPTS[i], "rid": f"{stage}-{i}", "sampling_params": greedy(24)}
        return client.post("/generate", json=body)

    server.inject(stage, kind, f"{stage}-{VICTIM}", at_token)
    with server.held(client, HOLD_S):
        replies = each_at_once(send, range(len(PROMPTS)))

    assert [reply.status_code for reply in replies] == [500 if i == VICTIM else 200 for i in range(len(PROMPTS))]
    for i, reply in enumerate(replies):
        if i != VICTIM:
            assert answers([reply.json()]) == [alone[i]]


@pytest.mark.parametrize("stage", ["sampling", "detokenize"])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_fault_within_a_stream_is_an_error_frame_before_done(
    server: Server, client: httpx.Client, oracle: Oracle, stage: str, path: str
):
    oracle.expected_tracebacks = int(stage == "detokenize")
    server.inject(stage, "raise", "breaks", at_token=5)
    body: dict[str, Any] = {"rid": "breaks"}
    if path == "/generate":
        body |= {"text": "Once", "sampling_params": greedy(50)}
    else:
        messages = [{"role": "user", "content": "Once"}]
        body |= {"model": "tiny-llama", "messages": messages, "max_tokens": 50, "temperature": 0, "ignore_eos": True}

    stream = Stream(client, path, body)
    stream.join()

    assert stream.status == 200
    assert stream.payloads[-1] == "[DONE]"
    assert stream.payloads.count("[DONE]") == 1
    assert sum('"error"' in payload for payload in stream.payloads) == 1
    # In one chunk or in several: outputs that come while the reply is written are joined.
    chunks = [json.loads(payload) for payload in stream.payloads[:-1]]
    texts = [
        chunk.get("text") or chunk["choices"][0]["delta"].get("content") for chunk in chunks if "error" not in chunk
    ]
    assert any(texts), "what was made before the fault was delivered"


def test_a_fault_of_the_whole_step_ends_its_rows_and_nobody_else(server: Server, client: httpx.Client):
    prompts = [f"Item {i} of a list" for i in range(16)]
    want = answers([server.generate(client, prompt, 20) for prompt in prompts])
    server.inject("forward", "raise", "item-0", at_token=5)
    rids = [f"item-{i}" for i in range(len(prompts))]

    body = {"text": prompts, "rid": rids, "sampling_params": greedy(20)}
    replies = client.post("/generate", json=body).json()

    failed = [i for i, reply in enumerate(replies) if reply["meta_info"]["finish_reason"]["type"] == "abort"]
    # Eight run at once: those were in the step; the rest waited and are served.
    assert failed == list(range(8))
    assert all(replies[i]["meta_info"]["finish_reason"]["status_code"] == 500 for i in failed)
    assert answers(replies)[8:] == want[8:]
    assert answers([server.generate(client, prompt, 20) for prompt in prompts]) == want


class TouchesAFile:
    """Unpickling it makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def junk(marker: Path) -> list[bytes]:
    encode = msgspec.msgpack.encode
    return [
        b"",
        b"\x00",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 10_000,
        b"\x91" * 100_000,
        encode(None),
        encode({"rid": "x"}),
        encode(["NoSuchMessage", 1]),
        encode(["AbortReq", "not a list"]),
        encode(["TokenizedGenerateReqInput", "x"]),
        encode(["BatchTokenIDOut", [["x"]]]),
        encode(["OperationReq", 2**64 - 1, "flush_cache", 1.5])[:-3],
        pickle.dumps(TouchesAFile(marker)),
        json.dumps(["ShutdownReq"]).encode(),
    ]


@pytest.mark.parametrize("name", ["to_scheduler", "to_detokenizer", "to_tokenizer"])
def test_frames_that_are_no_message_are_dropped_and_counted(
    server: Server, client: httpx.Client, tmp_path: Path, name: str
):
    frames = junk(tmp_path / "pickled")
    dropped, logged = server.state()["dropped_frames"], server.log().count("dropped a malformed frame")

    send_frames(server, name, frames)
    server.generate(client, "served all the same", 4)

    wait_until(
        lambda: server.log().count("dropped a malformed frame") - logged == len(frames), "every frame is reported"
    )
    assert server.state()["dropped_frames"] - dropped == (len(frames) if name == "to_scheduler" else 0)
    assert not (tmp_path / "pickled").exists()


@pytest.mark.parametrize(
    "name, messages",
    [
        (
            "to_scheduler",
            [
                TokenizedGenerateReqInput(
                    rid, PromptContent(ids), SampleTask(ResolvedSamplingParams(max_new_tokens=4, seed=0))
                )
                for rid, ids in (
                    ("empty", b""),
                    ("half a token", b"\x01\x00\x00"),
                    ("odd bytes", b"\x01\x00\x00\x00\x01\x00"),
                    ("beyond the vocabulary", b"\xff\xff\xff\x7f"),
                    ("negative", b"\xff\xff\xff\xff"),
                    ("too long", b"\x05\x00\x00\x00" * 5000),
                )
            ],
        ),
        (
            "to_detokenizer",
            [
                BatchTokenIDOut((TokenIDOut("unknown", b"\x01\x00\x00\x00", 1),)),
                BatchTokenIDOut((TokenIDOut("half a token", b"\x01", 1, options=DecodeOptions()),)),
            ],
        ),
        (
            "to_tokenizer",
            [
                BatchStrOut((StrOut("text", TokenIDOut("unknown", b"\x01\x00\x00\x00", 1)),)),
                BatchStrOut((StrOut("text", TokenIDOut("unknown", b"\x01", 1)),)),
            ],
        ),
    ],
)
def test_messages_with_impossible_contents_harm_nobody(
    server: Server, client: httpx.Client, oracle: Oracle, name: str, messages: list[Any]
):
    oracle.expected_tracebacks = int(name == "to_detokenizer")  # what cannot be decoded is logged

    send_frames(server, name, [msgspec.msgpack.encode(message) for message in messages])

    assert len(server.generate(client, "served all the same", 4)["output_ids"]) == 4


def send_frames(server: Server, name: str, frames: list[bytes]) -> None:
    (directory,) = server.ipc_directories()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(str(directory / name))
        for frame in frames:
            stranger.send(frame)


def test_a_stopped_process_is_unhealthy_until_it_goes_on(server: Server, client: httpx.Client):
    want = server.generate(client, "Stop and go", 30)["text"]
    scheduler = next(child for child in server.children if "scheduler" in child.cmdline())
    server.inject("forward", "sleep", "stops", at_token=5, seconds=HOLD_S)
    stream = Stream(client, "/generate", {"text": "Stop and go", "rid": "stops", "sampling_params": greedy(30)})
    assert stream.began.wait(20)
    scheduler.suspend()
    try:
        wait_until(lambda: client.get("/health").status_code == 503, "health is 503 while a process stands still")
        assert client.get("/ready").status_code == 503
        assert client.get("/ping").status_code == 200
    finally:
        scheduler.resume()
    wait_until(lambda: client.get("/health").status_code == 200, "health is 200 again")

    stream.join()
    assert stream.last["text"] == want
