"""Messages about a wrong field: the client's words, and the field by its name."""

import msgspec
import pytest

from headrace.messages.bodies import field_error
from headrace.messages.requests import GenerateReqInput
from headrace.plain_types import plain_reason


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"text": 3}', "text: expected a string, a list or null, got an integer", "text"),
        (b'{"stream": "yes"}', "stream: expected a boolean, got a string", "stream"),
        (b'{"input_ids": 1.5}', "input_ids: expected a list or null, got a number", "input_ids"),
        (
            b'{"sampling_params": {"temperature": []}}',
            "sampling_params.temperature: expected a number or null, got a list",
            "sampling_params.temperature",
        ),
        (b"[]", "the body is not as expected: expected an object, got a list", None),
        (
            b'{"temprature": 1}',
            "unknown field 'temprature'; did you mean 'sampling_params.temperature'?",
            "temprature",
        ),
        (
            b'{"sampling_params": {"max_tokens": 1}}',
            "unknown field 'sampling_params.max_tokens'; did you mean 'sampling_params.max_new_tokens'?",
            "sampling_params.max_tokens",
        ),
        (b'{"bogus": 1}', "unknown field 'bogus'", "bogus"),
    ],
)
def test_messages_name_the_field_and_speak_of_json_types(body, message, param):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=GenerateReqInput)
    error = field_error(str(caught.value), GenerateReqInput)

    assert (error.message, error.param) == (message, param)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('{"sampling_params": 3}', "sampling_params: expected an object, a list or null, got an integer"),
        ('{"priority": "high"}', "priority: expected an integer or null, got a string"),
        ('{"bogus": 3}', "unknown field `bogus`"),
        ("[3]", "expected an object, got a list"),
    ],
)
def test_the_same_words_are_there_for_what_is_no_body(given, says):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(given, type=GenerateReqInput)
    assert plain_reason(caught.value) == says


def test_bounds_stay_beside_the_type():
    class Body(msgspec.Struct):
        n: int = 0

    error = field_error("Expected `int` >= 1 - at `$.n`", Body)
    assert error.message == "n: expected an integer >= 1"
