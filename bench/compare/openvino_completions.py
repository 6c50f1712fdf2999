"""`POST /v1/completions` over OpenVINO GenAI's continuous batching pipeline, streaming, and little else.

OpenVINO GenAI has no server. This one does as little as a server can, so that what is measured is the pipeline: HTTP by hand on
asyncio streams, one event a request and step, one wake-up of the event loop a step. Greedy requests of token ids only. `POST /generate`
answers once with token ids and logprobs, as Headrace's does, for the check of agreement.
Runs in bench/compare/.venv: the pipeline in one process, HTTP in another. With --precision it compiles the model and says as JSON what OpenVINO
computes it in on this processor, and serves nothing.
"""

import argparse
import asyncio
import json
import multiprocessing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino
import openvino_genai
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

_HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(slots=True, eq=False)
class Request:
    """One completion. outputs: the news of it that have not been sent."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    wants_logprobs: bool = False
    outputs: "asyncio.Queue[News]" = field(default_factory=asyncio.Queue)


class News(NamedTuple):
    """New token ids of a request, their logprobs if it asked for them, and whether these are the last."""

    ids: list[int]
    logprobs: list[float]
    is_last: bool


class Pipeline:
    """The pipeline, in a process of its own: its `step` keeps the GIL, so that a thread beside it could send nothing while it computes."""

    def __init__(self, model: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        spawn.Process(target=run_pipeline, args=(str(model), theirs), daemon=True).start()
        theirs.close()
        self._connection.recv_bytes()  # it is loaded
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._deliver)

    def add(self, request: Request) -> None:
        """Start a request."""
        self._requests[self._next_id] = request
        options = request.prompt, request.max_tokens, request.ignore_eos, request.wants_logprobs
        self._connection.send_bytes(json.dumps((self._next_id, *options)).encode())
        self._next_id += 1

    def _deliver(self) -> None:
        for request_id, *fields in json.loads(self._connection.recv_bytes()):
            news = News(*fields)
            self._requests[request_id].outputs.put_nowait(news)
            if news.is_last:
                del self._requests[request_id]


def run_pipeline(model: str, connection: Connection) -> None:
    """In the other process: step the pipeline while it has work, and sleep while it has none; after each step send what is new."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 3  # GiB
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})
    connection.send_bytes(b"loaded")
    live: dict[int, Any] = {}
    while True:
        while not live or connection.poll():
            request_id, prompt, *options = json.loads(connection.recv_bytes())
            tensor = openvino.Tensor(np.array([prompt], np.int64))
            live[request_id] = pipeline.add_request(request_id, tensor, _greedy(*options))
        pipeline.step()
        news = []
        for request_id, handle in list(live.items()):
            new = _news_of(handle)
            if new.ids or new.is_last:
                news.append((request_id, *new))
            if new.is_last:
                del live[request_id]
        if news:
            connection.send_bytes(json.dumps(news).encode())


def _greedy(max_tokens: int, ignore_eos: bool, wants_logprobs: bool) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.do_sample = False
    config.apply_chat_template = False
    if ignore_eos:
        config.ignore_eos = True
        config.min_new_tokens = max_tokens
    if wants_logprobs:
        config.logprobs = 1
    return config


def _news_of(handle: Any) -> News:
    # The status first: what is new after it is not lost.
    is_last = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
    ids: list[int] = []
    logprobs: list[float] = []
    while handle.can_read():
        for output in handle.read().values():
            ids += output.generated_ids
            logprobs += output.generated_log_probs
    return News(ids, logprobs, is_last)


class Server:
    """HTTP/1.1 with keep-alive for the three routes that the benchmark client uses."""

    def __init__(self, pipeline: Pipeline, tokenizer: Tokenizer, model_name: str) -> None:
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._model_name = model_name

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the client closes the connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ", 2)
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                match method, path:
                    case "POST", "/v1/completions":
                        await self._complete(json.loads(body), writer)
                    case "POST", "/generate":
                        await self._generate(json.loads(body), writer)
                    case "GET", "/v1/models":
                        _reply(writer, 200, {"data": [{"id": self._model_name}]})
                    case "GET", "/health":
                        _reply(writer, 200, {})
                    case _:
                        _reply(writer, 404, {"error": {"message": f"no route {method} {path}"}})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not body.get("stream") or body.get("temperature") != 0:
            _reply(writer, 400, {"error": {"message": "only streamed greedy completions of token ids are served"}})
            return
        request = Request(prompt, body["max_tokens"], bool(body.get("ignore_eos")))
        self._pipeline.add(request)
        writer.write(_HEADERS)
        stream = DecodeStream(skip_special_tokens=True)
        num_tokens, is_last = 0, False
        while not is_last:
            ids, _, is_last = await request.outputs.get()
            num_tokens += len(ids)
            text = "".join(stream.step(self._tokenizer, token) or "" for token in ids)
            _chunk(writer, json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
        reason = "length" if num_tokens == body["max_tokens"] else "stop"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        _chunk(writer, json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": reason}], "usage": usage}))
        _chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        request = Request(
            body["input_ids"], body["sampling_params"]["max_new_tokens"], ignore_eos=True, wants_logprobs=True
        )
        self._pipeline.add(request)
        logprobs: list[list[float | int | None]] = []
        is_last = False
        while not is_last:
            ids, new, is_last = await request.outputs.get()
            logprobs += [[logprob, token, None] for logprob, token in zip(new, ids, strict=True)]
        meta = {"output_token_logprobs": logprobs}
        _reply(writer, 200, {"output_ids": [token for _, token, _ in logprobs], "meta_info": meta})


def _chunk(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def _reply(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


def precision(model: Path) -> dict[str, str]:
    """By the names of Headrace's /server_info."""
    compiled = openvino.Core().compile_model(model / "openvino_model.xml", "CPU")
    return {
        "activations": compiled.get_property("INFERENCE_PRECISION_HINT").to_string(),
        "kv_cache_dtype": compiled.get_property("KV_CACHE_PRECISION").to_string(),
        "dynamic_quantization_group_size": str(compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")),
    }


async def serve(model: Path, port: int) -> None:
    """Load, then serve until the process is ended."""
    pipeline = Pipeline(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.decoder = ByteLevel()  # tokenizer.json was made from a GGUF file, which names no decoder
    server = Server(pipeline, tokenizer, model.name)
    listener = await asyncio.start_server(server.serve_connection, "127.0.0.1", port)
    async with listener:
        await listener.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder with the IR and tokenizer.json")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--port", type=int)
    what.add_argument("--precision", action="store_true", help="print what it computes in, and end")
    options = parser.parse_args()
    if options.precision:
        print(json.dumps(precision(options.model)))
    else:
        asyncio.run(serve(options.model, options.port))


if __name__ == "__main__":
    main()
