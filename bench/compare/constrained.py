"""Constrained chats on Headrace and on llama.cpp's server, in turns: time per token, and whether the JSON is valid.

    .venv/bin/python -m bench.compare.constrained [--class 8] [--repeat 3] [--streams 1] [--output FILE]

Both serve SmolLM2 with weights of the class and get the same chats with `response_format` (JSON schema) at temperature 0. Two kinds of schemas:
long lists, whose outputs are cut after 128 tokens, for the time per token from a stream's first chunk to its last; and small bounded objects, whose
outputs end by themselves and are judged by jsonschema-rs. Every schema is asked for once before. Needs bench/compare/setup. Prints JSON.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs

from bench.compare.peers import ComparedServer, Precision, llama_cpp_command, quantized_command
from bench.constrained import schema_of
from bench.program import parser_of, write_report
from bench.servers import free_port, leave_on_sigterm

TOKENS = 128
OURS: dict[Precision, str] = {"16": "none", "8": "int8", "4": "int4"}

SHORT = {"type": "string", "maxLength": 12}
SMALL: list[dict[str, Any]] = [
    {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    for properties in (
        {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        {"kind": {"enum": ["cat", "dog", "bird"]}, "wild": {"type": "boolean"}},
        {"tags": {"type": "array", "items": SHORT, "minItems": 2, "maxItems": 3}},
        {"at": {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}, "note": SHORT},
        {
            "a": {
                "type": "object",
                "properties": {"b": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            }
        },
        {"price": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"const": "free"}]}},
    )
]


async def chat(session: aiohttp.ClientSession, number: int, schema: dict[str, Any] | None) -> tuple[str, float, int]:
    """The text of a streamed chat, seconds from its first chunk with text to the last, and the number of these chunks."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": f"Give me record number {number} as JSON."}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema}}
    text, times = "", []
    async with session.post("/v1/chat/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and (new := choices[0].get("delta", {}).get("content")):
                    text += new
                    times.append(time.perf_counter())
    return text, times[-1] - times[0], len(times)


async def ask(url: str, streams: int) -> dict[str, float]:
    """Milliseconds per token without and with a schema, and the share of the small outputs that are valid."""
    # llama.cpp's server closes its connection after a stream.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        found: dict[str, float] = {}
        for name, schemas in (
            ("plain_ms", [None] * streams),
            ("constrained_ms", [schema_of(i) for i in range(streams)]),
        ):
            done = await asyncio.gather(*(chat(session, i, schema) for i, schema in enumerate(schemas)))
            found[name] = statistics.mean(seconds / max(1, chunks - 1) for _, seconds, chunks in done) * 1e3
        valid = 0
        for number, schema in enumerate(SMALL):
            try:
                text, _, _ = await chat(session, number, schema)
                valid += jsonschema_rs.is_valid(schema, json.loads(text))
            except (ValueError, RuntimeError, aiohttp.ClientError) as error:
                print(f"{url}, small schema {number}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return found | {"valid": valid / len(SMALL)}


def measure(precision: Precision, repeat: int, streams: int) -> list[dict[str, Any]]:
    """Both servers run; one is asked at a time."""
    with tempfile.TemporaryDirectory() as folder:
        ports = free_port(), free_port()
        commands = quantized_command(OURS[precision], ports[0]), llama_cpp_command(precision, ports[1])
        runs: dict[str, list[dict[str, float]]] = {}
        with (
            ComparedServer(commands[0], ports[0], Path(folder, "headrace.log")) as ours,
            ComparedServer(commands[1], ports[1], Path(folder, "llama.cpp.log")) as theirs,
        ):
            for server in (ours, theirs):
                server.wait_until_ready()
                asyncio.run(ask(server.url, streams))
            for _ in range(repeat):
                for server in (ours, theirs):
                    runs.setdefault(server.name, []).append(asyncio.run(ask(server.url, streams)))
    return [
        {"server": name, "streams": streams}
        | {key: round(statistics.median(run[key] for run in found), 3) for key in found[0]}
        | {
            "ratio": round(statistics.median(run["constrained_ms"] / run["plain_ms"] for run in found), 3),
            "runs": found,
        }
        for name, found in runs.items()
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--class", dest="precision", choices=("16", "8", "4"), default="8", help="bits of a weight")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    leave_on_sigterm()
    found = {
        "results": [
            result for streams in options.streams for result in measure(options.precision, options.repeat, streams)
        ]
    }
    write_report(found, options.output)


if __name__ == "__main__":
    main()
