"""Rooms of a call (`bootstrap_host`, `bootstrap_port`, `bootstrap_room`): which prefill server computes its prompts, with --disaggregation-mode.

The names and their meaning are SGLang's, so that its routers work in front: both servers get the same body. `kv_transfer_params` are vLLM's, whose
proxies ask one server after the other: the prefill server chooses a room (`chosen_room`), its reply names it (`handed_on`), and the request to the
decode server has these fields of the reply. Pure functions, but for the choice.
"""

import hashlib
import itertools
import secrets
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.config.web import PrefillHosts, address_of
from headrace.errors import RequestError
from headrace.messages.bodies import converted, is_empty
from headrace.messages.requests import CallInput, GenerateReqInput, Room
from headrace.sampling.params import SamplingParams

T = TypeVar("T")

DisaggregationMode = Literal["null", "prefill", "decode"]

HERE = "2.2.2.2"
"""The `bootstrap_host` of a request that one server does alone, as SGLang has it for probes."""

_MOST_ROOM = 2**63 - 1
_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")
_PARAMS = "kv_transfer_params"
_ALONE = "this server computes prompts and outputs (no --disaggregation-mode)"


class _Transfer(msgspec.Struct, frozen=True):
    """What `kv_transfer_params` ask for."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class _Remote(msgspec.Struct, frozen=True):
    """Where `kv_transfer_params` say that the KV is. remote_request_id: the room, as text, because proxies may read numbers as floats."""

    remote_host: str
    remote_port: int
    remote_request_id: str
    remote_dp_rank: int | None = None


R = TypeVar("R", bound=msgspec.Struct)


def chosen_room(request: R, args: ServerArgs, server: Sequence[object] | None = None) -> R:
    """A request with do_remote_decode, in whose `kv_transfer_params` is where its prompts will be computed. Others are returned as they are.

    server: the address and the port at which it came in, which stand for a `--host` that means all addresses; None = this machine.
    """
    params: dict[str, object] | None = getattr(request, _PARAMS)
    if args.disaggregation_mode != "prefill" or not params or params.get("do_remote_decode") is not True:
        return request
    host: object = args.host
    if host in ("", "0.0.0.0", "::"):
        host = server[0] if server is not None and server[1] is not None else "127.0.0.1"
    where = {"remote_host": host, "remote_port": args.disaggregation_bootstrap_port}
    return msgspec.structs.replace(
        request, kv_transfer_params=params | where | {"remote_request_id": str(secrets.randbits(62))}
    )


def handed_on(call: GenerateReqInput) -> dict[str, object]:
    """What a reply has beside its output: `kv_transfer_params` for the decode server, if the call is one with a `chosen_room`."""
    params = call.kv_transfer_params
    if not params or not params.get("do_remote_decode"):
        return {}
    where = {name: params.get(name) for name in ("remote_host", "remote_port", "remote_request_id")}
    handed = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": f"{where['remote_host']}:{where['remote_port']}",
        "remote_block_ids": [],
        **where,
        "remote_dp_rank": call.replica,
        "remote_sampling": _sampling_key(call),
    }
    return {_PARAMS: handed}


def with_rooms(obj: CallInput, mode: DisaggregationMode) -> CallInput:
    """The call with the rooms that its `kv_transfer_params` mean. Raises RequestError for a call without rooms that needs some, and for one with
    rooms that can have none."""
    if isinstance(obj, GenerateReqInput) and obj.kv_transfer_params is not None:
        obj = _translated(obj, obj.kv_transfer_params, mode)
    _check_rooms(obj, mode)
    return obj


def _translated(obj: GenerateReqInput, params: dict[str, object], mode: DisaggregationMode) -> GenerateReqInput:
    asked = _params_as(_Transfer, params)
    if (given := _given_field(obj)) is not None:
        raise RequestError(f"{_PARAMS} and {given} say the same in two ways: give one of them", _PARAMS)
    match asked.do_remote_decode, asked.do_remote_prefill:
        case True, True:
            raise RequestError(f"{_PARAMS}: do_remote_decode and do_remote_prefill exclude each other", _PARAMS)
        case True, _:
            name, side = "do_remote_decode", "prefill"
        case _, True:
            name, side = "do_remote_prefill", "decode"
        case _ if params.keys() & set(_Transfer.__struct_fields__) or all(map(is_empty, params.values())):
            return msgspec.structs.replace(obj, bootstrap_host=HERE)
        case _:
            raise RequestError(f"{_PARAMS} has neither do_remote_decode nor do_remote_prefill", _PARAMS)
    if mode != side:
        raise RequestError(f"{_PARAMS}.{name}: {_ALONE if mode == 'null' else f'this is a {mode} server'}", _PARAMS)
    if mode == "prefill" and obj.stream:
        raise RequestError(f"stream: the reply to {_PARAMS}.{name} says where the KV is, in one piece", "stream")
    remote = _params_as(_Remote, params)
    if not remote.remote_request_id.isdecimal() or len(remote.remote_request_id) > 19:
        raise RequestError(f"{_PARAMS}.remote_request_id: this is not of a prefill server of Headrace's", _PARAMS)
    if mode == "prefill":
        obj = msgspec.structs.replace(obj, sampling_params=_for_one_token(obj.sampling_params))
    return msgspec.structs.replace(
        obj,
        bootstrap_host=remote.remote_host,
        bootstrap_port=remote.remote_port,
        bootstrap_room=int(remote.remote_request_id),
        disagg_prefill_dp_rank=remote.remote_dp_rank,
    )


def _params_as(kind: type[R], params: dict[str, object]) -> R:
    try:
        return converted(params, kind)
    except RequestError as error:
        raise RequestError(f"{_PARAMS}: {error.message}", _PARAMS) from None


def _for_one_token(given: SamplingParams | list[SamplingParams] | None) -> SamplingParams | list[SamplingParams]:
    """The same as far as a first token depends on it. In the request to the prefill server proxies lower the limit, and may leave out the least
    number of tokens."""

    def lowered(one: SamplingParams) -> SamplingParams:
        least, as_text = min(one.min_new_tokens, 1), one.with_json_as_text()
        return msgspec.structs.replace(as_text, max_new_tokens=1, min_new_tokens=least, stream_interval=None)

    return [lowered(one) for one in given] if isinstance(given, list) else lowered(given or SamplingParams())


def _sampling_key(call: GenerateReqInput) -> str:
    """Names all that a first token and what is sent with it depend on beside the prompt."""
    beside = (
        call.return_logprob,
        call.logprob_start_len,
        call.top_logprobs_num,
        call.token_ids_logprob,
        call.return_normalized_logprob,
        call.normalized_logprob_start_len,
        call.return_hidden_states,
        call.custom_logit_processor,
    )
    return hashlib.blake2b(
        msgspec.msgpack.encode((_for_one_token(call.sampling_params), beside)), digest_size=16
    ).hexdigest()


def _check_rooms(obj: CallInput, mode: DisaggregationMode) -> None:
    if not isinstance(obj, GenerateReqInput) or obj.bootstrap_host == HERE:
        return
    if mode == "null":
        if (given := _given_field(obj)) is not None:
            raise RequestError(f"{given}: {_ALONE}", given)
        return
    rooms = obj.bootstrap_room if isinstance(obj.bootstrap_room, list) else [obj.bootstrap_room]
    if not rooms or any(room is None for room in rooms):
        raise RequestError(
            f"bootstrap_room is missing: this is a {mode} server, and a router names the room of each request",
            "bootstrap_room",
        )


def rooms_of(
    obj: GenerateReqInput, num_samples: Sequence[int], mode: DisaggregationMode, port: int, allowed: PrefillHosts
) -> list[Room | None]:
    """The room of the first sample of each prompt; the others have the next numbers. num_samples: of each. port: where none is given.
    allowed: addresses are looked at here, those of names when they are connected to.

    Raises RequestError.
    """
    if mode == "null" or obj.bootstrap_host == HERE or not _is_given(obj.bootstrap_room):
        return [None] * len(num_samples)
    hosts = _each("bootstrap_host", obj.bootstrap_host, num_samples)
    ports = _each("bootstrap_port", obj.bootstrap_port, num_samples)
    if isinstance(obj.bootstrap_room, int):
        firsts = itertools.accumulate(num_samples[:-1], initial=obj.bootstrap_room)
        rooms: list[int | None] = list(firsts)
    else:
        rooms = _each("bootstrap_room", obj.bootstrap_room, num_samples)
    replica, params = obj.disagg_prefill_dp_rank, obj.kv_transfer_params
    has_token = params is None or mode != "decode" or params.get("remote_sampling") == _sampling_key(obj)
    made = [
        _room(mode, allowed, host, port if own is None else own, room, -1 if replica is None else replica)
        for host, own, room in zip(hosts, ports, rooms, strict=True)
    ]
    return [msgspec.structs.replace(room, is_computed=params is not None, has_token=has_token) for room in made]


def has_prompt_elsewhere(obj: GenerateReqInput, mode: DisaggregationMode) -> bool:
    """Whether the prefill server's answer has `input_token_logprobs`, to which a router joins the list of the decode server's."""
    return mode == "decode" and obj.bootstrap_room is not None and obj.bootstrap_host != HERE


def replica_of(obj: CallInput, room: Room | None, args: ServerArgs) -> int | None:
    """The only replica that may take a prompt; None = any. A decode server looks for a room in the replica that has its number."""
    if room is None or obj.replica is not None or args.disaggregation_mode != "prefill":
        return obj.replica
    return room.first % args.num_replicas


def of_sample(room: Room | None, number: int) -> Room | None:
    """The room of a sample of the prompt that has `room`."""
    if room is None or not number:
        return room
    return msgspec.structs.replace(room, number=room.number + number)


def _room(mode: str, allowed: PrefillHosts, host: str | None, port: int, room: int | None, replica: int) -> Room:
    if room is None or not 0 <= room <= _MOST_ROOM:
        raise RequestError(f"bootstrap_room must be between 0 and {_MOST_ROOM}, got {room}", "bootstrap_room")
    if mode == "decode" and not host:
        raise RequestError("bootstrap_host is missing: where the prompt is computed", "bootstrap_host")
    is_known = not allowed.networks or address_of(host or "") is not None
    if mode == "decode" and host and is_known and not allowed.allows(host, host):
        raise RequestError(f"bootstrap_host: {host} is not among --disaggregation-prefill-hosts", "bootstrap_host")
    if not 0 < port < 65536:
        raise RequestError(f"bootstrap_port must be between 1 and 65535, got {port}", "bootstrap_port")
    return Room(host or "", port, room, room, replica)


def _each(name: str, value: T | list[T | None] | None, num_samples: Sequence[int]) -> list[T | None]:
    """One of each prompt; of a list that has one of each sample, as routers send with `n`, that of the prompt's first."""
    count = len(num_samples)
    if not isinstance(value, list):
        return [value] * count
    if len(value) == sum(num_samples):
        return [value[first] for first in itertools.accumulate(num_samples[:-1], initial=0)]
    if len(value) != count:
        raise RequestError(f"{name}: {len(value)} values for {count} prompts", name)
    return value


def _given_field(obj: GenerateReqInput) -> str | None:
    return next((name for name in _FIELDS if _is_given(getattr(obj, name))), None)


def _is_given(value: object) -> bool:
    return any(map(_is_given, value)) if isinstance(value, list) else value is not None and value != ""
