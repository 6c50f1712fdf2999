"""The terminal chat, over an Engine of this process or over a running server.

Owns the conversation, the commands that begin with a slash, and how a reply is shown. The two ways to get a reply are
`EngineChat` and `ServerChat`. Runs in the main thread; Ctrl-C during a reply ends that reply only.
"""

import dataclasses
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from headrace.benchmark.sse import DONE, EventParser
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, HeadraceError, RequestError

Message = dict[str, str]

HELP = """[bold]/clear[/bold]           begin again (keeps the system message)
[bold]/system TEXT[/bold]     set the system message and begin again; without TEXT: remove it
[bold]/schema FILE[/bold]     make replies JSON that matches the schema in FILE, or given here; without FILE: any text again
[bold]/help[/bold]            this
[bold]/exit[/bold], Ctrl-D    leave
Ctrl-C           stop the reply that is being written"""
_CONNECT_TIMEOUT_S = 10.0
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """How replies are sampled; None = as the model or the server likes."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Newly arrived text. num_tokens: of the reply so far."""

    text: str
    num_tokens: int


class ChatSource(Protocol):
    """Where replies come from."""

    name: str

    def reply(self, messages: list[Message], json_schema: str | None) -> Iterator[Piece]:
        """The next message of the assistant, piece by piece; closing the iterator stops it. Raises HeadraceError.

        json_schema: what the message must match, as JSON; None = any text.
        """
        ...


class EngineChat:
    """Replies of an Engine in this process; a context manager that owns it."""

    def __init__(self, server_args: ServerArgs, sampling: ChatSampling) -> None:
        """Load the tokenizer and its template first: a model that cannot chat is refused before its weights are read."""
        from headrace.api.engine import Engine
        from headrace.processes.model_files import open_chat_template, open_tokenizer

        self.name = server_args.served_name
        self._tokenizer = open_tokenizer(server_args)
        template = open_chat_template(server_args, self._tokenizer)
        if template is None:
            raise ConfigError(f"{self.name} has no chat template; give one with --chat-template")
        self._template = template
        self._sampling = sampling
        self._engine = Engine(**dataclasses.asdict(server_args))
        self._context_length = int(self._engine.get_server_info()["context_length"])

    def __enter__(self) -> "EngineChat":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()

    def reply(self, messages: list[Message], json_schema: str | None) -> Iterator[Piece]:
        """See ChatSource. Without a limit of the user's the reply may fill the rest of the context."""
        ids = self._tokenizer.encode_rendered(self._template.render(messages))
        wanted = {name: value for name, value in dataclasses.asdict(self._sampling).items() if value is not None}
        room = self._context_length - len(ids)
        if room < 1:
            raise RequestError(
                f"the conversation fills the context of {self._context_length} tokens; /clear starts again"
            )
        sampling_params = {"max_new_tokens": room, "json_schema": json_schema, **wanted}
        with closing(self._engine.generate(input_ids=ids, sampling_params=sampling_params, stream=True)) as items:
            yield from new_pieces(items)


class ServerChat:
    """Replies of an OpenAI-compatible server."""

    def __init__(self, url: str, sampling: ChatSampling, model: str | None = None, api_key: str | None = None) -> None:
        """Ask the server for its model when none is named. Raises ConfigError when it does not answer."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._sampling = sampling
        self.name = model or self._first_model()

    def __enter__(self) -> "ServerChat":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held between replies."""

    def reply(self, messages: list[Message], json_schema: str | None) -> Iterator[Piece]:
        """See ChatSource. Tokens are counted by the chunks until the usage at the end says."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._sampling.max_new_tokens,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "seed": self._sampling.seed,
            "response_format": None if json_schema is None else _response_format(json_schema),
        }
        payload = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        num_tokens = 0
        with self._open("/v1/chat/completions", payload) as response:
            for chunk in _chunks(response):
                for choice in chunk.get("choices", ()):
                    text = choice.get("delta", {}).get("content")
                    if text:
                        num_tokens += 1
                        yield Piece(text, num_tokens)
                usage = chunk.get("usage")
                if usage:
                    yield Piece("", usage["completion_tokens"])

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(f"{self._url}/v1/models names no model; give one") from error

    def _open(self, path: str, payload: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, payload, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=None if payload else _CONNECT_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise RequestError(_error_message(error.code, error.read())) from error
        except (urllib.error.URLError, OSError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(f"no server answers at {self._url}: {reason}") from error


def _response_format(json_schema: str) -> dict[str, Any]:
    """The schema as OpenAI's API takes it."""
    return {"type": "json_schema", "json_schema": {"name": "schema", "schema": json.loads(json_schema)}}


def run_chat(source: ChatSource, console: Console, system: str | None = None) -> None:
    """Talk until the user leaves.

    When input is no terminal, each line is a message, also one that begins with a slash, and only replies are printed; the
    first reply that fails is raised as its HeadraceError.
    """
    interactive = sys.stdin.isatty()
    conversation = Conversation(system)
    if interactive:
        console.print(f"[bold]{escape(source.name)}[/bold]  [dim]/help lists the commands, Ctrl-D quits[/dim]")
    while (line := _read_line(console, interactive)) is not None:
        if interactive and line.startswith("/"):
            if not _command(line, conversation, console):
                break
        elif line:
            _answer(source, conversation, line, console, interactive)


class Conversation:
    """The messages so far, the system message first when there is one, and the schema of the next reply."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self.json_schema: str | None = None
        self.messages: list[Message] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message and the schema."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def set_system(self, text: str) -> None:
        """Begin again with another system message; empty = none."""
        self._system = text or None
        self.clear()


def new_pieces(items: Iterable[dict[str, Any]]) -> Iterator[Piece]:
    """What each output of an Engine's cumulative stream adds to the one before."""
    seen = 0
    for item in items:
        text = item["text"]
        yield Piece(text[seen:], item["meta_info"]["completion_tokens"])
        seen = max(seen, len(text))


def _read_line(console: Console, interactive: bool) -> str | None:
    """The next message, stripped; None at the end of input. Ctrl-C at the prompt only empties the line."""
    while True:
        try:
            line = console.input("[bold green]>[/bold green] ") if interactive else sys.stdin.readline()
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print()
            continue
        if not interactive and not line:
            return None
        return line.strip()


def _command(line: str, conversation: Conversation, console: Console) -> bool:
    """Carry out a slash command; False when the chat is to end."""
    name, _, rest = line.partition(" ")
    match name:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/clear":
            conversation.clear()
            console.print("[dim]new conversation[/dim]")
        case "/system":
            conversation.set_system(rest.strip())
            console.print(
                "[dim]new conversation with this system message[/dim]"
                if rest.strip()
                else "[dim]new conversation without a system message[/dim]"
            )
        case "/schema":
            _set_schema(conversation, rest.strip(), console)
        case "/help":
            console.print(HELP)
        case _:
            console.print(f"[yellow]no such command: {escape(name)}[/yellow]; /help lists them")
    return True


def _set_schema(conversation: Conversation, given: str, console: Console) -> None:
    """Let replies match a schema from now on; empty = any text. One that cannot be used changes nothing."""
    from headrace.cli.schema import read_schema

    try:
        conversation.json_schema = read_schema(given) if given else None
    except ConfigError as error:
        console.print(f"[red]{escape(error.message)}[/red]")
        return
    console.print("[dim]replies match this schema[/dim]" if given else "[dim]replies are any text[/dim]")


def _answer(source: ChatSource, conversation: Conversation, line: str, console: Console, interactive: bool) -> None:
    """Ask, print the reply as it comes, and remember both. A failed turn is forgotten; a stopped one keeps what came.

    Raises HeadraceError when not interactive.
    """
    conversation.messages.append({"role": "user", "content": line})
    parts: list[str] = []
    num_tokens, stopped = 0, False
    start_s = first_s = time.perf_counter()
    pieces = source.reply(conversation.messages, conversation.json_schema)
    try:
        for piece in pieces:
            if not parts:
                first_s = time.perf_counter()
            num_tokens = piece.num_tokens
            parts.append(piece.text)
            console.out(piece.text, end="", highlight=False)
    except KeyboardInterrupt:
        stopped = True
        # Closing the iterator is what tells the engine or the server to stop.
        _close(pieces)
    except HeadraceError as error:
        if not interactive:
            if parts:
                console.print()
            raise
        conversation.messages.pop()
        console.print(f"[red]{escape(error.message)}[/red]")
        return
    console.print()
    conversation.messages.append({"role": "assistant", "content": "".join(parts)})
    if interactive:
        writing_s = time.perf_counter() - first_s
        rate = f"{(num_tokens - 1) / writing_s:.1f} tok/s, " if num_tokens > 1 and writing_s > 0 else ""
        note = "stopped: " if stopped else ""
        tokens = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
        console.print(f"[dim]{note}{tokens}, {rate}first after {first_s - start_s:.2f} s[/dim]\n")


def _close(pieces: Iterator[Piece]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        close()


def _chunks(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON chunks of an event stream. Raises RequestError for an error frame and when the stream breaks off."""
    parser = EventParser()
    try:
        while piece := response.read1(_READ_BYTES):
            for event in parser.feed(piece):
                if event == DONE:
                    return
                chunk = json.loads(event)
                if "error" in chunk:
                    raise RequestError(_error_message(500, event))
                yield chunk
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(f"the reply was cut off: {error}") from error
    raise RequestError("the reply was cut off: the server closed the stream early")


def _error_message(status: int, body: bytes) -> str:
    """The message of an OpenAI-shaped error, or the status."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with HTTP status {status}"
