"""Lines of finished requests: what each level shows, and that lower levels show no text."""

import asyncio

import pytest
from frontend_fakes import answers_of, request

from headrace.frontend.records import MAX_CHARACTERS
from headrace.frontend.tenants import Caller, Tenant, TenantLimits
from headrace.messages.outputs import FinishReason
from headrace.sampling.params import LOGGED_GRAMMAR_CHARS

ROOMY = {"max_new_tokens": 30, "temperature": 0.5, "stop": ["never"]}


async def lines(frontend, caplog, *args, **fields):
    caplog.clear()
    with caplog.at_level("INFO"):
        await frontend.call(*args, **fields)
    return [r.getMessage() for r in caplog.records if "finished" in r.getMessage()]


@pytest.mark.parametrize("level,sampling,text", [(0, False, False), (1, True, False), (2, True, True), (3, True, True)])
async def test_a_level_adds_to_the_one_below(make_frontend, caplog, level, sampling, text):
    frontend = make_frontend(log_requests=True, log_requests_level=level)

    [line] = await lines(frontend, caplog, "secret", rid="r", sampling_params=ROOMY)

    assert "rid=r key=- reason=length prompt_tokens=6" in line
    assert ('"temperature":0.5' in line) == sampling
    assert ('"max_new_tokens":30' in line) == sampling
    assert ("prompt='secret' text='secret'" in line) == text
    assert ("secret" in line) == text


async def test_the_line_names_the_key_and_has_its_values_as_fields(make_frontend, caplog):
    frontend = make_frontend(log_requests=True, log_requests_level=1)
    key = Caller(Tenant(TenantLimits(name="team a")))
    with caplog.at_level("INFO"):
        asked = request("secret", rid="r", sampling_params=ROOMY)
        task = asyncio.create_task(anext(answers_of(frontend.manager, asked, caller=key)))
        await frontend.engine.until(lambda: len(frontend.engine.requests) == 1)
        frontend.engine.emit(key.scope + "r", "xy", FinishReason("stop", matched=256))
        await task

    [record] = [record for record in caplog.records if "finished" in record.getMessage()]
    assert "finished rid=r key='team a' reason=stop prompt_tokens=6" in record.getMessage()
    said = {name: record.fields[name] for name in ("rid", "key", "reason", "prompt_tokens", "completion_tokens")}
    assert said == {"rid": "r", "key": "team a", "reason": "stop", "prompt_tokens": 6, "completion_tokens": 2}
    assert record.fields["e2e_s"] >= record.fields["ttft_s"] > 0
    assert key.scope not in record.getMessage() + str(record.fields)


@pytest.mark.parametrize("level,is_whole", [(2, False), (3, True)])
async def test_only_level_3_shows_all_of_a_long_text(make_frontend, caplog, monkeypatch, level, is_whole):
    monkeypatch.setattr("headrace.frontend.records.MAX_CHARACTERS", 8)
    frontend = make_frontend(log_requests=True, log_requests_level=level)

    [line] = await lines(frontend, caplog, "beginning, end", sampling_params=ROOMY)
    [ids] = await lines(frontend, caplog, input_ids=[101, 102, 103], sampling_params=ROOMY)

    assert line.count("end") == (2 if is_whole else 0)
    assert ("beginnin'... (14 characters)" in line) == (not is_whole)
    assert ("prompt=[101, 102, 103]" in ids) == is_whole
    assert "prompt=[101, 10" in ids


async def test_a_long_grammar_is_cut(make_frontend, caplog):
    frontend = make_frontend(log_requests=True, log_requests_level=1)

    [short] = await lines(frontend, caplog, "a", sampling_params=ROOMY | {"regex": "[a-z]+"})
    [long] = await lines(frontend, caplog, "a", sampling_params=ROOMY | {"regex": "b" * 1000})

    assert '"grammar":["regex","[a-z]+","regex",-1]' in short
    assert f'"{"b" * LOGGED_GRAMMAR_CHARS}... (1000 characters)"' in long


async def test_an_input_of_embeddings_is_counted_only(make_frontend, caplog):
    frontend = make_frontend(log_requests=True, log_requests_level=3)
    [line] = await lines(frontend, caplog, input_embeds=[[0.5, 0.25]], sampling_params={"max_new_tokens": 1})
    assert "prompt=1 embeddings" in line


async def test_levels_change_at_run_time_and_without_the_log_nothing_is_kept(make_frontend, caplog):
    frontend = make_frontend()
    assert await lines(frontend, caplog, "secret") == []
    for level in (1, 2, 3, 0):
        now = frontend.manager.settings.configure_logging(log_requests=True, log_requests_level=level)
        assert now["log_requests_level"] == level
        [line] = await lines(frontend, caplog, "secret")
        assert ("secret" in line) == (level >= 2)


def test_a_text_is_cut_at_2048_characters():
    assert MAX_CHARACTERS == 2048
