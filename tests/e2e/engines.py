"""Engines for tests, and answers in a form that can be compared exactly."""

import itertools
import random
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.api.engine import Engine

GREEDY = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 7, "max_new_tokens": 16, "ignore_eos": True}
FILTERED = {"temperature": 1.2, "seed": 11, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 16}
PENALISED = {
    "temperature": 0.7,
    "seed": 3,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.4,
    "max_new_tokens": 16,
    # The token 42 is forced at index 5, and begins what would be reasoning again.
    "thinking_budget": {"num_tokens": 5, "end_id": 42, "begins": [[42]], "is_open": True},
}

LOGPROB_KEYS = ("token_logprobs", "top_logprobs", "token_ids_logprobs")


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running_engine(model: str, **options: Any) -> Iterator[Engine]:
    """An engine of one process, with a small pool."""
    defaults: dict[str, Any] = {
        "single_process": True,
        "num_threads": 2,
        "max_total_tokens": 8192,
        "rank_timeout_s": 60.0,
    }
    with Engine(model_path=model, **(defaults | options)) as engine:
        yield engine


rooms = itertools.count(1000, 1000)
"""Numbers of rooms, each with some behind it for further samples."""


class Pair:
    """A prefill and a decode engine. ask: both get the same call, as from a router; the answer is the decode side's."""

    def __init__(self, prefill: Engine, decode: Engine, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port
        self.threads = ThreadPoolExecutor(2)

    def ask(self, **call: Any) -> Any:
        call |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": next(rooms)}
        sent = self.threads.submit(self.prefill.generate, **call)
        answer = self.decode.generate(**call)
        sent.result()
        return answer


@contextmanager
def running_pair(model: str, prefill: dict[str, Any], decode: dict[str, Any]) -> Iterator[Pair]:
    """Both sides with options of their own; for modules that are `patient`."""
    port = free_port()
    own = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port, **prefill}
    with running_engine(model, **own) as first, running_engine(model, disaggregation_mode="decode", **decode) as second:
        yield Pair(first, second, port)


def drafts_after_transfer(pair: Pair, alone: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """`drafts_of` the answers of a pair, whose decode side computes no prompt, and of one engine that is given the first token with the prompt: its
    first draft tokens follow the same step. Both for all prompts together."""
    counts = [[0, 0, 0], [0, 0, 0]]
    before = pair.decode.internal_state()
    for ids in prompts:
        got = pair.ask(input_ids=ids, sampling_params=GREEDY | {"max_new_tokens": num_tokens})
        first, *rest = got["output_ids"]
        want = alone.generate(input_ids=[*ids, first], sampling_params=GREEDY | {"max_new_tokens": num_tokens - 1})
        assert rest == want["output_ids"]
        counts = [
            [*map(sum, zip(*both, strict=True))] for both in zip(counts, map(drafts_of, (got, want)), strict=True)
        ]
    after = pair.decode.internal_state()
    assert after.transfer.rooms - before.transfer.rooms == len(prompts)
    assert after.computed_prefill_tokens == before.computed_prefill_tokens
    return counts


@dataclass(frozen=True)
class Case:
    """A request. logprob_start: None = no logprobs; else as `logprob_start_len`, with two alternatives and two picked ids."""

    name: str
    ids: list[int]
    sampling: dict[str, Any]
    logprob_start: int | None = None


@dataclass(frozen=True)
class Answer:
    """What must be the same however a request was computed. logprobs: every list of meta_info, floats compared by bits."""

    ids: list[int]
    text: str
    finish: dict[str, Any]
    usage: tuple[int, int]
    logprobs: dict[str, Any] = field(default_factory=dict)


def answer_of(output: dict[str, Any]) -> Answer:
    """The comparable part of an output."""
    meta = output["meta_info"]
    names = [f"{side}_{key}" for side in ("input", "output") for key in LOGPROB_KEYS]
    return Answer(
        ids=output["output_ids"],
        text=output["text"],
        finish=meta["finish_reason"],
        usage=(meta["prompt_tokens"], meta["completion_tokens"]),
        logprobs={name: meta[name] for name in names if name in meta},
    )


def drafts_of(output: dict[str, Any]) -> list[int]:
    """How many steps had draft tokens, how many tokens that were, and how many of them were right."""
    return [output["meta_info"][f"spec_{name}"] for name in ("verify_ct", "draft_token_num", "accept_token_num")]


def joined(deltas: Sequence[dict[str, Any]]) -> Answer:
    """The answer that the chunks of one sample add up to, when each holds what is new."""
    last = deltas[-1]
    meta = last["meta_info"]
    lists = {
        name: [entry for delta in deltas for entry in delta["meta_info"][name]] for name in meta if "logprobs" in name
    }
    ids = [token for delta in deltas for token in delta["output_ids"]]
    text = "".join(delta["text"] for delta in deltas)
    return answer_of(last | {"text": text, "output_ids": ids, "meta_info": meta | lists})


def request_of(case: Case) -> dict[str, Any]:
    """Arguments of `Engine.generate` for one case alone."""
    wanted: dict[str, Any] = {"input_ids": case.ids, "sampling_params": case.sampling}
    if case.logprob_start is not None:
        wanted |= {
            "return_logprob": True,
            "logprob_start_len": case.logprob_start,
            "top_logprobs_num": 2,
            "token_ids_logprob": [5, 999],
        }
    return wanted


def one_by_one(engine: Engine, cases: Sequence[Case]) -> dict[str, Answer]:
    """Every case alone, one after the other."""
    return {case.name: answer_of(engine.generate(**request_of(case))) for case in cases}


def outputs_together(engine: Engine, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The outputs of all cases as one call, in which they share steps."""
    outputs: list[dict[str, Any]] = engine.generate(
        input_ids=[case.ids for case in cases],
        sampling_params=[case.sampling for case in cases],
        return_logprob=[case.logprob_start is not None for case in cases],
        logprob_start_len=[-1 if case.logprob_start is None else case.logprob_start for case in cases],
        top_logprobs_num=[0 if case.logprob_start is None else 2 for case in cases],
        token_ids_logprob=[[] if case.logprob_start is None else [5, 999] for case in cases],
    )
    return outputs


def together(engine: Engine, cases: Sequence[Case]) -> dict[str, Answer]:
    """All cases as one call, in which they share steps."""
    outputs = outputs_together(engine, cases)
    return {case.name: answer_of(output) for case, output in zip(cases, outputs, strict=True)}


def random_ids(count: int, seed: int, vocab_size: int = 49152) -> list[int]:
    """`count` ordinary token ids."""
    source = random.Random(seed)
    return [source.randrange(17, vocab_size) for _ in range(count)]


def make_cases(lengths: Sequence[int], samplings: dict[str, dict[str, Any]]) -> list[Case]:
    """Prompts of these lengths, each with every kind of sampling; prompts of 100 and more tokens share their first 80."""
    shared = random_ids(80, seed=1)
    cases = []
    for length in lengths:
        ids = shared + random_ids(length - 80, seed=length) if length >= 100 else random_ids(length, seed=length)
        starts = {"greedy": -1, "seeded": None, "filtered": 0, "penalised": length // 2}
        for kind, sampling in samplings.items():
            cases.append(Case(f"{kind}, {length} tokens", ids, sampling, starts[kind]))
    return cases


def ids_after_retraction(
    engine: Engine, prompts: Sequence[list[int]], sampling: Sequence[dict[str, Any]]
) -> list[list[int]]:
    """The output of each prompt, all streamed together, set back once when the first tokens have come.

    On a busy machine all may have ended when the pause arrives: then they are asked again.
    """
    before = engine.internal_state().num_retracted
    for _ in range(50):
        last: dict[int, list[int]] = {}
        for item in engine.generate(input_ids=prompts, sampling_params=sampling, stream=True):
            if not last:
                assert engine.pause_generation("retract")[0]
                assert engine.continue_generation()[0]
            last[item["index"]] = item["output_ids"]
        if engine.internal_state().num_retracted > before:
            return [last[index] for index in range(len(prompts))]
    raise AssertionError("no pause sets a request back")
