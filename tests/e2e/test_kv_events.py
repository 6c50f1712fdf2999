"""An engine publishes which blocks its prefix cache has."""

import json
import socket

import msgspec
import pytest
from engines import running_engine

from kv_event_mirror import Mirror

zmq = pytest.importorskip("zmq")


def replay(endpoint: str) -> Mirror:
    """What is cached, as a router is told that asks for everything."""
    mirror = Mirror()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([b"", bytes(8)])
        while dealer.poll(60_000):
            _, _, payload = dealer.recv_multipart()
            if not payload:
                return mirror
            mirror.apply(msgspec.msgpack.decode(payload)[1])
    raise AssertionError("no reply")


@pytest.mark.parametrize("single_process", [True, False])
def test_a_router_that_asks_for_everything_knows_what_is_cached(tiny_model, single_process):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        endpoint, replays = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
    events = json.dumps({"endpoint": endpoint, "replay_endpoint": replays, "buffer_steps": 3})
    prompts = [[7] * 40 + [number] * 30 for number in range(5)]
    with running_engine(tiny_model, single_process=single_process, kv_events_config=events) as engine:
        engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 4, "temperature": 0}, cache_salt="s")
        want = {tuple(prompt[:end]) for prompt in prompts for end in range(16, 65, 16)}
        pool = engine.get_server_info()["internal_states"][0]["pool"]
        while 16 * len((mirror := replay(replays)).known()) != pool["evictable_tokens"]:
            pass  # the events of the last step are on their way
        assert want <= {tokens for _, tokens in mirror.known()}
        assert {parts.cache_salt for parts, _ in mirror.known()} == {"s"}

        engine.flush_cache()
        while replay(replays).blocks:
            pass
