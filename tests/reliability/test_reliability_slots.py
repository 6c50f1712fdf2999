"""Slots of llama.cpp's server: what is saved outlives the server, a restore says what the next request finds, and each key has its own.

That a restore reported all tokens and none was used is llama.cpp's issue 26676.
"""

import json
from pathlib import Path
from typing import Any

import httpx
from reliability_harness import Server

PROMPT = "The rules of this house are many. " * 6
PAGE = 16


def ask(client: httpx.Client, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"model": "", "prompt": prompt, "max_tokens": 5, "temperature": 0, **more}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]


def act(client: httpx.Client, slot: int, action: str, filename: str = "rules.bin") -> tuple[int, dict[str, Any]]:
    reply = client.post(f"/slots/{slot}?action={action}", json={"filename": filename})
    return reply.status_code, reply.json()


def test_a_saved_slot_is_restored_by_another_server(tiny_model: Path, tmp_path: Path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"secret-{name}"} for name in "ab"]}))
    options = ["--api-key-file", str(keys), "--session-dir", str(tmp_path / "sessions")]
    options += ["--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-persist-tenants"]
    with Server(tiny_model, options, keys=True) as server:
        server.wait_started()
        with server.client("secret-a") as a, server.client("secret-b") as b:
            usage = ask(a, id_slot=1)
            ask(a, "Something else. ")
            ask(a, "Several. ", id_slot=2, n=2)
            num_tokens = usage["prompt_tokens"] + usage["completion_tokens"]
            status, saved = act(a, 1, "save")
            assert (status, saved["n_saved"], saved["filename"]) == (200, num_tokens, "rules.bin")
            assert act(a, 0, "save", "other.bin")[1]["n_saved"] < num_tokens
            assert [act(a, slot, "save")[0] for slot in (2, 3, 10**6)] == [400, 404, 400]
            assert act(b, 1, "save")[1]["error"]["code"] == "slot_empty"
            assert act(b, 1, "restore")[0] == act(a, 1, "restore", "unknown.bin")[0] == 404
            server.process.kill()

    options += ["--dp-size", "2", "--tokenizer-worker-num", "2"]
    with Server(tiny_model, options, keys=True) as server:
        server.wait_started()
        with server.client("secret-a") as a, server.client("secret-b") as b:
            for flushed in (False, True):
                if flushed:
                    server.flush()  # the files of the KV, too: it is computed again
                status, restored = act(a, 0, "restore")
                assert (status, restored["n_restored"]) == (200, num_tokens // PAGE * PAGE)
                more = {
                    "session_params": {"id": "slot/rules.bin", "rid": "saved"},
                    "sampling_params": {"max_new_tokens": 1},
                }
                found = a.post("/generate", json={"text": " And so?", **more}).json()["meta_info"]
                assert found["cached_tokens"] == restored["n_restored"]
                assert ask(a)["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // PAGE * PAGE - PAGE
            assert act(b, 0, "restore")[0] == 404
            act(a, 0, "restore")
            assert act(a, 0, "erase") == (200, {"id_slot": 0, "n_erased": num_tokens})
            assert act(a, 0, "erase")[1]["n_erased"] == 0
            assert act(a, 0, "save")[0] == 404
            assert act(a, 1, "restore")[0] == 200, "what is saved stays"
