"""A command in a pseudo-terminal, as a person uses it."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

LIMIT_S = 60

# A leader of a session gets the terminal that it opens as its own, and so its Ctrl-C.
# Tests may run in the background, where Ctrl-C is ignored.
_MAIN = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "os.close(os.open(os.ttyname(0), os.O_RDWR)); from headrace.cli import main; main()"
)


class PseudoTerminal:
    """Runs `headrace ARGV`. seen: what it has written and `until` has not passed yet. settings: the terminal's before it runs."""

    def __init__(self, *argv, columns=80, lines=24, **more):
        self.fd, theirs = pty.openpty()
        self.resize(columns, lines)
        self.settings = termios.tcgetattr(self.fd)
        keep = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        env = {**keep, "TERM": "xterm", **more.pop("env", {})}
        self.command = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            **more,
        )
        os.close(theirs)
        self.seen = ""

    def resize(self, columns, lines):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def types(self, text):
        os.write(self.fd, text.encode())

    def until(self, text):
        """What is shown up to this text, which must come."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            assert self.read(deadline), f"waited for {text!r}, got {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def read(self, deadline):
        """Read what comes until then; False if nothing does."""
        ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            more = os.read(self.fd, 65536)
        except OSError:
            return False  # its last user has closed it
        self.seen += more.decode(errors="replace")
        return bool(more)

    def ends(self):
        """Read until it has ended. Returns its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.read(deadline):
            pass
        return self.command.wait(LIMIT_S)

    def close(self):
        """End it, if it has not ended."""
        if self.command.poll() is None:
            self.command.kill()
            self.command.wait()
        os.close(self.fd)
