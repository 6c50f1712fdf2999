"""A scripted OpenAI-compatible server for the tests of the benchmark client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """Answers a completion with `max_tokens` tokens, one a chunk, and remembers what it was asked.

    fail: indices of completion requests that are answered with status 500. cut: those whose stream ends early.
    together: answer only when so many are open at once (but for the first request, which `connect` sends alone).
    """

    ids_accepted: bool = True
    sends_usage: bool = True
    tokens_per_chunk: int = 1
    word: str = "w"
    fail: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    together: asyncio.Barrier | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    generate_bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_flushes: int = 0
    num_open: int = 0
    most_open: int = 0
    url: str = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if isinstance(body.get("prompt"), list) and not self.ids_accepted:
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
        index = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if index in self.fail:
            return web.json_response({"error": {"message": "broken on purpose"}}, status=500)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if self.together is not None and index > 0:
                await self.together.wait()
            return await self._stream(request, body, index)
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], index: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        left = body["max_tokens"]
        while left:
            count = min(left, self.tokens_per_chunk)
            left -= count
            text = self.word * count
            choice = (
                {"text": text} if "prompt" in body else {"delta": {"reasoning_content": text[:1], "content": text[1:]}}
            )
            await response.write(_event({"choices": [{"index": 0, **choice, "finish_reason": None}]}))
            await asyncio.sleep(0)
            if index in self.cut:
                return response
        await response.write(_event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        if self.sends_usage:
            usage = {
                "prompt_tokens": len(body.get("prompt", "")),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 2},
            }
            await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def generate(self, request: web.Request) -> web.Response:
        """Headrace's own route, as far as greedy tokens with logprobs go."""
        body = await request.json()
        self.generate_bodies.append(body)
        ids = [ord(self.word)] * body["sampling_params"]["max_new_tokens"]
        return web.json_response(
            {"output_ids": ids, "meta_info": {"output_token_logprobs": [[-0.5, token, None] for token in ids]}}
        )

    async def llama_cpp(self, request: web.Request) -> web.Response:
        """llama.cpp's own route. Ends after four tokens; of the fourth, which ends within a character, there is no logprob."""
        body = await request.json()
        self.generate_bodies.append(body)
        ids = list(range(len(body["prompt"]), len(body["prompt"]) + min(4, body["n_predict"])))
        known = [{"id": token, "logprob": -0.5} for token in ids if token % 4 != 3]
        return web.json_response({"tokens": ids, "completion_probabilities": known})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"dtype": "bfloat16", "api_key": "secret"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        self.num_flushes += 1
        return web.json_response({"success": True})


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    """Run the server on a free loopback port; sets its `url`."""
    app = web.Application()
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.completions)
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/completion", server.llama_cpp)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/server_info", server.server_info)
    app.router.add_post("/flush_cache", server.flush_cache)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
