"""`POST /v1/completions` over OpenVINO GenAI's continuous batching pipeline, streaming, and little else.

OpenVINO GenAI has no server. This one does as little as a server can, so that what is measured is the pipeline: HTTP by hand on
asyncio streams, one event a request and step, one wake-up of the event loop a step. Greedy requests of token ids only. `POST /generate`
answers once with token ids and logprobs, as Headrace's does, for the check of agreement.
Runs in benchmarks/compare/.venv: the pipeline in a thread, HTTP in the event loop of the main thread.
"""

import argparse
import asyncio
import json
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

_HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(slots=True, eq=False)
class Request:
    """One completion. outputs: lists of new token ids, then None. logprobs: of the tokens so far, if the config asks for them."""

    prompt: list[int]
    config: openvino_genai.GenerationConfig
    outputs: "asyncio.Queue[list[int] | None]" = field(default_factory=asyncio.Queue)
    handle: Any = None
    logprobs: list[float] = field(default_factory=list)


class PipelineThread:
    """Steps the pipeline while it has work, and sleeps while it has none."""

    def __init__(self, model: Path, loop: asyncio.AbstractEventLoop) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 3  # GiB
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", {})
        self._loop = loop
        self.waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        live: list[Request] = []
        next_id = 0
        while True:
            while not live or not self.waiting.empty():
                request = self.waiting.get()
                prompt = openvino.Tensor(np.array([request.prompt], np.int64))
                request.handle = self._pipeline.add_request(next_id, prompt, request.config)
                next_id += 1
                live.append(request)
            self._pipeline.step()
            news: list[tuple[Request, list[int] | None]] = []
            for request in live:
                while request.handle.can_read():
                    for output in request.handle.read().values():
                        news.append((request, list(output.generated_ids)))
                        if request.config.logprobs:
                            request.logprobs += output.generated_log_probs
            ended = [r for r in live if r.handle.get_status() != openvino_genai.GenerationStatus.RUNNING]
            news += [(request, None) for request in ended]
            live = [request for request in live if request not in ended]
            if news:
                self._loop.call_soon_threadsafe(_deliver, news)


def _deliver(news: list[tuple[Request, list[int] | None]]) -> None:
    for request, ids in news:
        request.outputs.put_nowait(ids)


class Server:
    """HTTP/1.1 with keep-alive for the three routes that the benchmark client uses."""

    def __init__(self, pipeline: PipelineThread, tokenizer: Tokenizer, model_name: str) -> None:
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
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.do_sample = False
        config.apply_chat_template = False
        if body.get("ignore_eos"):
            config.ignore_eos = True
            config.min_new_tokens = body["max_tokens"]
        request = Request(prompt, config)
        self._pipeline.waiting.put(request)
        writer.write(_HEADERS)
        stream = DecodeStream(skip_special_tokens=True)
        num_tokens = 0
        while (ids := await request.outputs.get()) is not None:
            num_tokens += len(ids)
            text = "".join(stream.step(self._tokenizer, token) or "" for token in ids)
            _chunk(writer, json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
        reason = "length" if num_tokens == body["max_tokens"] else "stop"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        _chunk(writer, json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": reason}], "usage": usage}))
        _chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["sampling_params"]["max_new_tokens"]
        config.do_sample = False
        config.apply_chat_template = False
        config.ignore_eos = True
        config.logprobs = 1
        request = Request(body["input_ids"], config)
        self._pipeline.waiting.put(request)
        ids: list[int] = []
        while (new := await request.outputs.get()) is not None:
            ids += new
        logprobs = [[logprob, token, None] for logprob, token in zip(request.logprobs, ids, strict=True)]
        _reply(writer, 200, {"output_ids": ids, "meta_info": {"output_token_logprobs": logprobs}})


def _chunk(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def _reply(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


async def main() -> None:
    """Load, then serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder with the IR and tokenizer.json")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    pipeline = PipelineThread(options.model, asyncio.get_running_loop())
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    tokenizer.decoder = ByteLevel()  # tokenizer.json was made from a GGUF file, which names no decoder
    server = Server(pipeline, tokenizer, options.model.name)
    listener = await asyncio.start_server(server.serve_connection, "127.0.0.1", options.port)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
