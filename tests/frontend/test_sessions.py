"""Sessions: the tokens of earlier turns come before the new ones, along the branch that was asked for."""

import asyncio

import pytest
from frontend_fakes import turns

from headrace.errors import CapacityError, NotFoundError, RequestError
from headrace.frontend.sessions import Sessions
from headrace.messages.requests import SessionParams


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions(clock):
    return Sessions(3, 100, 60.0, lambda ids: "".join(map(chr, ids)), clock)


def params(session, **fields):
    return SessionParams(id=session, **fields)


def turn(sessions, session, own_rid, ids, outputs, **fields):
    """A whole turn; its prompt."""
    prompt, entered, _ = sessions.begin(params(session, **fields), own_rid, ids)
    sessions.finish(entered, outputs)
    return prompt


def test_a_turn_goes_on_from_the_latest(sessions):
    s = sessions.open()
    assert turn(sessions, s, "a", [1, 2], [3]) == [1, 2]
    assert turn(sessions, s, "b", [4], [5, 6]) == [1, 2, 3, 4]
    assert turn(sessions, s, "c", [7], []) == [1, 2, 3, 4, 5, 6, 7]


def test_a_turn_branches_from_any_other(sessions):
    s = sessions.open()
    turn(sessions, s, "a", [1], [2])
    turn(sessions, s, "b", [3], [4])

    assert turn(sessions, s, "c", [5], [6], rid="a") == [1, 2, 5]
    assert turn(sessions, s, "d", [7], [], rid="b") == [1, 2, 3, 4, 7]
    assert turn(sessions, s, "e", [8], [], rid="c") == [1, 2, 5, 6, 8]


@pytest.mark.parametrize(
    "offset, history", [(None, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (3, [1, 2, 3]), (1, [1]), (-1, [1, 2, 3])]
)
def test_an_offset_cuts_the_history(sessions, offset, history):
    s = sessions.open()
    turn(sessions, s, "a", [1, 2], [3, 4])

    assert turn(sessions, s, "b", [9], [8], offset=offset) == [*history, 9]
    assert turn(sessions, s, "c", [7], [], rid="b") == [*history, 9, 8, 7]


def test_the_output_of_the_turn_it_goes_on_from_may_be_dropped(sessions):
    s = sessions.open()
    turn(sessions, s, "a", [1], [2])
    turn(sessions, s, "b", [3], [4])

    assert turn(sessions, s, "c", [5], [], drop_previous_output=True) == [1, 2, 3, 5]


def test_replace_forgets_what_came_after_and_names_what_runs(sessions):
    s = sessions.open()
    turn(sessions, s, "a", [1], [2])
    turn(sessions, s, "b", [3], [4])
    sessions.begin(params(s), "runs", [5])

    prompt, entered, stopped = sessions.begin(params(s, rid="a", replace=True), "d", [6])
    sessions.finish(entered, [7])

    assert prompt == [1, 2, 6]
    assert stopped == ["runs"]
    with pytest.raises(NotFoundError, match="no turn"):
        sessions.begin(params(s, rid="b"), "e", [1])
    assert turn(sessions, s, "f", [8], []) == [1, 2, 6, 7, 8]


def test_replace_without_a_turn_begins_again(sessions):
    s = sessions.open()
    turn(sessions, s, "a", [1], [2])

    assert turn(sessions, s, "b", [3], [4], replace=True) == [3]
    assert turn(sessions, s, "c", [5], []) == [3, 4, 5]


def test_a_second_bos_is_left_out(sessions):
    s = sessions.open()
    prompt, entered, _ = sessions.begin(params(s), "a", [0, 1], bos_id=0)
    sessions.finish(entered, [2])
    assert prompt == [0, 1]
    assert sessions.begin(params(s), "b", [0, 3], bos_id=0)[0] == [0, 1, 2, 3]


def test_a_turn_that_has_not_finished_cannot_be_gone_on_from(sessions):
    s = sessions.open()
    _, entered, _ = sessions.begin(params(s), "a", [1])
    with pytest.raises(RequestError, match="has not finished"):
        sessions.begin(params(s), "b", [2])

    sessions.cancel(entered)

    assert sessions.begin(params(s), "b", [2])[0] == [2]


def test_a_turn_given_up_leaves_the_one_before(sessions):
    s = sessions.open()
    turn(sessions, s, "a", [1], [2])
    sessions.cancel(sessions.begin(params(s), "b", [3])[1])

    assert turn(sessions, s, "b", [4], []) == [1, 2, 4]


def test_what_is_not_there_is_refused(sessions):
    s = sessions.open("mine")
    assert s == "mine"
    with pytest.raises(RequestError, match="is already open"):
        sessions.open("mine")
    with pytest.raises(NotFoundError, match="no such session") as unknown:
        sessions.begin(params("other"), "a", [1])
    assert unknown.value.param == "session_params"
    with pytest.raises(NotFoundError, match="no such session") as closed:
        sessions.close("other")
    assert closed.value.param == "session_id"
    with pytest.raises(RequestError, match="needs the id"):
        sessions.begin(params(None), "a", [1])
    turn(sessions, s, "a", [1], [])
    with pytest.raises(RequestError, match="already a turn of this session"):
        sessions.begin(params(s), "a", [1])
    sessions.close(s)
    with pytest.raises(NotFoundError):
        sessions.close(s)


@pytest.mark.parametrize(
    "fields", [{"session_id": ""}, {"session_id": "x" * 1000}, {"capacity_of_str_len": -1}, {"timeout_s": 0.0}]
)
def test_odd_sessions_are_not_opened(sessions, fields):
    with pytest.raises(RequestError):
        sessions.open(**fields)
    assert len(sessions) == 0


def test_sessions_and_their_tokens_are_bounded(sessions):
    first, _, _ = (sessions.open() for _ in range(3))
    with pytest.raises(CapacityError, match="--max-sessions"):
        sessions.open()
    turn(sessions, first, "a", [1] * 60, [2] * 20)
    with pytest.raises(CapacityError, match="80 tokens"):
        sessions.begin(params(first), "b", [1] * 21)

    sessions.close(first)

    other = sessions.open()
    assert turn(sessions, other, "a", [1] * 100, []) == [1] * 100


def test_a_session_s_own_limit_counts_characters(sessions):
    s = sessions.open(capacity_of_str_len=4)
    turn(sessions, s, "a", [65, 66], [67])
    with pytest.raises(RequestError, match="4 characters"):
        sessions.begin(params(s), "b", [68, 69])
    assert turn(sessions, s, "b", [68], []) == [65, 66, 67, 68]


def test_unused_sessions_close_and_running_ones_do_not(sessions, clock):
    short, idle, busy = sessions.open(timeout_s=10.0), sessions.open(), sessions.open()
    _, entered, _ = sessions.begin(params(busy), "a", [1])

    clock.now = 11.0
    with pytest.raises(NotFoundError):
        sessions.begin(params(short), "b", [1])
    clock.now = 61.0
    assert sessions.open() != idle
    assert len(sessions) == 2

    sessions.finish(entered, [2])
    clock.now = 121.0
    assert turn(sessions, busy, "c", [3], []) == [1, 2, 3]


def test_a_turn_that_ends_after_its_session_was_closed_is_forgotten(sessions):
    s = sessions.open("s")
    _, entered, _ = sessions.begin(params(s), "a", [1] * 50)
    sessions.close(s)

    sessions.finish(entered, [2] * 50)
    sessions.cancel(entered)

    assert turn(sessions, sessions.open("s"), "b", [1] * 100, []) == [1] * 100


# -- through the tokenizer manager


def sent(frontend, rid):
    return bytes(frontend.engine.requests[rid].content.ids()).decode()


async def test_the_engine_gets_the_whole_sequence(make_frontend):
    frontend = make_frontend()
    s = await frontend.manager.open_session()

    [first] = await frontend.call("hello", rid="a", session_params={"id": s})
    [second] = await frontend.call(" world", rid="b", session_params={"id": s}, sampling_params={"max_new_tokens": 3})

    assert first["text"] == "hello"
    assert sent(frontend, "b") == "hellohello world"
    assert second["meta_info"]["prompt_tokens"] == 16
    await frontend.call("!", rid="c", session_params={"id": s, "rid": first["meta_info"]["id"]})
    assert sent(frontend, "c") == "hellohello!"


async def test_a_client_that_leaves_leaves_no_turn(make_frontend):
    frontend = make_frontend()
    s = await frontend.manager.open_session()
    await frontend.call("ab", rid="a", session_params={"id": s})
    task = frontend.start("cd", rid="b", session_params={"id": s}, stream=True)
    await frontend.engine.until(lambda: "b" in frontend.engine.requests)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await turns()
    frontend.engine.pump()
    await turns()

    await frontend.call("ef", rid="b2", session_params={"id": s})

    assert sent(frontend, "b2") == "ababef"


async def test_a_prompt_refused_for_its_length_leaves_no_turn(make_frontend):
    frontend = make_frontend()
    s = await frontend.manager.open_session()
    with pytest.raises(RequestError, match="maximum context length"):
        await frontend.call("x" * 5000, session_params={"id": s})

    await frontend.call("ok", rid="a", session_params={"id": s})

    assert sent(frontend, "a") == "ok"


async def test_replacing_aborts_what_runs(make_frontend):
    frontend = make_frontend()
    s = await frontend.manager.open_session()
    await frontend.call("ab", rid="a", session_params={"id": s})
    runs = frontend.start("cd", rid="b", session_params={"id": s})
    await frontend.engine.until(lambda: "b" in frontend.engine.requests)

    await frontend.call("ef", rid="c", session_params={"id": s, "rid": "a", "replace": True})

    [answer] = await runs
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert sent(frontend, "c") == "ababef"


@pytest.mark.parametrize(
    "fields", [{"sampling_params": {"n": 2}}, {"text": None, "input_embeds": [[0.5, 0.5]]}], ids=["n", "embeds"]
)
async def test_what_a_session_cannot_hold_is_refused(make_frontend, fields):
    frontend = make_frontend()
    s = await frontend.manager.open_session()
    with pytest.raises(RequestError, match="session_params"):
        await frontend.call(**{"text": "a", "session_params": {"id": s}, **fields})
