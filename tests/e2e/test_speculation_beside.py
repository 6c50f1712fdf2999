"""Guessed tokens beside what else changes a sequence or its cache: adapters, new weights, sessions, pauses, retraction, several samples."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from engines import GREEDY, SEEDED, answer_of, random_ids, running_engine
from lora_harness import tiny_adapter
from oracle import Answers, guessing, noting
from safetensors.torch import load_file, save_file

from headrace.api.engine import Engine

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
PROMPT = random_ids(20, seed=5)


def both(patch: pytest.MonkeyPatch, model: str, act: Callable[[Engine], Any], **options: Any) -> tuple[Any, Any, int]:
    """What an engine gives without guesses and with them, and how many tokens were guessed."""
    with noting(patch, model, **options) as (engine, answers):
        plain = act(engine)
    with guessing(patch, model, answers, **options) as engine:
        return plain, act(engine), answers.num_guessed


def test_adapters_beside_the_model_itself(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    paths = {
        "x": tiny_adapter(model, seed=1).save(tmp_path / "x"),
        "y": tiny_adapter(model, seed=2).save(tmp_path / "y"),
    }

    def act(engine: Engine) -> list[list[list[int]]]:
        names = [None, "x", "y", "x", None]
        sampling = [{**one, "max_new_tokens": 24} for one in (GREEDY, GREEDY, GREEDY, SEEDED, SEEDED)]
        beside = engine.generate(input_ids=[PROMPT] * 5, sampling_params=sampling, lora_path=names)
        alone = [
            engine.generate(input_ids=PROMPT, sampling_params=own, lora_path=name)
            for own, name in zip(sampling, names, strict=True)
        ]
        return [[output["output_ids"] for output in outputs] for outputs in (beside, alone)]

    lora_paths = ",".join(f"{name}={path}" for name, path in paths.items())
    plain, guessed, count = both(monkeypatch, tiny_model, act, lora_paths=lora_paths)

    assert guessed == plain
    assert plain[0] == plain[1]
    assert len(set(map(tuple, plain[0]))) == 5, "the adapters change nothing"
    assert count > 100


def test_samples_of_one_prompt(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(engine: Engine) -> Any:
        outputs = engine.generate(
            input_ids=[PROMPT, PROMPT[:7]], sampling_params={**SEEDED, "n": 4}, return_logprob=True, logprob_start_len=0
        )
        return [answer_of(output) for output in outputs]

    plain, guessed, count = both(monkeypatch, tiny_model, act)

    assert guessed == plain
    assert len({tuple(answer.ids) for answer in plain}) == 8
    assert count > 100


def test_turns_of_a_session(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second goes on from the first; the third branches off in the middle of it, at tokens that are cached."""

    def act(engine: Engine) -> Any:
        session = engine.open_session(10000)
        turns = [(PROMPT, None), ([7, 8, 9], None), ([10], {"rid": "first", "offset": 30}), ([11, 12], None)]
        outputs = []
        for number, (ids, place) in enumerate(turns):
            rid = "first" if number == 0 else f"turn {number}"
            outputs.append(
                engine.generate(
                    input_ids=ids,
                    sampling_params={**GREEDY, "max_new_tokens": 40},
                    rid=rid,
                    session_params={"id": session, **(place or {})},
                )
            )
        return [(output["output_ids"], output["meta_info"]["cached_tokens"] > 0) for output in outputs]

    plain, guessed, count = both(monkeypatch, tiny_model, act)

    assert guessed == plain
    assert [is_cached for _, is_cached in plain] == [False, True, True, True]
    assert count > 100


class Stream:
    """A long request, read in a thread. It goes on step by step until `join`, so that nothing comes too late for it."""

    def __init__(self, engine: Engine, ids: list[int], answers: Answers) -> None:
        self._ids: list[int] = []
        self._permits = answers.permits = threading.Semaphore(3)
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(engine, ids))
        self._thread.start()
        assert self._begun.wait(60)

    def _read(self, engine: Engine, ids: list[int]) -> None:
        for output in engine.generate(input_ids=ids, sampling_params=LONG, stream=True):
            self._ids = output["output_ids"]
            self._begun.set()

    def beside(self, act: Callable[..., tuple[bool, str]], *arguments: Any, **named: Any) -> None:
        """Call `act`, with a step now and then until it returns."""
        results: list[tuple[bool, str]] = []
        thread = threading.Thread(target=lambda: results.append(act(*arguments, **named)))
        thread.start()
        while thread.is_alive():
            self._permits.release()
            thread.join(0.2)
        assert results
        assert results[0][0], results

    def join(self) -> list[int]:
        self._permits.release(10_000)
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._ids


@pytest.fixture(scope="module")
def long_answers(tiny_model: str) -> Answers:
    """Of the long request."""
    with pytest.MonkeyPatch.context() as patch, noting(patch, tiny_model) as (engine, answers):
        engine.generate(input_ids=PROMPT, sampling_params=LONG)
    return answers


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pauses_in_the_middle_of_a_request(
    tiny_model: str, long_answers: Answers, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, num_guessed = long_answers.num_rows, long_answers.num_guessed
    with guessing(monkeypatch, tiny_model, long_answers) as engine:
        stream = Stream(engine, PROMPT, long_answers)
        for _ in range(4):
            stream.beside(engine.pause_generation, mode)
            stream.beside(engine.continue_generation)
        ids = stream.join()
    [want] = long_answers.ids.values()
    assert ids == want
    assert (long_answers.num_rows - rows > 1) == (mode == "retract"), "it was not set back"
    assert long_answers.num_guessed - num_guessed > 200


@pytest.fixture(scope="module")
def other_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor.flip(0).contiguous() if "proj" in name else tensor for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_new_weights_in_the_middle_of_a_request(
    tiny_model: str, other_model: str, long_answers: Answers, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on as one of the new weights does after the same tokens, whatever was guessed when they came."""
    prompts = [PROMPT, PROMPT[:9], random_ids(33, seed=6)]

    def answers(engine: Engine) -> list[list[int]]:
        return [output["output_ids"] for output in engine.generate(input_ids=prompts, sampling_params=GREEDY)]

    [of_old] = long_answers.ids.values()
    with guessing(monkeypatch, tiny_model, long_answers) as engine:
        stream = Stream(engine, PROMPT, long_answers)
        stream.beside(engine.pause_generation, mode)
        stream.beside(engine.update_weights_from_disk, other_model, abort_all_requests=False)
        stream.beside(engine.continue_generation)
        ids = stream.join()
        updated = answers(engine)
        assert engine.internal_state().pool.consistent
    num_same = next(index for index, pair in enumerate(zip(ids, of_old, strict=True)) if pair[0] != pair[1])
    with running_engine(other_model) as engine:
        assert updated == answers(engine)
        rest = {**LONG, "max_new_tokens": LONG["max_new_tokens"] - num_same}
        on = engine.generate(input_ids=PROMPT + ids[:num_same], sampling_params=rest)["output_ids"]
    assert len(ids) == len(of_old)
    assert ids[num_same:] == on


def test_the_cache_never_holds_what_was_only_guessed(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are set back again and again, and others that find what these have computed."""
    prompts = [random_ids(length, seed=length) for length in (3, 30, 41, 17)]
    first = {"input_ids": prompts, "sampling_params": {**GREEDY, "max_new_tokens": 80}}
    exact = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 2}

    def later(engine: Engine, said: list[list[int]]) -> tuple[list[Any], list[int]]:
        """After each answer, and in the middle of it."""
        longer = [prompt + ids[:count] for prompt, ids in zip(prompts, said, strict=True) for count in (80, 45)]
        outputs = [engine.generate(input_ids=ids, sampling_params=GREEDY, **exact) for ids in longer]
        return [answer_of(output) for output in outputs], [output["meta_info"]["cached_tokens"] for output in outputs]

    with noting(monkeypatch, tiny_model, disable_radix_cache=True) as (engine, answers):
        said = [output["output_ids"] for output in engine.generate(**first)]
        cold, _ = later(engine, said)
    with guessing(
        monkeypatch, tiny_model, answers, max_total_tokens=352, schedule_conservativeness=0.01, page_size=1
    ) as engine:
        assert [output["output_ids"] for output in engine.generate(**first)] == said
        assert engine.internal_state().num_retracted > 0
        found, cached = later(engine, said)

    assert found == cold
    assert sum(cached) > 200
    assert answers.num_guessed > 100
