"""A real server, the official OpenAI client, and plain HTTP where the framing matters."""

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam
from server_process import ServerProcess, events

from headrace.text.tokenizers import Tokenizer

MODEL = "smollm2"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France, and which river flows through it?"},
]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
LONG: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(smollm2_server: ServerProcess) -> ServerProcess:
    return smollm2_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


# -- chat


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)

    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_same_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))

    *content, last = chunks
    deltas = [chunk.choices[0].delta for chunk in content]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in content]
    assert reasons == [None] * (len(content) - 1) + [whole.choices[0].finish_reason]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(last.usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]


def test_a_stream_without_usage_has_no_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))

    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_seeded_samples_are_repeatable_and_in_order(client: openai.OpenAI) -> None:
    sampled: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 10}
    first = client.chat.completions.create(**sampled)
    again = client.chat.completions.create(**sampled)
    alone = client.chat.completions.create(**{**sampled, "n": 1})

    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    assert alone.choices[0].message.content == texts[0]
    assert first.usage is not None
    assert alone.usage is not None
    assert first.usage.prompt_tokens == alone.usage.prompt_tokens


def test_streamed_samples_each_have_one_end(client: openai.OpenAI) -> None:
    sampled: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 10}
    whole = client.chat.completions.create(**sampled)
    texts, reasons = ["", "", ""], [[], [], []]  # type: ignore[var-annotated]
    options: Any = {"include_usage": True}
    usages = []
    for chunk in client.chat.completions.create(**sampled, stream=True, stream_options=options):
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            assert not reasons[choice.index], "nothing follows the finish reason"
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []

    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
    assert whole.usage is not None
    assert [usage.total_tokens for usage in usages] == [whole.usage.total_tokens]


def test_another_seed_gives_another_text(client: openai.OpenAI) -> None:
    texts = {
        client.chat.completions.create(**{**GREEDY, "temperature": 1.0, "seed": seed, "max_tokens": 10})
        .choices[0]
        .message.content
        for seed in (1, 2, 1)
    }

    assert len(texts) == 2


def test_chat_logprobs_fit_the_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    streamed = list(client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True))

    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert whole.usage is not None
    assert len(content) == whole.usage.completion_tokens
    spoken = b"".join(bytes(entry.bytes or []) for entry in content).decode()
    assert spoken.removesuffix("<|im_end|>") == whole.choices[0].message.content
    for entry in content:
        # Greedy: the token is the most likely one.
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    from_chunks = [
        entry
        for chunk in streamed
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or []
    ]
    assert from_chunks == content


# -- limits and stops


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**{**GREEDY, "max_tokens": 3})

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_more_than_the_context_is_lowered_to_the_room_and_noted(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "max_tokens": 100_000, "extra_body": {"stop_regex": "."}}
    reply = client.chat.completions.with_raw_response.create(**asked)
    usage = reply.parse().usage
    assert usage is not None
    room = client.models.retrieve(MODEL).model_dump()["max_model_len"] - usage.prompt_tokens
    assert reply.headers["x-headrace-noted"] == f"max_tokens={room}"


class City(pydantic.BaseModel):
    """What the model is asked to say of a city."""

    name: Annotated[str, pydantic.StringConstraints(max_length=20)]
    country: Literal["France", "Italy", "Spain"]
    rivers: Annotated[list[Literal["Seine", "Tiber", "Ebro"]], pydantic.Field(min_length=1, max_length=2)]
    population: Annotated[int, pydantic.Field(ge=0, le=99_999_999)] | None


def test_a_reply_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    asked = {name: value for name, value in GREEDY.items() if name != "max_tokens"} | {"max_completion_tokens": 200}
    answer = client.chat.completions.parse(**asked, response_format=City)
    assert answer.choices[0].finish_reason == "stop"
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
    assert city.country == "France"
    with client.chat.completions.stream(**asked, response_format=City) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == city


def test_a_json_object_is_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY | {"max_tokens": 60}, response_format={"type": "json_object"})
    text = answer.choices[0].message.content
    assert text is not None
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_is_refused_is_a_400_that_names_keyword_and_place(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "tags", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=r"uniqueItems.*#/properties/tags") as refusal:
        client.chat.completions.create(**GREEDY, response_format=asked, stream=stream)
    assert refusal.value.param == "response_format"


def test_completions_have_16_tokens_unless_told(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Count: 1, 2, 3,", temperature=0, extra_body={"ignore_eos": True}
    )

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("as_list", [False, True], ids=["one", "list"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_across_tokens_is_trimmed(client: openai.OpenAI, as_list: bool, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "The days: Monday, Tuesday,", "temperature": 0, "max_tokens": 12}
    full = client.completions.create(**body, logprobs=0).choices[0]
    assert full.logprobs is not None
    tokens = full.logprobs.tokens or []
    # The end of one token and the beginning of the next.
    stop = tokens[4][-2:] + tokens[5][:2]
    wanted = full.text[: full.text.index(stop)]
    stops: Any = ["never to be seen", stop] if as_list else stop

    if stream:
        chunks = list(client.completions.create(**body, stop=stops, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**body, stop=stops).choices[0]
        text, reason = choice.text, choice.finish_reason

    assert text == wanted
    assert reason == "stop"


def test_a_stop_string_can_be_kept(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "The days: Monday, Tuesday,", "temperature": 0, "max_tokens": 12}
    kept = client.completions.create(**body, stop=["sday"], extra_body={"no_stop_trim": True}).choices[0]

    assert "sday" in kept.text
    assert kept.finish_reason == "stop"


# -- legacy completions


def test_completions_of_several_prompts_keep_their_order(client: openai.OpenAI) -> None:
    prompts = ["The capital of Italy is", "The capital of Spain is"]
    both = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=6, n=2)
    alone = [client.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=6) for p in prompts]

    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [a.choices[0].text for a in alone for _ in range(2)]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)


def test_completion_logprobs_with_echo_cover_the_prompt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "The Eiffel Tower is in Paris"
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4, "logprobs": 2}
    echoed = client.completions.create(**body, echo=True).choices[0]
    plain = client.completions.create(**body).choices[0]

    assert echoed.text == prompt + plain.text
    assert echoed.logprobs is not None
    assert plain.logprobs is not None
    tokens, values, tops = echoed.logprobs.tokens, echoed.logprobs.token_logprobs, echoed.logprobs.top_logprobs
    assert tokens is not None
    assert values is not None
    assert tops is not None
    num_prompt = len(tokenizer.encode(prompt))
    assert "".join(tokens) == echoed.text
    assert values[0] is None
    assert all(value is not None and value <= 0 for value in values[1:])
    assert tokens[num_prompt:] == plain.logprobs.tokens
    assert values[num_prompt:] == plain.logprobs.token_logprobs
    assert all(len(top) in (2, 3) for top in tops[1:])
    offsets = echoed.logprobs.text_offset or []
    assert [echoed.text[at : at + len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens


def test_streamed_completion_logprobs_are_the_whole_ones(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "The sky is", "temperature": 0, "max_tokens": 6, "logprobs": 1}
    whole = client.completions.create(**body, echo=True).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**body, echo=True, stream=True)]

    assert whole.logprobs is not None
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [entry for item in logprobs for entry in getattr(item, name)] == getattr(whole.logprobs, name)


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    text = client.completions.create(**body, prompt="Water boils at")
    ids = client.completions.create(**body, prompt=tokenizer.encode("Water boils at"))

    assert ids.choices[0].text == text.choices[0].text


# -- models and tokens


def test_models_name_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**GREEDY, "model": "gpt-4"})


@pytest.mark.parametrize(
    "text", ["Hello, world!", "naïve 漢字 😀👩‍👩‍👧 e\u0301", "  two\n\n\tlines ", "<|im_end|> too"]
)
def test_tokens_and_back(server: ServerProcess, text: str) -> None:
    tokens = server.post("/tokenize", {"model": MODEL, "prompt": text})
    back = server.post("/detokenize", {"tokens": tokens["tokens"], "skip_special_tokens": False})

    assert back["text"] == text
    assert tokens["count"] == len(tokens["tokens"])


def test_a_chat_costs_the_tokens_that_tokenize_counts(server: ServerProcess, client: openai.OpenAI) -> None:
    count = server.post("/tokenize", {"messages": MESSAGES})["count"]
    usage = client.chat.completions.create(**{**GREEDY, "max_tokens": 1}).usage

    assert usage is not None
    assert usage.prompt_tokens == count


# -- the native route


def test_frames_of_a_native_stream(server: ServerProcess) -> None:
    body = {"text": "My favourite colour is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    whole = server.post("/generate", body)
    chunks = events(server.stream("/generate", body))

    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    for earlier, later in pairwise(chunks):
        assert later["text"].startswith(earlier["text"])


def test_a_native_stream_of_a_batch_has_an_index(server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "text": ["One, two,", "A, B,"],
        "sampling_params": {"temperature": 0.8, "seed": 1, "n": 2, "max_new_tokens": 5, "ignore_eos": True},
    }
    whole = server.post("/generate", body)
    chunks = events(server.stream("/generate", body))

    ends = {chunk["index"]: chunk for chunk in chunks if chunk["meta_info"]["finish_reason"] is not None}
    assert sorted(ends) == [0, 1, 2, 3]
    assert [ends[i]["output_ids"] for i in range(4)] == [output["output_ids"] for output in whole]
    assert [output["index"] for output in whole] == [0, 1, 2, 3]


def test_an_error_before_the_first_token_is_a_true_status(server: ServerProcess) -> None:
    body = {"text": "hello", "stream": True, "sampling_params": {"temperature": -1}}
    reply = httpx.post(f"{server.url}/generate", json=body)

    assert reply.status_code == 400
    assert "temperature" in reply.json()["error"]["message"]


def test_a_scripted_output_arrives_whole_in_every_stream(server: ServerProcess) -> None:
    text = "naïve 漢字かな 😀👩‍👩‍👧‍👦 🏴‍☠️ done"
    body = {
        "text": text,
        "custom_logit_processor": "play",
        "sampling_params": {"temperature": 0, "max_new_tokens": 200},
    }
    whole = server.post("/generate", body)
    chunks = events(server.stream("/generate", body))

    assert whole["text"] == text
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert chunks[-1]["text"] == text
    assert len(chunks) > 1
    assert all(text.startswith(chunk["text"]) for chunk in chunks)


# -- health, information, metrics


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping"])
def test_health(server: ServerProcess, path: str) -> None:
    assert httpx.get(server.url + path, timeout=30).status_code == 200


def test_information(server: ServerProcess) -> None:
    model = server.get("/model_info")
    info = server.get("/server_info")
    load = server.get("/v1/loads")["loads"]

    assert model["served_model_name"] == MODEL
    assert model["context_length"] == 8192
    assert info["max_total_num_tokens"] == 24576
    assert info["model_path"] == MODEL
    assert (info["api_key"], info["admin_api_key"]) == (None, None)
    assert [item["max_total_tokens"] for item in load] == [24576]
    assert server.get("/get_model_info") == model


COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "prefix_query_tokens_total",
    "requests_total",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "queue_time_seconds",
)
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "gen_throughput",
    "token_usage",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "cache_hit_rate",
)


def test_metrics_have_their_names_and_move(server: ServerProcess) -> None:
    names = [*COUNTERS, "aborted_requests_total", "retracted_requests_total", *GAUGES]
    names += [f"{name}_count" for name in HISTOGRAMS]
    names += [f"{name}_sum" for name in HISTOGRAMS]
    prompt = "Metrics count this prompt of some length, twice: the second time a part of it comes from the cache."
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}}
    server.wait_until_idle()  # of the tests before
    before = server.metrics()
    first = server.post("/generate", body)
    server.post("/generate", body)
    server.wait_until_idle()
    # The scheduler pushes its own counters when it becomes idle, behind the last output: perhaps those of the tests before, first.
    asked = 2 * first["meta_info"]["prompt_tokens"]
    for _ in range(1000):
        after = server.metrics()
        if after["headrace:prefix_query_tokens_total"] >= before["headrace:prefix_query_tokens_total"] + asked:
            break

    assert [name for name in names if f"headrace:{name}" not in after] == []
    moved = {name: after[f"headrace:{name}"] - before[f"headrace:{name}"] for name in COUNTERS}
    assert moved["prompt_tokens_total"] == 2 * first["meta_info"]["prompt_tokens"]
    assert moved["generation_tokens_total"] == 10
    assert moved["requests_total"] == 2
    assert moved["cached_tokens_total"] >= 16
    assert moved["prefix_query_tokens_total"] > 0
    for name in HISTOGRAMS:
        assert after[f"headrace:{name}_count"] > before[f"headrace:{name}_count"]


def test_a_flush_empties_the_cache(server: ServerProcess) -> None:
    body = {"text": "A prompt of more than sixteen tokens, so that a page of it can be found again: " * 2}
    body |= {"sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    server.post("/generate", body)
    assert server.post("/generate", body)["meta_info"]["cached_tokens"] > 0
    server.wait_until_idle()

    assert server.post("/flush_cache", {})["success"] is True
    assert server.post("/generate", body)["meta_info"]["cached_tokens"] == 0


# -- aborts and disconnects


def test_an_abort_ends_a_stream_with_what_there_is(server: ServerProcess) -> None:
    body = {"text": "Tell a long story.", "rid": "story-1", "sampling_params": LONG, "stream": True}
    chunks: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
                if len(chunks) == 3:
                    # Not of this rid: harmless.
                    server.post("/abort_request", {"rid": "story-"})
                    server.post("/abort_request", {"rid": "story-1"})
        assert line == "" or line == "data: [DONE]"

    last = chunks[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["text"].startswith(chunks[2]["text"])
    assert 3 <= last["meta_info"]["completion_tokens"] < LONG["max_new_tokens"]
    state = server.wait_until_idle()
    assert state["pool"]["leased_tokens"] == 0


def test_an_abort_reaches_all_samples(server: ServerProcess) -> None:
    answers: list[Any] = []
    body = {"text": "Tell a long story.", "rid": "story-n", "sampling_params": LONG | {"n": 3}}
    caller = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    caller.start()
    _wait_until_running(server, 3)

    server.post("/abort_request", {"rid": "story-n"})
    caller.join()

    assert [output["meta_info"]["finish_reason"]["type"] for output in answers[0]] == ["abort"] * 3


@pytest.mark.parametrize("route", ["generate", "chat", "chat without stream"])
def test_a_client_that_leaves_stops_all_its_samples(server: ServerProcess, route: str) -> None:
    aborted = server.wait_until_idle()["num_aborted"]
    stream = "without" not in route
    if route == "generate":
        path, body = "/generate", {"text": "Tell a long story.", "sampling_params": LONG | {"n": 3}, "stream": True}
    else:
        path = "/v1/chat/completions"
        body = {**GREEDY, "n": 3, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    with httpx.Client(timeout=60) as http:
        if stream:
            with http.stream("POST", server.url + path, json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                _wait_until_running(server, 3)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(server.url + path, json=body, timeout=httpx.Timeout(60, read=0.3))

    state = server.wait_until_idle()
    assert state["num_aborted"] - aborted == 3
    assert state["pool"]["leased_tokens"] == 0
    assert state["pool"]["consistent"] is True
    assert state["pool"]["request_slots_free"] == state["pool"]["request_slots_total"]


def _wait_until_running(server: ServerProcess, count: int) -> None:
    for _ in range(500):
        if server.state()["num_running"] == count:
            return
    raise AssertionError(f"never {count} running: {server.state()}")
