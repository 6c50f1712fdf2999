"""Lines of the log: when, where from, one line each, and the same as JSON."""

import json
import logging
from datetime import UTC, datetime

import pytest

from headrace import log

FORGED = 'x\r\n2026-01-01 main I forged: "all" is well\x1b[2J\u2028é'


@pytest.fixture
def logged(capsys):
    """Configures the log and returns a function that gives its lines."""
    root = logging.getLogger("headrace")
    before = root.handlers[:], root.level, root.propagate

    def lines(log_format):
        log.configure("info", "scheduler 1", log_format)
        logger = log.get_logger("somewhere")
        logger.info("said %s", FORGED, extra=log.with_fields({"rid": FORGED, "tokens": 3}))
        logger.debug("not said")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logger.exception("failed")
        return capsys.readouterr().err.split("\n")

    yield lines
    root.handlers[:], root.level, root.propagate = before


def is_now(text):
    at = datetime.fromisoformat(text)
    assert at.tzinfo is not None
    return abs((datetime.now(UTC) - at).total_seconds()) < 600


def test_a_line_of_text_begins_with_date_zone_and_process(logged):
    said, failed, *traceback, end = logged("text")

    when, rest = said.split(" ", 1)
    assert is_now(when)
    assert rest == (
        'scheduler 1 I headrace.somewhere: said x\\r\\n2026-01-01 main I forged: "all" is well\\x1b[2J\\u2028é'
    )
    assert failed.endswith("scheduler 1 E headrace.somewhere: failed")
    assert end == ""
    assert [line for line in traceback if not line.startswith("  ")] == []


def test_a_line_of_json_is_an_object_with_its_fields(logged):
    said, failed, end = logged("json")

    line = json.loads(said)
    assert is_now(line.pop("time"))
    assert line == {
        "level": "info",
        "process": "scheduler 1",
        "logger": "headrace.somewhere",
        "message": f"said {FORGED}",
        "rid": FORGED,
        "tokens": 3,
    }
    line = json.loads(failed)
    assert line["level"] == "error"
    assert line["traceback"].endswith("ValueError: two\nlines")
    assert said.isascii()
    assert end == ""


def test_words_that_could_be_taken_for_fields_are_quoted():
    fields = {"rid": "a reason=stop", "key": "team-a", "other": "a=b", "quote": "'", "empty": "", "count": 3}
    assert log.as_words(fields) == "rid='a reason=stop' key=team-a other='a=b' quote=\"'\" empty='' count=3"
