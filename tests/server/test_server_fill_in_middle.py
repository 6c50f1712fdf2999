"""What belongs between a prompt and a suffix: the tokens that the model gets are those of llama.cpp's server, and what ends the output."""

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
