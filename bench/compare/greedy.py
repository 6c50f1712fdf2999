"""Greedy continuations with their logprobs, asked of each kind of server in its own way.

Owns these requests; comparing the answers is `headrace.benchmark.agreement`. Runs in the event loop of the benchmark client.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any

import aiohttp

from headrace.benchmark.agreement import NUM_TOKENS, Greedy
from headrace.benchmark.workloads import TokenIds
from headrace.errors import ConfigError

Continuation = tuple[TokenIds, list[float]]
"""NUM_TOKENS token ids, also after an end of the sequence, and the logprobs of the first of them in nats."""
ContinueGreedily = Callable[[aiohttp.ClientSession, str, TokenIds], Awaitable[Continuation]]
"""(session, URL of the server, prompt) -> what follows. Raises ConfigError when the server does not answer."""


async def by_generate(session: aiohttp.ClientSession, url: str, prompt: TokenIds) -> Continuation:
    """Through `POST /generate`, which Headrace has, and openvino_completions.py in as far as it is needed here."""
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    reply = await _post(session, f"{url}/generate", body)
    return reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


async def by_llama_cpp(session: aiohttp.ClientSession, url: str, prompt: TokenIds) -> Continuation:
    """Through llama.cpp's `POST /completion`. Its `ignore_eos` forbids the end of a sequence, so the prompt goes on behind it instead.

    It gives no logprobs of tokens that end within a character: those before the first of them are returned.
    """
    ids: TokenIds = []
    known: list[tuple[int, float]] = []
    while len(ids) < NUM_TOKENS:
        num_tokens = NUM_TOKENS - len(ids)
        body = {
            "prompt": [*prompt, *ids],
            "n_predict": num_tokens,
            "temperature": 0,
            "n_probs": 1,
            "return_tokens": True,
        }
        reply = await _post(session, f"{url}/completion", body)
        if not reply["tokens"]:
            raise ConfigError(f"{url}/completion generated nothing")
        ids += reply["tokens"]
        known += [(entry["id"], entry["logprob"]) for entry in reply["completion_probabilities"]]
    same = takewhile(lambda pair: pair[0] == pair[1][0], zip(ids, known, strict=False))
    return ids, [logprob for _, (_, logprob) in same]


async def continue_all(
    ask: ContinueGreedily, session: aiohttp.ClientSession, url: str, prompts: Sequence[TokenIds]
) -> Greedy:
    """Every prompt, one at a time: what a server answers may depend on what else it computes."""
    answers = [await ask(session, url, prompt) for prompt in prompts]
    return Greedy([ids for ids, _ in answers], [logprobs for _, logprobs in answers])


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                raise ConfigError(f"{url} answered {response.status}: {(await response.text())[:200]}")
            reply: dict[str, Any] = await response.json(content_type=None)
            return reply
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(f"{url} did not answer: {error}") from error
