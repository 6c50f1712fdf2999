"""From the engine's outputs to the bytes of replies, through the real front end: in its process, and in an HTTP worker."""

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fake_frontend import byte_tokenizer, served_model

sys.path.insert(0, str(Path(__file__).parent.parent / "frontend"))

from frontend_fakes import READY, FakeEngine, turns

from headrace.config.server_args import ServerArgs
from headrace.frontend.front_door import FrontDoor
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.channel import LocalChannels, LocalQueue
from headrace.messages.front import FrontNews
from headrace.messages.outputs import FinishReason, LogprobBlock, PromptPart, SamplesMoved
from headrace.messages.packing import pack_float32, pack_int32
from headrace.messages.requests import LogprobSpec
from headrace.server.app import create_app
from headrace.server.request_frontend import METHODS, RemoteCalls, remote_frontend

LENGTH = FinishReason("length", length=5)
STOP_STRING = FinishReason("stop", matched="END")
STOP_TOKEN = FinishReason("stop", matched=7)
ABORTED = FinishReason("abort", message="aborted")
FAULT = FinishReason("abort", message="it broke", status_code=500)

Output = tuple[int, str, FinishReason | None]
"""(number of the sample, its new text, why it ends)."""
Step = list[Output]

LETTERS: list[Step] = [[(0, letter, None)] for letter in "Hé 🙂"] + [[(0, "!", LENGTH)]]
MISSED: list[Step] = [[(0, "H", None), (0, "el", None), (0, "lo", None)], [(0, "EN", None)], [(0, "D", STOP_STRING)]]
# In a stream, a token that is held back and then trimmed has an offset beyond the text: nobody knew yet.
MISSED_END: list[Step] = [[(0, "H", None), (0, "el", None), (0, "lo", None)], [(0, "EN", None), (0, "D", STOP_STRING)]]
TWO: list[Step] = [
    [(1, "Wo", None)],
    [(0, "He", None), (1, "rl", None)],
    [(0, "llo", LENGTH)],
    [(1, "d", STOP_TOKEN)],
]


def logprobs_of(ids: list[int], spec: LogprobSpec) -> LogprobBlock:
    """Values that tell every token and every alternative from the others."""
    near = [(i + j) % 256 for i in ids for j in range(spec.top_num)]
    picked = [-1.0 - i / 8 - p / 1024 for i in ids for p in spec.token_ids]
    return LogprobBlock(
        pack_int32(ids),
        pack_float32([-i / 8 for i in ids]),
        pack_int32(near),
        pack_float32([-i / 4 for i in near]),
        pack_float32(picked),
    )


class House:
    """The application over a TokenizerManager whose engine is told what to say. remote: as in an HTTP worker."""

    def __init__(self, **options: Any) -> None:
        channels = LocalChannels()
        self.now_s = 100.0
        self.tokenizer = byte_tokenizer()
        self.engine = FakeEngine(channels, self.tokenizer)
        self.heard: set[str] = set()
        self.args = ServerArgs(model_path="fake", port=0, **options)
        self.manager = TokenizerManager(
            self.args,
            msgspec.structs.replace(READY, context_length=512, vocab_size=self.tokenizer.vocab_size),
            self.tokenizer,
            channels.sender("to_scheduler"),
            channels.receiver("to_tokenizer"),
            to_detokenizer=channels.sender("to_detokenizer"),
            clock=lambda: self.now_s,
        )

    async def ask(
        self, frontend: Any, path: str, body: dict[str, Any], steps: Sequence[Step], parts: Sequence[tuple[int, int]]
    ) -> httpx.Response:
        """The reply to a request whose samples say what `steps` have; outputs of one step come before anybody reads. parts: how many tokens of the
        prompt are computed, and were cached, before."""
        app = create_app(frontend, self.args, served_model(self.tokenizer))
        num_samples = 1 + max(number for step in steps for number, _, _ in step)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            reply = asyncio.create_task(client.post(path, json=body | {"rid": "r"}))
            await self.engine.until(lambda: len(self.engine.order) == num_samples)
            for processed, cached in parts:
                rids = tuple(self.engine.order)
                told = tuple(PromptPart(rid, processed, cached) for rid in rids)
                self.engine.outbox.send(SamplesMoved(rids, prompts=told))
                await turns(80)
                self.now_s += 0.5
            for step in steps:
                self.now_s += 0.125
                for number, text, finish in step:
                    self.say(self.engine.order[number], text, finish)
                await turns(80)
            return await reply

    def say(self, rid: str, text: str, finish: FinishReason | None) -> None:
        """One output, with the logprobs that were asked for."""
        request, ids = self.engine.requests[rid], self.tokenizer.encode(text)
        more = {}
        if (spec := request.task.logprobs) is not None:
            prompt = request.content.ids(spec.prompt_start)
            more["logprobs"] = logprobs_of(ids, spec)
            more["prompt_logprobs"] = logprobs_of(prompt, spec) if prompt and rid not in self.heard else None
        if request.task.return_hidden_states:
            more["hidden_states"] = pack_float32([value for i in ids for value in (i / 8, -i / 8)])
        self.heard.add(rid)
        self.engine.emit(rid, finish=finish, ids=ids, **more)


@asynccontextmanager
async def worker_frontend(manager: TokenizerManager):
    """`manager` as an HTTP worker sees it."""
    to_front, to_worker = LocalQueue(), LocalQueue()
    door = FrontDoor(manager, METHODS, to_front, lambda: FrontNews([], "default", True, "info"), {}.get)
    calls = RemoteCalls(1, to_front, to_worker)
    task = asyncio.create_task(door.run())
    calls.start()
    door.add(1, to_worker)
    await calls.wait_for_news()
    yield remote_frontend(calls)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def reply(
    path: str,
    body: dict[str, Any],
    steps: Sequence[Step],
    remote: bool = False,
    parts: Sequence[tuple[int, int]] = (),
    **options: Any,
) -> httpx.Response:
    house = House(**options)
    try:
        if not remote:
            return await house.ask(house.manager, path, body, steps, parts)
        async with worker_frontend(house.manager) as frontend:
            return await house.ask(frontend, path, body, steps, parts)
    finally:
        await house.manager.close()


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream that ends as it should."""
    *frames, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies say when they were made."""
    monkeypatch.setattr("headrace.server.openai.base.time", SimpleNamespace(time=lambda: 1.0))


NATIVE: dict[str, Any] = {"text": "hi there", "sampling_params": {"max_new_tokens": 64}}
NATIVE_LOGPROBS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5, 9],
    "return_text_in_logprobs": True,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
TEXT: dict[str, Any] = {"prompt": "hi there", "max_tokens": 64}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

CASES = {
    "native": ("/generate", NATIVE, LETTERS),
    "native, logprobs, late reader": ("/generate", NATIVE | NATIVE_LOGPROBS, MISSED),
    "native, two": ("/generate", NATIVE | NATIVE_LOGPROBS | {"sampling_params": {"n": 2}}, TWO),
    "native, hidden states": ("/generate", NATIVE | {"return_hidden_states": True}, LETTERS),
    "native, aborted": ("/generate", NATIVE, [[(0, "ab", None)], [(0, "", ABORTED)]]),
    "native, fault": ("/generate", NATIVE, [[(0, "ab", None)], [(0, "", FAULT)]]),
    "chat": ("/v1/chat/completions", CHAT, LETTERS),
    "chat, stop, late reader": (
        "/v1/chat/completions",
        CHAT | {"stop": "END", "logprobs": True, "top_logprobs": 2},
        MISSED,
    ),
    "chat, two": ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "return_token_ids": True}, TWO),
    "chat, fault": ("/v1/chat/completions", CHAT, [[(0, "ab", None)], [(0, "c", FAULT)]]),
    "text": ("/v1/completions", TEXT, LETTERS),
    "text, echo, late reader": ("/v1/completions", TEXT | {"stop": "END", "echo": True, "logprobs": 2}, MISSED_END),
    "text, two": ("/v1/completions", TEXT | {"n": 2, "logprobs": 2, "return_token_ids": True}, TWO),
    "text, picked": ("/v1/completions", TEXT | {"logprobs": 1, "logprob_token_ids": [5, 9]}, LETTERS),
    "text, aborted": ("/v1/completions", TEXT, [[(0, "ab", None)], [(0, "", ABORTED)]]),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
async def test_an_http_worker_replies_the_same_bytes(case: str, stream: bool):
    path, body, steps = CASES[case]
    body = body | {"stream": stream} | (USAGE if stream and path != "/generate" else {})
    here, there = [await reply(path, body, steps, remote) for remote in (False, True)]

    assert (here.status_code, here.content) == (there.status_code, there.content)


def joined_native(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that incremental chunks add up to."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        before = whole.get(chunk.get("index", 0))
        if before is not None:
            meta, old = chunk["meta_info"], before["meta_info"]
            meta |= {name: old[name] + meta[name] for name in meta if name.endswith("logprobs")}
            chunk |= {name: before[name] + chunk[name] for name in ("text", "output_ids")}
        whole[chunk.get("index", 0)] = chunk
    return [whole[index] for index in sorted(whole)]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("native") and "fault" not in case])
async def test_the_chunks_of_a_native_stream_add_up_to_the_answer(case: str):
    path, body, steps = CASES[case]
    whole = (await reply(path, body, steps)).json()
    whole = whole if isinstance(whole, list) else [whole]
    growing = events(await reply(path, body | {"stream": True}, steps))
    deltas = events(await reply(path, body | {"stream": True}, steps, incremental_streaming_output=True))
    last = {chunk.get("index", 0): chunk for chunk in growing}

    assert joined_native(deltas) == whole
    assert [last[index] for index in sorted(last)] == whole


async def test_hidden_states_come_with_the_end_a_row_for_each_token():
    path, body, steps = CASES["native, hidden states"]
    whole = (await reply(path, body, steps)).json()
    chunks = events(await reply(path, body | {"stream": True}, steps))

    assert whole["meta_info"]["hidden_states"] == [[i / 8, -i / 8] for i in whole["output_ids"]]
    assert ["hidden_states" in chunk["meta_info"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def joined_choices(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that chunks add up to: text, ids, logprobs (a list of lists, however the route writes them), the end."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "ids": [], "logprobs": {}})
            choice["text"] += part.get("delta", part).get("content" if "delta" in part else "text") or ""
            choice["ids"] += part.get("token_ids", [])
            for name, entries in (part["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(entries or [])
            if part["finish_reason"] is not None:
                assert "end" not in choice
                choice["end"] = (part["finish_reason"], part["matched_stop"], part["stop_reason"])
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("native") and "fault" not in case])
async def test_the_chunks_of_an_openai_stream_add_up_to_the_reply(case: str):
    path, body, steps = CASES[case]
    whole = (await reply(path, body, steps)).json()
    chunks = events(await reply(path, body | {"stream": True} | USAGE, steps))
    wanted = [
        {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "ids": choice.get("token_ids", []),
            "logprobs": {name: entries or [] for name, entries in (choice["logprobs"] or {}).items()},
            "end": (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]),
        }
        for choice in whole["choices"]
    ]

    assert joined_choices(chunks) == wanted
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])


@pytest.mark.parametrize("case", ["chat, two", "text, two"])
async def test_continuous_usage_counts_the_ids_of_its_choice_so_far(case: str):
    path, body, steps = CASES[case]
    *chunks, _ = events(await reply(path, body | {"stream": True} | USAGE, steps))
    num_ids: dict[int, int] = {}
    for chunk in chunks:
        [part] = chunk["choices"]
        index = part["index"]
        num_ids[index] = num_ids.get(index, 0) + len(part.get("token_ids", []))
        if num_ids[index]:
            assert chunk["usage"]["completion_tokens"] == num_ids[index]

    assert num_ids == {0: 5, 1: 5}


async def test_a_prompts_logprobs_come_once_and_to_every_sample_however_late_its_first_sample_speaks():
    path, body, steps = CASES["native, two"]
    deltas = events(await reply(path, body | {"stream": True}, steps, incremental_streaming_output=True))
    lists = [(chunk["index"], chunk["meta_info"]["input_token_logprobs"]) for chunk in deltas]
    shown = [[entry[2] for entry in entries] for _, entries in lists if entries]

    assert {index for index, entries in lists if entries} == {0, 1}
    assert shown == [list("hi there")] * 2
    assert lists[0][1][0][0] is None


PROGRESS = {"stream": True, "return_progress": True}
STREAMS = {case: CASES[case] for case in CASES if "two" not in case and "fault" not in case}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("case", STREAMS)
async def test_a_stream_says_how_far_its_prompt_is_and_is_the_same_otherwise(case: str, remote: bool):
    path, body, steps = CASES[case]
    chunks = events(await reply(path, body | PROGRESS, steps, remote, parts=[(2, 2), (3, 2), (4, 2)]))
    told = [chunk.pop("prompt_progress") for chunk in chunks if "prompt_progress" in chunk]
    total = told[0]["total"]

    assert [(each["total"], each["cache"], each["processed"]) for each in told[:3]] == [
        (total, 2, 2),
        (total, 2, 3),
        (total, 2, 4),
    ]
    assert [each["time_ms"] for each in told] == [0, 500, 1000, 1625]
    assert told[3]["processed"] == total
    without = events(await reply(path, body | {"stream": True}, steps, remote))
    if path == "/generate":
        said = ("text", "output_ids")
        assert [[chunk[name] for name in said] for chunk in chunks[3:]] == [
            [chunk[name] for name in said] for chunk in without
        ]
        logprobs = "input_token_logprobs"
        assert chunks[3]["meta_info"].get(logprobs) == without[0]["meta_info"].get(logprobs)
    else:
        assert joined_choices(chunks) == joined_choices(without)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
async def test_a_prompt_of_one_step_is_told_as_a_whole(path: str):
    body = {"/generate": NATIVE, "/v1/chat/completions": CHAT, "/v1/completions": TEXT}[path]
    chunks = events(await reply(path, body | PROGRESS, LETTERS))
    [told] = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]

    assert told["processed"] == told["total"] > 0


@pytest.mark.parametrize("case", ["native, two", "chat, two", "text, two"])
async def test_samples_of_one_prompt_tell_once(case: str):
    path, body, steps = CASES[case]
    chunks = events(await reply(path, body | PROGRESS, steps, parts=[(2, 0)]))
    told = [chunk for chunk in chunks if "prompt_progress" in chunk]

    assert [chunk["prompt_progress"]["processed"] for chunk in told] == [2, told[0]["prompt_progress"]["total"]]
    assert {chunk.get("index", 0) or chunk.get("choices", [{"index": 0}])[0]["index"] for chunk in told} == {0}


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
async def test_progress_of_a_reply_that_does_not_stream_is_refused(path: str):
    body = {"/generate": NATIVE, "/v1/chat/completions": CHAT, "/v1/completions": TEXT}[path]
    house = House()
    app = create_app(house.manager, house.args, served_model(house.tokenizer))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        answer = await client.post(path, json=body | {"return_progress": True})
    await house.manager.close()

    assert answer.status_code == 400
    assert "return_progress needs stream" in answer.json()["error"]["message"]
