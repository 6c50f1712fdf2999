"""Routes that pause generation, change weights and release memory. Field names are those of SGLang's clients.

Runs in the event loop that serves HTTP. All routes except the version of the weights need the admin key. An operation that has
begun continues when its client disconnects; /cancel_weight_update cancels it.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.frontend.weight_checks import (
    GROUP_NAME,
    GROUP_TIMEOUT_S,
    NOTHING_TO_PROCESS,
    TRUNCATE_SIZE,
    check_result,
    checked_group,
    checked_tags,
    checked_tensors,
    checking,
    nested_values,
    note_on_tags,
)
from headrace.frontend.weight_control import tensor_file
from headrace.messages.weights import (
    CancelUpdate,
    ContinueGeneration,
    DestroyGroup,
    GetWeight,
    InitGroup,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightOperation,
    WeightOpReply,
)
from headrace.server.http import Exchange
from headrace.server.routes import Examples, RouteSpec

B = TypeVar("B")

BODY_BYTES_PER_WEIGHT_BYTE = 16
"""Largest body with tensors, relative to the weights in memory: float32 in base64 for a model in 4 bits."""


_PORT = r"^([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_FilledText = Annotated[str, msgspec.Meta(min_length=1)]


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    """How to pause."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class EmptyBody(msgspec.Struct, forbid_unknown_fields=True):
    """A body without fields."""


class DiskBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which checkpoint. flush_cache: has no effect; the cache is always emptied, since old KV is never used with new weights.

    keep_pause, recapture_cuda_graph: have no effect; a pause always outlasts an update, and graphs are always captured again.
    """

    model_path: str
    load_format: Literal["auto", "safetensors", "gguf"] | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    recapture_cuda_graph: bool = False


class TensorQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a body that is a file."""

    load_format: Literal["safetensors", "flattened_bucket"] | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class TensorBody(TensorQuery, kw_only=True, forbid_unknown_fields=True):
    """A safetensors file in base64, in a list with one item. load_format flattened_bucket: the file is a bucket. flush_cache: as in `DiskBody`."""

    serialized_named_tensors: Annotated[list[bytes], msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": 1})]


class GroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """The process group to join. timeout_s: for joining and for every broadcast."""

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | Annotated[str, msgspec.Meta(pattern=_PORT)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)]
    group_name: _FilledText = GROUP_NAME
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=24 * 3600)] = GROUP_TIMEOUT_S


class DistributedBody(msgspec.Struct, forbid_unknown_fields=True):
    """The tensors that rank 0 will broadcast. bucketed, or load_format flattened_bucket: one uint8 tensor. flush_cache: as in `DiskBody`."""

    names: Annotated[list[str], msgspec.Meta(min_length=1)]
    dtypes: Annotated[list[str], msgspec.Meta(min_length=1)]
    shapes: Annotated[list[list[_Size]], msgspec.Meta(min_length=1)]
    group_name: str = GROUP_NAME
    bucketed: bool = False
    load_format: Literal["flattened_bucket"] | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class DestroyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which group to leave."""

    group_name: str = GROUP_NAME


class GetWeightBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which weight, and how many of its rows."""

    name: str
    truncate_size: _Size = TRUNCATE_SIZE


class VersionBody(msgspec.Struct, forbid_unknown_fields=True):
    """The new version name of the weights."""

    new_version: str
    abort_all_requests: bool = False


class SaveBody(msgspec.Struct, forbid_unknown_fields=True):
    """path: name of a new folder below --save-dir, not a path."""

    path: str


class CheckBody(msgspec.Struct, forbid_unknown_fields=True):
    """What to do with the checksums of all weights; reset_tensors: give them random values.

    skip_tensor_list: leave out weights whose names hold one of these. allow_quant_error: accepted without effect, because the same checkpoint
    gives the same bits.
    """

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None


class PostProcessBody(msgspec.Struct, forbid_unknown_fields=True):
    """Accepted without effect: an update is complete when it has been installed."""

    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


class MemoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """What to release or resume; null or empty: everything. cuda_graph: accepted without effect."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None


class OperationReply(msgspec.Struct, frozen=True):
    """Result of an operation. With status 400 it failed, and nothing has changed."""

    success: bool
    message: str
    num_paused_requests: int
    weight_version: str


def _from_disk(body: DiskBody) -> UpdateFromDisk:
    return UpdateFromDisk(body.model_path, body.load_format or "auto", body.abort_all_requests, body.weight_version)


def _init_group(body: GroupBody) -> InitGroup:
    return checked_group(
        body.master_address, int(body.master_port), body.rank_offset, body.world_size, body.group_name, body.backend, timeout_s=body.timeout_s
    )  # fmt: skip


def _from_distributed(body: DistributedBody) -> UpdateFromDistributed:
    names, dtypes, shapes = checked_tensors(body.names, body.dtypes, body.shapes)
    bucketed = body.bucketed or body.load_format is not None
    return UpdateFromDistributed(
        names, dtypes, shapes, body.group_name, bucketed, body.abort_all_requests, body.weight_version
    )


def _on_memory(operation: type[ReleaseMemory] | type[ResumeMemory], body: MemoryBody) -> WeightOperation | None:
    tags = checked_tags(body.tags)
    return operation(tags) if tags else None


def _outcome(reply: WeightOpReply, note: str = "") -> OperationReply:
    message = "; ".join(filter(None, (reply.message, note)))
    return OperationReply(reply.success, message, reply.num_paused_requests, reply.weight_version)


def weight_routes() -> list[RouteSpec]:
    weight, no_tensors = "model.embed_tokens.weight", "AgAAAAAAAAB7fQ=="
    nothing: Examples = {"Nothing to say": {}}
    kv_cache = {"The KV cache": {"tags": ["kv_cache"]}}
    two_ranks = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    one_tensor = {"names": [weight], "dtypes": ["bfloat16"], "shapes": [[49152, 576]]}
    checks = {"Checksums": {"action": "checksum"}, "Compare": {"action": "compare"}}

    def asks(
        path: str,
        operation_of: Callable[[B], WeightOperation | None],
        summary: str,
        body: type[B],
        examples: Examples,
        answer_of: Callable[[WeightOpReply, B], object] = lambda reply, body: _outcome(reply),
        methods: tuple[str, ...] = ("POST",),
    ) -> RouteSpec:
        """operation_of: returns None if there is nothing to do."""

        async def handle(exchange: Exchange) -> None:
            asked, weights = await exchange.read_json(body), exchange.context.frontend.weights
            operation = operation_of(asked)
            nothing = WeightOpReply(0, True, "", weights.version)
            reply = nothing if operation is None else await weights.operate(operation)
            await exchange.reply_json(answer_of(reply, asked), 200 if reply.success else 400)

        return RouteSpec(path, methods, "admin", handle, summary, body, failure=OperationReply, examples=examples)

    def noted(reply: WeightOpReply, body: MemoryBody) -> OperationReply:
        return _outcome(reply, note_on_tags(body.tags))

    # fmt: off
    return [
        asks("/pause_generation", lambda body: PauseGeneration(body.mode), "Plan no more steps", PauseBody,
             {"Requests stay where they are": {"mode": "in_place"}}),
        asks("/continue_generation", lambda body: ContinueGeneration(), "Plan steps again", EmptyBody, nothing),
        asks("/update_weights_from_disk", _from_disk, "Weights from a checkpoint", DiskBody, {"A folder": {"model_path": "/path/to/checkpoint"}}),
        RouteSpec("/update_weights_from_tensor", ("POST",), "admin", from_tensor, "Weights from the body", TensorBody,
                  failure=OperationReply, octets=TensorQuery, examples={"No tensors": {"serialized_named_tensors": [no_tensors]}}),
        asks("/cancel_weight_update", lambda body: CancelUpdate(), "Give up updates under way", EmptyBody, nothing),
        asks("/init_weights_update_group", _init_group, "Join a trainer's group", GroupBody, {"Two ranks": two_ranks}),
        asks("/update_weights_from_distributed", _from_distributed, "From the group", DistributedBody, {"One tensor": one_tensor}),
        asks("/destroy_weights_update_group", lambda body: DestroyGroup(body.group_name), "Leave a group", DestroyBody, {"The usual group": {}}),
        asks("/get_weights_by_name", lambda body: GetWeight(body.name, body.truncate_size), "Rows of a weight", GetWeightBody,
             {"The first two rows": {"name": weight, "truncate_size": 2}},
             lambda reply, body: nested_values(reply) if reply.success else _outcome(reply), ("GET", "POST")),
        asks("/weights_checker", lambda body: checking(body.action, body.skip_tensor_list), "Checksums of the weights", CheckBody, checks,
             lambda reply, body: check_result(reply)),
        asks("/post_process_weights", lambda body: None, "Nothing: updates are complete", PostProcessBody,
             {"After an update": {"post_process_quantization": True}}, lambda reply, body: _outcome(reply, NOTHING_TO_PROCESS)),
        asks("/update_weight_version", lambda body: SetWeightVersion(body.new_version, body.abort_all_requests), "Name the weights", VersionBody,
             {"A name": {"new_version": "2"}}),
        asks("/save_sharded_state", lambda body: SaveWeights(body.path), "Weights to a folder of the operator", SaveBody,
             {"A new folder": {"path": "weights-1"}}),
        RouteSpec("/weight_version", ("GET",), "user", version, "What the weights are called"),
        RouteSpec("/get_weight_version", ("GET",), "user", version, "Alias of /weight_version"),
        asks("/release_memory_occupation", partial(_on_memory, ReleaseMemory), "Give memory back", MemoryBody, kv_cache, noted),
        asks("/resume_memory_occupation", partial(_on_memory, ResumeMemory), "Take memory again", MemoryBody, kv_cache, noted),
    ]
    # fmt: on


async def from_tensor(exchange: Exchange) -> None:
    """The body is a safetensors file (application/octet-stream, options in the query), or JSON with such files in base64."""
    limit = BODY_BYTES_PER_WEIGHT_BYTE * exchange.context.model.ready.weight_bytes
    exchange.max_body_bytes = max(exchange.max_body_bytes, limit)
    options: TensorQuery
    if exchange.content_type == b"application/octet-stream":
        options = exchange.read_query(TensorQuery)
        files = [await exchange.read_body()]
    else:
        options = body = await exchange.read_json(TensorBody)
        files = body.serialized_named_tensors
    if len(files) != 1:
        raise RequestError(
            f"serialized_named_tensors holds {len(files)} files; there is one rank, so send one",
            "serialized_named_tensors",
        )
    with tensor_file(files) as path:
        files.clear()
        bucketed = options.load_format == "flattened_bucket"
        update = UpdateFromTensors(path, options.abort_all_requests, options.weight_version, bucketed)
        reply = await exchange.context.frontend.weights.operate(update)
    await exchange.reply_json(_outcome(reply), 200 if reply.success else 400)


async def version(exchange: Exchange) -> None:
    """The version name of the weights."""
    await exchange.reply_json({"weight_version": exchange.context.frontend.weights.version})
