"""Messages reach the handler of their type."""

from headrace.messages.channel import TypeBasedDispatcher
from headrace.messages.control import Heartbeat, ShutdownReq


def test_a_message_reaches_the_handler_of_its_type_and_others_are_counted():
    seen = []
    dispatch = TypeBasedDispatcher()
    dispatch.register(Heartbeat, lambda message: seen.append(message.process))

    assert dispatch(Heartbeat("scheduler"))
    assert not dispatch(ShutdownReq())

    assert seen == ["scheduler"]
    assert dispatch.num_unhandled == 1
