"""What an HTTP worker runs (--tokenizer-worker-num): the HTTP application over the front end of the main process."""

import asyncio
import socket
from typing import TYPE_CHECKING

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.messages.channel import Channels
from headrace.messages.front import FrontNews, HttpWorkerStart
from headrace.processes.handshake import OnReady
from headrace.processes.model_files import (
    open_chat_template,
    open_tokenizer,
    read_model_config,
    read_pooling_config,
    served_model,
)

if TYPE_CHECKING:
    from headrace.server.context import ServedModel


def run_http_worker(args: ServerArgs, channels: Channels, on_ready: OnReady, start: HttpWorkerStart) -> None:
    """Serve HTTP until a ShutdownReq. Raises ConfigError or ModelError before `on_ready`."""
    import uvloop

    tokenizer = open_tokenizer(args)
    config = read_model_config(args)
    pooling = read_pooling_config(args, config)
    model = served_model(args, start.ready, tokenizer, open_chat_template(args, tokenizer), config, pooling)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args, channels, on_ready, start, model))


async def _serve(
    args: ServerArgs, channels: Channels, on_ready: OnReady, start: HttpWorkerStart, model: "ServedModel"
) -> None:
    from headrace.server.app import create_app
    from headrace.server.context import ServerStatus
    from headrace.server.listener import Server
    from headrace.server.remote_frontend import RemoteCalls, remote_frontend

    status = ServerStatus()
    calls = RemoteCalls(start.number, channels.sender("to_front"), channels.receiver("to_worker", start.slot))
    app = create_app(remote_frontend(calls), args, model, status)
    server = Server(app, args, listening=socket.socket(fileno=start.listening_fd))

    def on_news(before: FrontNews, news: FrontNews) -> None:
        status.draining = not news.accepting
        if before.log_level != news.log_level:
            log.set_level(news.log_level)
        if before.keys_generation != news.keys_generation and app.state.keys is not None:
            app.state.keys.reload()

    calls.on_news = on_news
    calls.on_shutdown = server.shutdown
    calls.start()
    await calls.wait_for_news()
    await server.serve(lambda: on_ready(None))
