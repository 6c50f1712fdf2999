"""Whatever breaks between a call's entry and its being sent: nothing of the call is left, and the next one is served."""

import asyncio
import dataclasses

import pytest
from frontend_fakes import request

from headrace.errors import RequestError
from headrace.frontend.tenants import Caller, Tenant, TenantLimits
from headrace.messages.channel import MessageCodec
from headrace.messages.control import Heartbeat, ResetReq
from headrace.messages.operations import START_PROFILE, StartProfileBody

POINTS = {
    "timelines": ("headrace.frontend.records.Timeline", None),
    "number of adapters": ("headrace.frontend.adapters.Adapters.check_number", None),
    "tokenizing": ("headrace.text.batch_tokenizer.AsyncDynamicBatchTokenizer.encode", None),
    "bad words": ("headrace.text.batch_tokenizer.AsyncDynamicBatchTokenizer.encode_words", None),
    "session": ("headrace.frontend.sessions.Sessions.begin", None),
    "parameters": ("headrace.sampling.params.SamplingParams.resolve", None),
    "packing": ("headrace.frontend.inputs.pack_int32", None),
    "adapter": ("headrace.frontend.adapters.Adapters.acquire", None),
    "choosing a replica": ("headrace.frontend.engine_link.EngineLink._choose", None),
    "submitting": ("headrace.frontend.engine_link.EngineLink.submit", None),
    "sending": ("headrace.messages.channel.LocalQueue.send", None),
}


class Fault(Exception):
    """Nobody expects it."""


def caller():
    return Caller(Tenant(TenantLimits(name="t", max_concurrent=4)))


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("many", [False, True], ids=["one", "several"])
async def test_a_fault_before_a_call_is_sent_leaves_nothing_of_it(make_frontend, monkeypatch, where, many):
    frontend = make_frontend(max_loras=1, lora_paths="a=/nowhere")
    manager, who = frontend.manager, caller()
    manager.start()
    session = await manager.open_session()
    fields = {"text": "ab", "rid": "r", "sampling_params": {"bad_words": ["x"]}}
    if where in ("session", "adapter") or not many:
        fields |= {"session_params": {"id": session}} if where == "session" else {}
        fields |= {"lora_path": "a"} if where == "adapter" else {}
    else:
        fields |= {"text": ["ab", "cd"], "sampling_params": {"bad_words": ["x"], "n": 2}}

    def broken(*args, **kwargs):
        raise Fault(where)

    with monkeypatch.context() as patch:
        patch.setattr(POINTS[where][0], broken)
        with pytest.raises(Fault):
            await anext(manager.generate_request(request(**fields), caller=who))

    assert frontend.is_clean
    assert (who.tenant.num_live, who.tenant.num_queued) == (0, 0)
    await asyncio.wait_for(manager.table.wait_until_empty(), 1.0)
    assert not manager.records._timelines._live
    fields.pop("lora_path", None)
    assert (await frontend.call(**fields))[0]


async def test_what_no_frame_can_hold_is_the_caller_s_error_and_leaves_nothing(make_frontend, monkeypatch):
    """As between processes: the channel of this test has no frames of its own."""
    frontend = make_frontend()
    send = frontend.channels.sender("to_scheduler").send
    codec = MessageCodec()
    monkeypatch.setattr(
        "headrace.messages.channel.LocalQueue.send", lambda self, message: (codec.encode(message), send(message))
    )
    monkeypatch.setattr("headrace.frontend.prompts.MAX_PRIORITY", 2**80)
    tokenizer = frontend.manager.prompt_tokenizer
    tokenizer.limits = dataclasses.replace(tokenizer.limits, uses_priority=True)

    with pytest.raises(RequestError, match="cannot be sent"):
        await frontend.start("a", priority=2**70)
    with pytest.raises(RequestError, match="cannot be sent"):
        await START_PROFILE.ask(frontend.manager.control, StartProfileBody(num_steps=2**70))

    assert frontend.is_clean


@pytest.mark.parametrize("message", [ResetReq(2**64), Heartbeat("\ud800")])
def test_a_message_that_cannot_be_encoded_is_a_request_error(message):
    with pytest.raises(RequestError, match="cannot be sent"):
        MessageCodec().encode(message)
