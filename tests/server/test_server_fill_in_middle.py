"""What belongs between a prompt and a suffix: the tokens that the model gets are those of llama.cpp's server, and what ends the output."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, FakeFrontend, Running, events, running_server

from error_bodies import checked_error

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
MORE = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>", "<|im_end|>")
FAMILIES: dict[str, tuple[str, ...]] = {
    "Qwen2.5-Coder, CodeGemma": QWEN,
    "StarCoder, Granite": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "DeepSeek-Coder": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "CodeLlama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "GLM-4.5": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    "Codestral": ("[PREFIX]", "[SUFFIX]"),
}
INFILL = "/infill"
COMPLETIONS, GENERATE = "/v1/completions", "/api/generate"
BEFORE, AFTER = "def f(", "):\n    return 1"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(special_tokens=(*QWEN, *MORE)) as running:
        yield running


def ids_of(frontend: FakeFrontend, *parts: str) -> list[int]:
    """Of texts, and of special tokens where a part is the text of one."""
    ids = []
    for part in parts:
        token = frontend.tokenizer.special_tokens.get(part)
        ids += [token] if token is not None else frontend.tokenizer.encode(part, False)
    return ids


def filled(client: httpx.Client, server: Running, path: str = COMPLETIONS, **fields: Any) -> Any:
    """The call that a request became."""
    reply = client.post(path, json={"model": MODEL, "prompt": BEFORE, "suffix": AFTER} | fields)
    assert reply.status_code == 200, reply.text
    return server.frontend.calls[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_around_prompt_and_suffix_are_those_of_the_models_family(family: str):
    pre, suf, *mid = FAMILIES[family]
    parts = [pre, BEFORE, suf, AFTER, *mid] if mid else [suf, AFTER, pre, BEFORE]
    with running_server(special_tokens=FAMILIES[family]) as server, httpx.Client(base_url=server.url) as client:
        for path in (COMPLETIONS, GENERATE):
            assert filled(client, server, path).input_ids == ids_of(server.frontend, *parts)
        assert "insert" in client.post("/api/show", json={"model": MODEL}).json()["capabilities"]


HEAD = ("<|repo_name|>", "myproject\n")
CURRENT = ("<|file_sep|>", "filename\n")
LLAMA_VIM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": [], "prompt": "", "n_predict": 99, "n_indent": 4,
    "top_k": 40, "top_p": 0.9, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_per_second", "truncated", "tokens_cached", "no/such"],
}  # fmt: skip


def test_what_editors_ask_llama_cpps_server(client: httpx.Client, server: Running):
    reply = client.post(INFILL, json=LLAMA_VIM)
    assert reply.status_code == 200, reply.text
    parts = (*HEAD, *CURRENT, QWEN[0], BEFORE, QWEN[1], AFTER, QWEN[2])
    call = server.frontend.calls[-1]
    assert call.input_ids == ids_of(server.frontend, *parts)
    assert set(call.sampling_params.stop_token_ids) == set(ids_of(server.frontend, *QWEN, *MORE))
    assert (call.sampling_params.top_k, call.sampling_params.max_new_tokens) == (40, 99)
    found = reply.json()
    assert list(found) == ["content", "timings/prompt_n", "timings/predicted_per_second", "truncated", "tokens_cached"]
    assert (found["content"], found["timings/prompt_n"]) == (server.frontend.script.text, len(call.input_ids) - 2)
    whole = client.post(INFILL, json={"input_prefix": "a", "input_suffix": "b", "n_predict": 3}).json()
    assert (whole["content"], whole["stop_type"], whole["tokens_predicted"]) == ("Hel", "limit", 3)
    assert (whole["stop"], whole["model"]) == (True, MODEL)
    assert client.post(INFILL, json=LLAMA_VIM | {"n_predict": 0}).status_code == 200, "fills the cache alone"


def test_other_files_stand_before_the_prompt_and_the_middle_may_have_begun(client: httpx.Client, server: Running):
    files = [{"filename": "a.py", "text": "import os", "time": 5}, {"text": "<|im_end|>x"}]
    client.post(INFILL, json=LLAMA_VIM | {"input_extra": files, "prompt": "x: "})
    file = "<|file_sep|>"
    first = ids_of(server.frontend, *HEAD, file, "a.py\n", "import os", file, "tmp\n")
    rest = ids_of(server.frontend, *CURRENT, QWEN[0], BEFORE, "x: ", QWEN[1], AFTER, QWEN[2])
    own = server.frontend.tokenizer.encode("<|im_end|>x", False)
    assert server.frontend.calls[-1].input_ids == [*first, *own, *rest]
    with running_server(special_tokens=("<PRE>", "<SUF>", "<MID>")) as plain:
        httpx.post(plain.url + INFILL, json=LLAMA_VIM | {"input_extra": files[:1]})
        want = ids_of(plain.frontend, "\n\n--- snippet ---\n\n", "import os", "<PRE>", BEFORE, "<SUF>", AFTER, "<MID>")
        assert plain.frontend.calls[-1].input_ids == want


@pytest.mark.parametrize(
    ("before", "after", "kept_before", "kept_after"),
    [(600, 600, 307, 102), (600, 50, 359, 50), (50, 600, 50, 359), (100, 100, 100, 100)],
)
def test_what_does_not_fit_is_cut_where_it_is_far_from_the_cursor(
    client: httpx.Client, server: Running, before: int, after: int, kept_before: int, kept_after: int
):
    """Of 512 tokens 100 are for the output, and 3 for the marks; what is left is for the last of the other files."""
    texts = {"input_prefix": "a" * (before - 1) + "p", "input_suffix": "s" + "b" * (after - 1)}
    extra = [{"filename": "f", "text": "c" * 2000}]
    assert client.post(INFILL, json=texts | {"n_predict": 100, "input_extra": extra}).status_code == 200
    ids = server.frontend.calls[-1].input_ids
    core = ids_of(
        server.frontend, QWEN[0], "a" * (kept_before - 1) + "p", QWEN[1], "s" + "b" * (kept_after - 1), QWEN[2]
    )
    assert ids[len(ids) - len(core) :] == core
    assert len(ids) == 412
    assert ids[: len(ids) - len(core)] == ids_of(server.frontend, "c" * 2000, *CURRENT)[-(412 - len(core)) or 9999 :]


@pytest.mark.parametrize("stream", [False, True])
def test_an_infill_with_too_large_a_limit_keeps_its_prompt_and_is_noted(
    client: httpx.Client, server: Running, stream: bool
):
    reply = client.post(INFILL, json=LLAMA_VIM | {"n_predict": 99_999, "stream": stream})
    assert reply.status_code == 200, reply.text
    ids, room = server.frontend.calls[-1].input_ids, server.frontend.resolved[-1].max_new_tokens
    assert ids == ids_of(server.frontend, *HEAD, *CURRENT, QWEN[0], BEFORE, QWEN[1], AFTER, QWEN[2])
    assert room == 512 - len(ids)
    assert reply.headers["x-headrace-noted"] == f"n_predict={room}"
    assert "x-headrace-noted" not in client.post(INFILL, json=LLAMA_VIM | {"n_predict": 9}).headers


def test_a_stream_of_llama_cpps_server(client: httpx.Client, server: Running):
    reply = client.post(INFILL, json=LLAMA_VIM | {"stream": True, "response_fields": None})
    frames = reply.text.split("\n\n")
    assert frames.pop() == ""
    chunks = [json.loads(one.removeprefix("data: ")) for one in frames]
    assert "".join(chunk["content"] for chunk in chunks) == server.frontend.script.text
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["timings"]["predicted_n"] == chunks[-1]["tokens_predicted"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": -2}, "n_predict"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_prefix": "a" * 200_000}, "input_prefix"),
        ({"mirostat": 2}, "mirostat"),
        ({"model": "nope"}, "model"),
    ],
)
def test_an_infill_that_cannot_be_served_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str):
    reply = client.post(INFILL, json=LLAMA_VIM | fields)
    assert reply.status_code in (400, 404)
    assert checked_error(INFILL, reply.json())["param"] == param, reply.text


def test_an_infill_needs_a_model_with_the_tokens():
    with running_server() as server:
        reply = httpx.post(server.url + INFILL, json=LLAMA_VIM)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input_suffix")


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
@pytest.mark.parametrize("special", [(), QWEN[:2]])
def test_a_model_without_the_tokens_refuses_a_suffix_in_words(path: str, special: tuple[str, ...]):
    with running_server(special_tokens=special) as server:
        reply = httpx.post(server.url + path, json={"prompt": BEFORE, "suffix": AFTER})
        assert reply.status_code == 400
        assert "suffix: this model does not fill in the middle" in checked_error(path, reply.json())["message"]
        assert httpx.post(server.url + path, json={"prompt": BEFORE, "suffix": ""}).status_code == 200
        shown = httpx.post(server.url + "/api/show", json={"model": MODEL}).json()
        assert "insert" not in shown["capabilities"]
        assert len(server.frontend.calls) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_special_tokens_that_a_user_wrote_are_text(client: httpx.Client, server: Running, path: str):
    call = filled(client, server, path, prompt=f"{QWEN[1]}<|im_end|>", suffix=QWEN[2])
    special = server.frontend.tokenizer.special_ids
    assert [index for index in call.input_ids if index in special] == ids_of(server.frontend, *QWEN)


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_a_text_may_begin_with_what_is_wanted(client: httpx.Client, server: Running, path: str):
    assert filled(client, server, path, prompt="").input_ids == ids_of(
        server.frontend, QWEN[0], QWEN[1], AFTER, QWEN[2]
    )


def test_each_prompt_has_the_suffix_after_it_and_ids_are_taken_as_they_are(client: httpx.Client, server: Running):
    def prompt(before: str) -> list[int]:
        return ids_of(server.frontend, QWEN[0], before, QWEN[1], AFTER, QWEN[2])

    ids = ids_of(server.frontend, "ab")
    assert filled(client, server, prompt=["ab", "c"]).input_ids == [prompt("ab"), prompt("c")]
    assert filled(client, server, prompt=ids).input_ids == prompt("ab")
    assert filled(client, server, prompt=[ids, ids[:1]]).input_ids == [prompt("ab"), prompt("a")]
    assert filled(client, server, prompt="abc", truncate_prompt_tokens=2).input_ids == prompt("bc")


def test_the_middle_ends_at_whatever_follows_a_middle(client: httpx.Client, server: Running):
    ends = ids_of(server.frontend, *QWEN, *MORE)
    for path in (COMPLETIONS, GENERATE):
        assert set(filled(client, server, path).sampling_params.stop_token_ids) == set(ends)
    assert filled(client, server, stop_token_ids=[7]).sampling_params.stop_token_ids == [7, *sorted(ends)]
    assert not filled(client, server, ignore_eos=True).sampling_params.stop_token_ids
    choice = client.post(COMPLETIONS, json={"prompt": BEFORE, "suffix": AFTER, "max_tokens": 99}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_the_echo_of_a_prompt_leaves_the_suffix_out(client: httpx.Client, server: Running):
    asked = {"prompt": [BEFORE, "x"], "suffix": AFTER, "echo": True, "max_tokens": 99}
    text = server.frontend.script.text
    plain = client.post(COMPLETIONS, json=asked).json()
    assert [choice["text"] for choice in plain["choices"]] == [BEFORE + text, "x" + text]
    chunks = events(client.post(COMPLETIONS, json=asked | {"prompt": BEFORE, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == BEFORE + text
    refused = client.post(COMPLETIONS, json=asked | {"prompt": [1, 2]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


def test_what_does_not_go_with_a_suffix_is_refused(client: httpx.Client):
    for fields, word in (({"system": "S"}, "system"), ({"think": True}, "think"), ({"images": ["a"]}, "images")):
        reply = client.post(GENERATE, json={"prompt": BEFORE, "suffix": AFTER} | fields)
        assert (reply.status_code, reply.json()["error"].partition(":")[0]) == (400, word)
    for path in (COMPLETIONS, GENERATE):
        for wrong in ({"suffix": "a" * 200_000}, {"suffix": 5}, {"suffix": "a" * 500}):
            assert client.post(path, json={"prompt": "b" * 20} | wrong).status_code == 400
