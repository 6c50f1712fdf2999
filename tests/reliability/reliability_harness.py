"""A real server on a tiny random model, seen from outside, and the checks that must hold after whatever was done to it."""

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import tokenizers
import torch
import transformers

import headrace
from error_bodies import checked_error

MODEL = "tiny-llama"
VOCAB_SIZE = 320
CONTEXT_LENGTH = 1024
MAX_TOTAL_TOKENS = 2048
MAX_RUNNING = 8
MAX_QUEUED = 64
USER_KEY = "user-key-5f1d"
ADMIN_KEY = "admin-key-9c4e"

SMALL_LIMITS = (
    "--max-total-tokens", str(MAX_TOTAL_TOKENS), "--context-length", str(CONTEXT_LENGTH),
    "--max-running-requests", str(MAX_RUNNING), "--max-queued-requests", str(MAX_QUEUED),
    "--chunked-prefill-size", "128", "--num-threads", "1", "--enable-fault-injection",
)  # fmt: skip

# Time limits are for a machine with two busy cores; nothing here measures speed.
START_S = 120.0
ANSWER_S = 60.0
SETTLE_S = 20.0

CANARY_TOKENS = 16
# Descriptors and threads that a process may have more, or fewer, after a test.
VITALS = 2
LATER_THREADS = 8
"""Of a server's thread pools, which start a thread when it is first needed."""
LEAKS = re.compile(
    r"Traceback|site-packages|object at 0x|\.py\b|/tmp/|/usr/|/home/|headrace\.|msgspec|KeyError|ValueError|TypeError"
)

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["The quick brown fox jumps over the lazy dog.", "once upon a time there was a river", "0123456789 + - * / ="]


# -- the model


def write_tiny_model(folder: Path, max_shard_size: str = "5GB") -> Path:
    """A random Llama of two layers with a byte-level tokenizer (every text round-trips) and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:  # large enough that every position matters to what comes next
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


# -- talking to it


def greedy(max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """Sampling parameters whose output is the same every time and has exactly this length."""
    return {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **more}


def events(reply: httpx.Response) -> Iterator[str]:
    """Payloads of a stream's events. A stream that waits, for a process that starts, say, has comments."""
    for line in reply.iter_lines():
        if line and not line.startswith(":"):
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def is_taken(client: httpx.Client, rid: str) -> bool:
    """Whether a live request has this rid. The probe itself is refused either way: it wants too much."""
    reply = client.post("/generate", json={"input_ids": [5], "rid": rid, "sampling_params": greedy(CONTEXT_LENGTH)})
    assert reply.status_code == 400
    return reply.json()["error"]["param"] == "rid"


def each_at_once(work: Callable[[Any], Any], items: Iterable[Any], workers: int = 64) -> list[Any]:
    """`work(item)` for all items in threads; results in order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = SETTLE_S) -> None:
    """Poll until `holds()`; fails saying `what` did not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


# -- the server


def _renders(child: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "headrace.text.template_child" in child.cmdline()
    return False


class Server:
    """`headrace serve` as a subprocess, with small limits. Keys come from the environment when `keys`."""

    def __init__(
        self, model: Path, options: Sequence[str] = (), *, keys: bool = False, limits: Sequence[str] = SMALL_LIMITS
    ) -> None:
        self.folder = Path("/tmp") / f"hr-{secrets.token_hex(4)}"
        self.folder.mkdir(mode=0o700)
        self.log_path = self.folder / "log"
        self.url = ""
        self.keys = keys
        environment = {**os.environ, "TMPDIR": str(self.folder), "PYTHONPATH": str(Path(headrace.__file__).parents[1])}
        if keys:
            environment |= {"HEADRACE_API_KEY": USER_KEY, "HEADRACE_ADMIN_API_KEY": ADMIN_KEY}
        command = [sys.executable, "-m", "headrace.cli", "serve", str(model), "--port", "0"]
        with self.log_path.open("wb") as log:
            self.popen = subprocess.Popen(
                [*command, "--served-model-name", MODEL, *limits, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
            )
        self.process = psutil.Process(self.popen.pid)
        self.admin = httpx.Client()
        self.golden: dict[str, Any] = {}
        self.children: list[psutil.Process] = []
        # Descriptors and threads of each process at rest: after warming up, and with the pools that tests have let grow since.
        self.baseline: dict[int, tuple[int, int]] = {}
        self.allowed: dict[int, tuple[int, int]] = {}

    # start and end

    def wait_started(self) -> "Server":
        """Until it says where it listens."""
        wait_until(lambda: self._find_url() or self.popen.poll() is not None, "start-up", START_S)
        assert self.url, f"the server did not start (exit code {self.popen.poll()}):\n{self.log()}"
        self.admin.close()
        self.admin = self.client(ADMIN_KEY, timeout=ANSWER_S)
        self.children = sorted(self.engine_children(), key=lambda child: child.pid)
        return self

    def engine_children(self) -> list[psutil.Process]:
        """Those that live, without those that render chat templates: they come and go."""
        return [child for child in self.process.children() if not _renders(child)]

    def _find_url(self) -> bool:
        if found := re.search(r"^ +URL +(http://\S+)$", self.log(), re.MULTILINE):
            self.url = found[1]
        return bool(self.url)

    def warm_up(self) -> "Server":
        """Make it allocate what it keeps (threads, caches, arenas), then remember what it looks like at rest."""
        with self.client() as client:
            long = {"text": "warm " * 150, "sampling_params": greedy(16, n=4), "return_logprob": True}
            for body in (long, long | {"stream": True}, {"text": "x" * 4000, "sampling_params": greedy(1)}):
                client.post("/generate", json=body)
            each_at_once(lambda i: self.generate(client, [5 + i] * 60, 60), range(MAX_RUNNING + 4), 12)
            # Certain text is tokenized, in threads of the tokenizer.
            schema = {"type": "object", "properties": {"warm": {"enum": ["certainly"]}}, "required": ["warm"]}
            grammars = [{"max_new_tokens": 8, "regex": f"[a-z]{{{i}}}"} for i in range(4, 10)]
            grammars.append({"max_new_tokens": 32, "json_schema": schema | {"additionalProperties": False}})
            each_at_once(lambda p: client.post("/generate", json={"text": "hi", "sampling_params": p}), grammars, 6)
            for text in ("y" * 200_000, "z " * 50_000):
                client.post("/tokenize", json={"prompt": text})
                client.post("/generate", json={"text": text})
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            client.post("/v1/chat/completions", json=chat)
        self.golden = self.canary()
        self.flush()
        wait_until(lambda: len(self.process.net_connections(kind="tcp")) <= 2, "only its own client is connected")
        self.baseline = self.allowed = self.vitals()
        return self

    def stop(self, timeout_s: float = SETTLE_S) -> int:
        """Ask it to leave; its exit code. Kills it, and fails, when it does not."""
        if self.popen.poll() is None:
            self.popen.terminate()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = SETTLE_S) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {timeout_s:g} s:\n{self.log()}") from None

    def close(self) -> None:
        """End whatever is left of it and remove its files."""
        self.admin.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.children = self.children or self.engine_children()
        for process in (self.process, *self.children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait()
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.folder.rmdir()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # clients

    def client(self, key: str = USER_KEY, **options: Any) -> httpx.Client:
        """A client of its own connections, with a key when the server wants one."""
        headers = {"authorization": f"Bearer {key}"} if self.keys else {}
        options = {"timeout": ANSWER_S} | options
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.Client(base_url=self.url, headers=headers, limits=limits, **options)

    def generate(self, client: httpx.Client, prompt: str | list[int], max_new_tokens: int, **more: Any) -> Any:
        """The reply of a greedy /generate that must succeed."""
        field = "text" if isinstance(prompt, str) else "input_ids"
        reply = client.post("/generate", json={field: prompt, "sampling_params": greedy(max_new_tokens), **more})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def inject(self, stage: str, kind: str, rid: str, at_token: int = 0, seconds: float = 0.0) -> None:
        """Arm a fault."""
        body = {"stage": stage, "kind": kind, "rid": rid, "at_token": at_token, "seconds": seconds}
        assert self.admin.post("/inject_fault", json=body).status_code == 200

    @contextlib.contextmanager
    def held(self, client: httpx.Client, seconds: float) -> Iterator["Stream"]:
        """A running request whose second step takes `seconds`: what is sent meanwhile waits, and is then met together."""
        rid = f"holds-{secrets.token_hex(4)}"
        self.inject("forward", "sleep", rid, at_token=2, seconds=seconds)
        body = {"text": "hold on", "rid": rid, "sampling_params": greedy(4)}
        holder = Stream(client, "/generate", body)
        assert holder.began.wait(ANSWER_S)
        try:
            yield holder
        finally:
            holder.join()

    def raw_post(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request over a connection of its own and leave the reply unread."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        connection = socket.create_connection((host, int(port)), timeout=ANSWER_S)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        key = f"authorization: Bearer {USER_KEY}\r\n" if self.keys else ""
        connection.sendall(f"{head}{key}content-length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def state(self) -> dict[str, Any]:
        """/internal_state."""
        reply = self.admin.get("/internal_state")
        assert reply.status_code == 200, reply.text
        state: dict[str, Any] = reply.json()
        return state

    def flush(self) -> None:
        """Empty the prefix cache."""
        reply = self.admin.post("/flush_cache")
        assert reply.status_code == 200, reply.text

    def canary(self) -> dict[str, Any]:
        """The text and ids of one greedy request."""
        prompt = {"text": "The canary sings: ", "sampling_params": greedy(CANARY_TOKENS)}
        reply = self.admin.post("/generate", json=prompt)
        assert reply.status_code == 200, reply.text
        return {name: reply.json()[name] for name in ("text", "output_ids")}

    # what it looks like

    def log(self) -> str:
        """All of stderr so far."""
        return self.log_path.read_text(errors="replace")

    def ipc_directories(self) -> list[Path]:
        """Directories of socket files that exist."""
        return list(self.folder.glob("headrace-ipc-*"))

    def vitals(self) -> dict[int, tuple[int, int]]:
        """Open descriptors and threads of each process."""
        return {p.pid: (p.num_fds(), p.num_threads()) for p in (self.process, *self.children)}

    def rss_bytes(self) -> int:
        """Resident memory of all its processes."""
        return sum(p.memory_info().rss for p in (self.process, *self.children))


class Oracle:
    """What must hold after every test. Made before the test; a test may widen `rss_mb` or `vitals` or expect tracebacks, saying why."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rss_mb = 20
        self.vitals = VITALS
        self.expected_tracebacks = 0
        self._log_size = len(server.log())
        self._rss_bytes = server.rss_bytes()
        state = server.state()
        self._total_tokens = state["pool"]["total_tokens"]
        self._repairs = state["memory_repairs"]

    def check(self) -> None:
        """Raises AssertionError naming what does not hold."""
        server = self.server
        assert server.popen.poll() is None, f"the server is gone:\n{server.log()[-3000:]}"
        assert server.admin.get("/health").status_code == 200
        wait_until(self._is_idle, "running = waiting = 0")
        assert server.canary() == server.golden
        state = server.state()
        pool = state["pool"]
        assert pool["consistent"], pool
        assert pool["free_tokens"] + pool["evictable_tokens"] == pool["total_tokens"] == self._total_tokens, pool
        assert pool["request_slots_free"] == pool["request_slots_total"], pool
        assert state["memory_repairs"] == self._repairs
        server.flush()
        assert server.state()["pool"]["free_tokens"] == self._total_tokens
        assert sorted(child.pid for child in server.engine_children()) == [child.pid for child in server.children]
        # Connections close, and threads end, a moment after their client has left.
        try:
            wait_until(self._vitals_are_back, f"open descriptors and threads +-{self.vitals}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {server.allowed} -> {server.vitals()}") from None
        if self.vitals > VITALS:
            # A pool that a test may let grow stays as large: the next test starts from there.
            server.allowed = server.vitals()
        grown_mb = (server.rss_bytes() - self._rss_bytes) / 2**20
        assert grown_mb <= self.rss_mb, f"memory grew by {grown_mb:.1f} MB"
        log = server.log()[self._log_size :]
        assert log.count("Traceback (most recent call last)") == self.expected_tracebacks, log

    def _is_idle(self) -> bool:
        state = self.server.state()
        return state["num_running"] == state["num_waiting"] == state["num_in_flight_steps"] == 0

    def _vitals_are_back(self) -> bool:
        server, now = self.server, self.server.vitals()
        return all(
            least - self.vitals <= value <= most + self.vitals + later
            for pid in server.baseline
            for least, value, most, later in zip(
                server.baseline[pid], now[pid], server.allowed[pid], (0, LATER_THREADS), strict=True
            )
        )


def check_refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """An error in the form of its route that gives nothing of the machine or the program away. Returns what it says."""
    assert reply.status_code == status, (reply.status_code, reply.text[:500])
    assert reply.headers["content-type"] == "application/json"
    assert not (leak := LEAKS.search(reply.text)), (leak, reply.text[:500])
    return checked_error(reply.url.path, reply.json())


class Stream:
    """A request answered in a thread: what came, when it began, how it ended. One that does not stream has one payload."""

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any], stream: bool = True) -> None:
        self.began = threading.Event()
        self.payloads: list[str] = []
        self.status = 0
        self.error: Exception | None = None
        self._client, self._path, self._body = client, path, body | {"stream": stream}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._client.stream("POST", self._path, json=self._body) as reply:
                self.status = reply.status_code
                if reply.status_code != 200 or not self._body["stream"]:
                    self.payloads.append(reply.read().decode())
                    return
                for payload in events(reply):
                    self.payloads.append(payload)
                    self.began.set()
        except httpx.HTTPError as error:
            self.error = error
        finally:
            self.began.set()

    def join(self, timeout_s: float = ANSWER_S) -> None:
        """Until it has ended."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream did not end"

    @property
    def last(self) -> dict[str, Any]:
        """The last chunk before `[DONE]`."""
        chunks = [payload for payload in self.payloads if payload != "[DONE]"]
        return dict(json.loads(chunks[-1]))

    @property
    def has_error(self) -> bool:
        """It ended with an error of the server's, in one of the ways an error may come."""
        return self.error is not None or self.status != 200 or any('"error"' in payload for payload in self.payloads)
