"""`headrace bench offline`: the throughput of an Engine in this process, without HTTP, on the presets of `bench serving`.

Owns only the engine's start and end; everything measured is shared with serving.py.
"""

import asyncio
from dataclasses import asdict
from typing import Any

from rich.console import Console

from headrace.api.engine import Engine
from headrace.benchmark.results import document
from headrace.benchmark.serving import LoadOptions, measure, report
from headrace.benchmark.targets import EngineTarget
from headrace.checkpoint.names import resolve_model
from headrace.config.server_args import ServerArgs
from headrace.text.tokenizers import load_tokenizer


def run_offline(server_args: ServerArgs, options: LoadOptions, console: Console) -> dict[str, Any]:
    """Start an Engine, measure, print, write; the results document. Raises what the Engine raises when it cannot start."""
    tokenizer = load_tokenizer(resolve_model(options.tokenizer))
    with Engine(**asdict(server_args)) as engine:

        async def run() -> dict[str, Any]:
            target = EngineTarget(f"Engine {server_args.model_path}", engine)
            results = await measure([target], tokenizer, options, console)
            said = {target.name: await target.describe()}
            content = document("offline", said, results, options.described(), options.limits)
            report(content, results, options, console)
            return content

        return asyncio.run(run())
