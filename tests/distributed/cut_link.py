"""A link between hosts that a test can cut: bytes go both ways through it until then, and afterwards nothing does, not even an end."""

import selectors
import socket
import threading


class Link:
    """Forwards one port of this machine to another. seen: all bytes that went through."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._to = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Forward nothing from now on. The connections stay open, as after a cut cable."""
        self._wake.close()
        self._thread.join()

    def close(self) -> None:
        self.cut()
        for one in (*self._sockets, self._listening, self._woken):
            one.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._forward(key.fileobj, key.data)

    def _accept(self) -> None:
        near, _ = self._listening.accept()
        try:
            far = socket.create_connection(self._to)
        except OSError:  # nobody listens there yet
            near.close()
            return
        self._sockets += [near, far]
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            target.sendall(data)
        except OSError:
            data = b""
        self.seen += data
        if not data:
            self._selector.unregister(source)
            try:
                target.shutdown(socket.SHUT_WR)
            except OSError:
                pass
