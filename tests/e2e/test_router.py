"""sglang-router in front of two real servers, and of a prefill and a decode server. Skipped without it: it is 31 MB, so
`pip install sglang-router==0.3.2` where you want these tests, or name the command of one that is installed elsewhere: HEADRACE_ROUTER="smg launch".
"""

import contextlib
import importlib.util
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import httpx
import pytest
from server_process import ServerProcess, events, serving

ROUTER = shlex.split(os.environ.get("HEADRACE_ROUTER", f"{sys.executable} -m sglang_router.launch_router"))
if "HEADRACE_ROUTER" not in os.environ and importlib.util.find_spec("sglang_router") is None:
    pytest.skip("sglang-router is not installed", allow_module_level=True)

of_sglang_router = pytest.mark.skipif(ROUTER[-1] == "launch", reason="smg says it in another form")
OPTIONS = (
    "--max-total-tokens",
    "4096",
    "--served-model-name",
    "tiny",
    "--skip-server-warmup",
    "--enable-fault-injection",
)
LIMIT_S = 60.0


class Fleet(NamedTuple):
    """A router and the servers behind it. The second one has two replicas."""

    url: str
    servers: list[ServerProcess]
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = httpx.post(self.url + path, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def wait_for_workers(self, count: int) -> None:
        """Until the router says that `count` workers are healthy."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                if self.get("/readiness")["healthy_workers"] == count:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the router did not come to have {count} workers")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


@contextmanager
def routing(servers: list[ServerProcess], num_workers: int, *options: str) -> Iterator[Fleet]:
    """A router, once it has registered all workers: those that options name, or else all servers."""
    port, metrics_port = free_ports(2)
    urls = () if "--pd-disaggregation" in options else ("--worker-urls", *(server.url for server in servers))
    command = [
        *(*ROUTER, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--log-level", "warn", "--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
        *(*urls, *options),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            fleet = Fleet(f"http://127.0.0.1:{port}", servers, process)
            fleet.wait_for_workers(num_workers)
            yield fleet
        finally:
            process.kill()
            log.seek(0)
            print(log.read())


@pytest.fixture(scope="module")
def servers(tiny_model: str) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        two = ("--dp-size", "2", "--load-balance-method", "cache_aware")
        yield [stack.enter_context(serving(tiny_model, *OPTIONS, *more)) for more in ((), two)]


@pytest.fixture(scope="module")
def fleet(servers: list[ServerProcess]) -> Iterator[Fleet]:
    with routing(servers, 2, "--policy", "cache_aware") as fleet:
        yield fleet


CHAT = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "One two"}]}
COMPLETION = {"model": "tiny", "max_tokens": 6, "temperature": 0, "prompt": "One two three"}
GENERATE = {"text": "One two three", "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}


def text_of(reply: dict[str, Any]) -> str:
    """The text of a whole reply, or the new text of a chunk."""
    if "text" in reply:
        return str(reply["text"])
    [choice] = reply["choices"]
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


def streamed_text(url: str, path: str, body: dict[str, Any]) -> str:
    chunks = events(ServerProcess(url).stream(path, body))
    return text_of(chunks[-1]) if path == "/generate" else "".join(map(text_of, chunks))


@of_sglang_router
def test_a_router_learns_what_each_server_serves(fleet):
    workers = fleet.get("/workers")["workers"]

    assert [worker["is_healthy"] for worker in workers] == [True, True]
    assert {worker["model_id"] for worker in workers} == {"tiny"}
    assert {worker["metadata"]["model_type"] for worker in workers} == {"llama"}
    assert {worker["metadata"]["dp_size"] for worker in workers} == {"1", "2"}
    assert [model["id"] for model in fleet.get("/v1/models")["data"]] == ["tiny"]
    assert fleet.get("/get_model_info")["architectures"] == ["LlamaForCausalLM"]


@of_sglang_router
def test_a_router_reads_loads_and_metrics_and_flushes_caches(fleet):
    assert [worker["load"] for worker in fleet.get("/get_loads")["workers"]] == [0, 0]
    metrics = httpx.get(fleet.url + "/engine_metrics", timeout=30).text
    assert all(f'worker_addr="{server.url}"' in metrics for server in fleet.servers)
    assert fleet.post("/flush_cache", {})["workers_flushed"] == 2


@pytest.mark.parametrize("path", BODIES)
def test_a_reply_through_a_router_is_that_of_the_server(fleet, path):
    want = text_of(fleet.servers[0].post(path, BODIES[path]))

    assert want
    for _ in range(2):
        assert text_of(fleet.post(path, BODIES[path])) == want
        assert streamed_text(fleet.url, path, BODIES[path]) == want


def test_prompts_with_the_same_beginning_go_to_the_server_that_has_it(fleet):
    for subject in ("apples", "boats", "clouds", "dogs"):
        beginning = f"All that is known about {subject}: " * 20
        replies = [fleet.post("/v1/completions", COMPLETION | {"prompt": beginning + end}) for end in ("a", "b", "c")]
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        assert min(cached[1:]) > 0.8 * replies[0]["usage"]["prompt_tokens"], cached


def test_a_router_that_knows_replicas_reaches_each_of_them(servers):
    long = "The same prompt, which the server alone would send to one replica. " * 8
    with routing(servers, 3, "--policy", "round_robin", "--dp-aware") as fleet:
        for path, body in (
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": long}]}),
            ("/v1/completions", COMPLETION | {"prompt": long}),
            ("/generate", GENERATE | {"text": long}),
        ):
            replies = [fleet.post(path, body) for _ in range(3)]
            assert len(set(map(text_of, replies))) == 1
            latest = servers[1].get("/v1/requests?limit=2")["data"]
            assert sorted(request["dp_rank"] for request in latest) == [0, 1]


def test_keys_of_clients_pass_through_a_router_that_has_the_key_of_the_server(tiny_model):
    with (
        serving(tiny_model, *OPTIONS, "--api-key", "sesame") as server,
        routing([server], 1, "--policy", "cache_aware", "--api-key", "sesame") as fleet,
    ):
        for key, status in (("sesame", 200), ("other", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(fleet.url + "/generate", json=GENERATE, headers=headers, timeout=60).status_code == status
            assert httpx.get(fleet.url + "/get_loads", headers=headers, timeout=60).status_code == status


def test_when_a_server_is_killed_its_stream_ends_and_the_router_goes_on_with_the_other(tiny_model: str):
    body = {
        "text": "Once",
        "stream": True,
        "rid": "held",
        "sampling_params": {"max_new_tokens": 64, "ignore_eos": True},
    }
    held = {"stage": "forward", "kind": "sleep", "rid": "held", "at_token": 4, "seconds": 60}
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(tiny_model, *OPTIONS)) for _ in range(2)]
        fleet = stack.enter_context(routing(servers, 2, "--policy", "cache_aware"))
        for server in servers:
            server.post("/inject_fault", held)
        with httpx.stream("POST", fleet.url + "/generate", json=body, timeout=60) as reply:
            chunks = reply.iter_raw()
            received = next(chunks)
            [victim] = [each for each in servers if httpx.get(each.url + "/v1/requests/held", timeout=30).is_success]
            victim.kill()
            with contextlib.suppress(httpx.RemoteProtocolError):
                received += b"".join(chunks)
        assert b"[DONE]" not in received or b'"error"' in received

        # Until its health checks have failed, cache_aware goes on to send what the killed server had in its cache there.
        fleet.wait_for_workers(1)
        for path, answer in BODIES.items():
            assert text_of(fleet.post(path, answer))
            assert streamed_text(fleet.url, path, answer)


SEEDED = {"n": 2, "seed": 5, "temperature": 0.9}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
OF_PAIRS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "logprobs of the prompt": ("/generate", 1, GENERATE | {"text": "One two three " * 9} | LOGPROBS),
    "several prompts": ("/generate", 2, GENERATE | LOGPROBS | {"text": None, "input_ids": [[9, 8, 7], [4, 5]]}),
    "seeded samples": (
        "/generate",
        2,
        GENERATE | {"sampling_params": {"n": 2, "sampling_seed": 5, "temperature": 0.9, "max_new_tokens": 6}},
    ),
    "prompts of a completion": ("/v1/completions", 2, COMPLETION | {"prompt": ["One", "Two three"]}),
    "echo": ("/v1/completions", 1, COMPLETION | {"echo": True, "logprobs": 2}),
    "samples of a chat": ("/v1/chat/completions", 2, CHAT | SEEDED | {"logprobs": True, "top_logprobs": 2}),
    "schema": (
        "/v1/chat/completions",
        1,
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
}
"""Route, samples and body of requests to a router of prefill and decode servers."""


def told(reply: Any) -> Any:
    """What is the same whichever server answers, and how often it is asked. The router may change the last bit of a number."""
    own = (
        "id",
        "created",
        "weight_version",
        "cached_tokens",
        "prompt_tokens_details",
        "metadata",
        "system_fingerprint",
    )
    times = ("e2e_latency", "queue_time", "ttft", "decode_throughput")
    if isinstance(reply, dict):
        return {name: told(value) for name, value in reply.items() if name not in (*own, *times)}
    if isinstance(reply, list):
        return list(map(told, reply))
    return round(reply, 12) if isinstance(reply, float) else reply


@pytest.fixture(scope="module")
def pair(tiny_model: str) -> Iterator[Fleet]:
    [port] = free_ports(1)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("HEADRACE_DIST_SECRET", "a secret of this test")
        of_prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
        prefill = stack.enter_context(serving(tiny_model, *OPTIONS, *of_prefill))
        decode = stack.enter_context(serving(tiny_model, *OPTIONS, "--disaggregation-mode", "decode"))
        workers = ("--prefill", prefill.url, str(port), "--decode", decode.url)
        yield stack.enter_context(routing([prefill, decode], 2, "--pd-disaggregation", *workers))


@pytest.mark.parametrize("kind", OF_PAIRS)
def test_a_reply_of_a_pair_is_that_of_one_server(servers, pair, kind):
    path, samples, body = OF_PAIRS[kind]
    before = pair.servers[1].state()["transfer"]

    assert told(pair.post(path, body)) == told(servers[0].post(path, body))
    after = pair.servers[1].state()["transfer"]
    assert sum(after[name] - before[name] for name in ("rooms", "failed")) == samples


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_of_a_pair_is_that_of_one_server(servers, pair, path):
    body = BODIES[path] | (LOGPROBS if path == "/generate" else {})
    of_pair, of_one = (events(ServerProcess(url).stream(path, body)) for url in (pair.url, servers[0].url))

    assert told(of_pair[-1]) == told(of_one[-1])
    assert streamed_text(pair.url, path, body) == streamed_text(servers[0].url, path, body)
