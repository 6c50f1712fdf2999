"""An Engine is measured by the same records as a server."""

import json

from headrace.benchmark.targets import EngineTarget
from headrace.benchmark.workloads import PRESETS, Answer
from headrace.errors import RequestError


class FakeEngine:
    """Streams what it was given, cumulative as the real one, and remembers the calls."""

    def __init__(self, *outputs, error=None):
        self.outputs, self.error, self.calls = outputs, error, []

    async def async_generate(self, **call):
        self.calls.append(call)

        async def items():
            for output in self.outputs:
                yield output
            if self.error:
                raise self.error

        return items()

    def flush_cache(self):
        return True

    def get_server_info(self):
        return {"dtype": "bfloat16", "model_path": "m", "api_key": "secret", "num_threads": 2}


def output(text, count, reason=None):
    meta = {"completion_tokens": count, "cached_tokens": 16, "finish_reason": reason}
    return {"text": text, "output_ids": [], "meta_info": meta}


async def test_only_items_with_new_tokens_are_chunks():
    engine = FakeEngine(output("a", 1), output("abc", 3), output("abc", 3, {"type": "length"}))

    record = await EngineTarget("e", engine).complete([1, 2], Answer(3))

    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (2, 3, 16)
    assert len(record.chunk_s) == 2
    assert record.text == "abc"
    assert engine.calls[0]["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}


async def test_a_task_may_end_its_answer_and_asks_for_its_schema():
    engine = FakeEngine(output("{}", 2, {"type": "stop"}))
    await EngineTarget("e", engine).complete([1], PRESETS["G"].answer)
    (call,) = engine.calls
    assert not call["sampling_params"]["ignore_eos"]
    assert json.loads(call["sampling_params"]["json_schema"])["required"] == ["people"]


async def test_a_refusal_and_an_abort_are_errors_of_the_record():
    refused = await EngineTarget("e", FakeEngine(error=RequestError("too long"))).complete([1], Answer(1))
    aborted = await EngineTarget("e", FakeEngine(output("", 0, {"type": "abort", "message": "why"}))).complete(
        [1], Answer(1)
    )

    assert refused.error == "RequestError: too long"
    assert aborted.error == "aborted: why"


async def test_it_describes_itself_without_keys():
    target = EngineTarget("e", FakeEngine())

    assert await target.describe() == {"model_path": "m", "dtype": "bfloat16", "num_threads": 2}
    assert await target.flush()
