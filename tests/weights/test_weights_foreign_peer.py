"""Whatever answers at the address of a process group: what it says reaches the log, and no client."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from headrace.errors import ExecutionError
from headrace.weight_sync.group import WeightGroup

BANNERS = (
    b"SSH-2.0-OpenSSH_9.6 host-secret\r\n",
    b"+OK redis_version:7.2 password\r\n" * 4,
    b"\x01" * 64,
    b"\xff\xfe" * 64,
)


@contextmanager
def peer_that_says(banner: bytes) -> Iterator[int]:
    """A port where every connection is told `banner`, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.sendall(banner)
                    while connection.recv(4096):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def refusal(port: int) -> str:
    with pytest.raises(ExecutionError) as caught:
        WeightGroup("127.0.0.1", port, 1, 2, "g", "gloo", timeout_s=0.3)
    assert caught.value.__cause__ is None
    return caught.value.message


def test_no_error_tells_what_a_foreign_peer_sent():
    messages = set()
    for banner in BANNERS:
        with peer_that_says(banner) as port:
            messages.add(refusal(port))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        messages.add(refusal(unused.getsockname()[1]))
    # One text for all of them, so that nobody learns either whether anything is there.
    (message,) = messages
    assert "could not be joined" in message
    assert not re.search(r"127\.0|secret|redis|tcp|Error|errno|/", message)
