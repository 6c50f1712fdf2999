"""Methods that are the same on `Engine` and `Runtime`, each with what it does in this process and over HTTP.

Owns their names, defaults and results. Every method raises ExecutionError if the engine is gone, and RequestError for invalid arguments. Runs in
the caller's thread.
"""

import json
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack

import msgspec

from headrace.api.arguments import rerank_fields, score_fields, scores_of, without_none
from headrace.api.native_client import NativeClient
from headrace.errors import RequestError
from headrace.frontend.server_info import describe_load
from headrace.frontend.tenants import Caller
from headrace.frontend.weight_checks import (
    GROUP_NAME,
    GROUP_TIMEOUT_S,
    NOTHING_TO_PROCESS,
    TRUNCATE_SIZE,
    check_result,
    checked_group,
    checked_load_format,
    checked_tags,
    checked_tensors,
    checking,
    nested_values,
    note_on_tags,
)
from headrace.messages.bodies import field_error
from headrace.messages.control import CacheTree, InternalState
from headrace.messages.operations import (
    CACHE_TREE,
    CONFIGURE_LOGGING,
    DUMP_EXPERTS,
    DUMP_REQUESTS,
    FREEZE_GC,
    RANKS,
    SET_INTERNAL_STATE,
    SLOW_DOWN,
    START_EXPERTS,
    START_PROFILE,
    STOP_EXPERTS,
    STOP_PROFILE,
    CacheTreeQuery,
    ConfigureLoggingBody,
    LimitChanges,
    LogLevel,
    Nothing,
    Operation,
    SetInternalStateBody,
    SlowDownBody,
    StartProfileBody,
    operation_named,
)
from headrace.messages.packing import safetensors_parts
from headrace.messages.requests import GenerateReqInput
from headrace.messages.weights import (
    CancelUpdate,
    ContinueGeneration,
    DestroyGroup,
    GetWeight,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    WeightOperation,
    WeightOpReply,
)

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager

T = TypeVar("T")

Result = tuple[bool, str]
"""(success, message). After a failure nothing has changed."""

Route = Literal["/v1/rerank", "/v1/score"]

SAVED_FILES, SAVED_BYTES = "model-rank-{rank}-part-{part}.safetensors", 1 << 30

_ADMIN = Caller(is_admin=True)


class ScoreOptions(TypedDict, total=False):
    """The other fields of these routes, see docs/http-api.md."""

    instruction: str | None
    raw_scores: bool
    truncate: bool
    truncate_prompt_tokens: int | None
    rid: str | None
    priority: int | None
    cache_salt: str | None
    lora_path: str | None
    routed_dp_rank: int | None


class Methods(ABC):
    """A context manager: `shutdown` is called at its end."""

    @abstractmethod
    def _call(self, here: "Callable[[TokenizerManager], T]", over_http: Callable[[NativeClient], T]) -> T:
        """The result of `here` in the engine's event loop, if the engine is in this process, else of `over_http`."""

    @abstractmethod
    def _wait(
        self, here: "Callable[[TokenizerManager], Coroutine[Any, Any, T]]", over_http: Callable[[NativeClient], T]
    ) -> T:
        """Like `_call`, if the work here is awaited."""

    @abstractmethod
    def _scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]: ...

    @abstractmethod
    def _update_from_tensors(
        self,
        parts: Iterable[bytes | memoryview],
        abort_all_requests: bool,
        weight_version: str | None,
        bucketed: bool = False,
    ) -> WeightOpReply:
        """Update from the bytes of a safetensors file. bucketed: it contains a flattened bucket."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engine. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- scores

    def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, Any]],
        top_n: int | None = None,
        return_documents: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> list[dict[str, Any]]:
        """The documents by their relevance for the query, the best first: `{"index": ..., "relevance_score": ...}`, at most `top_n`.

        By a cross-encoder, or by a model that generates and is asked for yes or no. Raises CapacityError, too.
        """
        fields = rerank_fields(query, documents, top_n, return_documents, {**options})
        found: list[dict[str, Any]] = self._scored("/v1/rerank", fields)["results"]
        return found

    def score(
        self,
        query: str | list[int],
        items: str | Sequence[str] | Sequence[list[int]],
        label_token_ids: list[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Any:
        """For each item a list with the probability of each label as the next token after query and item, by a model that generates.

        Without labels: for each item the score of the pair, by a cross-encoder, the cosine of two embeddings, or the answer to yes or no.
        apply_softmax: probabilities among the labels only. item_first: the item comes before the query. Raises CapacityError, too.
        """
        fields = score_fields(query, items, label_token_ids, apply_softmax, item_first, {**options})
        return scores_of(self._scored("/v1/score", fields))

    # -- requests and sessions

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the samples of `rid`, or all. Unknown rids are ignored."""

        def over_http(http: NativeClient) -> None:
            if rid or abort_all:
                http.ask("/abort_request", rid=rid or None, abort_all=abort_all)

        self._call(lambda manager: manager.abort_request(rid, abort_all), over_http)

    def open_session(
        self, capacity_of_str_len: int = 0, session_id: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Open a session and return its id, for the `session_params` of `generate`. Raises RequestError, CapacityError."""
        given = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id, "timeout": timeout_s}
        return self._wait(
            lambda manager: manager.open_session(capacity_of_str_len, session_id, timeout_s),
            lambda http: str(http.ask("/open_session", **given)),
        )

    def close_session(self, session_id: str) -> None:
        """Close a session. Its running requests continue. Raises NotFoundError."""
        self._wait(
            lambda manager: manager.close_session(session_id),
            lambda http: http.tell("/close_session", session_id=session_id),
        )

    def pin_prompt(
        self, text: str | None = None, input_ids: list[int] | None = None, ttl: float = 300.0, **fields: str
    ) -> dict[str, Any]:
        """Compute a prompt and keep it cached for `ttl` seconds; see `/v1/cache/pin`, also for `fields`. Raises RequestError, CapacityError."""
        call = _as(GenerateReqInput, without_none({"text": text, "input_ids": input_ids}) | fields)
        given = without_none({"prompt": text, "input_ids": input_ids}) | fields
        return self._wait(
            lambda manager: manager.pins.pin(call, ttl),
            lambda http: dict(http.ask("/v1/cache/pin", ttl=ttl, **given)),
        )

    def unpin_prompt(self, pin_id: str) -> None:
        """Let go of a pinned prompt. Raises NotFoundError."""
        self._wait(lambda manager: manager.pins.unpin(pin_id), lambda http: http.tell("/v1/cache/unpin", id=pin_id))

    def cached(self) -> dict[str, Any]:
        """What is cached, by tier, and the pins; of a server, those of its key."""
        return self._wait(lambda manager: manager.pins.cache(_ADMIN), lambda http: dict(http.get("/v1/cache")))

    def explain_request(self, rid: str) -> list[dict[str, Any]]:
        """Timelines of the samples of a recent request. Raises NotFoundError."""
        return self._wait(
            lambda manager: manager.records.timelines(rid, _ADMIN),
            lambda http: list(http.get(f"/v1/requests/{urllib.parse.quote(rid, safe='')}")["data"]),
        )

    def latest_requests(self, limit: int = 100) -> list[dict[str, Any]]:
        """Live samples and those that ended last, at most `limit`, without their events and their text; of a server, those of its key."""
        return self._wait(
            lambda manager: manager.records.latest(limit, _ADMIN),
            lambda http: list(http.get(f"/v1/requests?limit={limit}")["data"]),
        )

    # -- adapters

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Load an adapter in peft's format, from a path on the engine's machine; `generate(..., lora_path=lora_name)` uses it.

        Raises RequestError, CapacityError.
        """
        self._wait(
            lambda manager: manager.adapters.load(lora_name, lora_path, pinned),
            lambda http: http.tell("/load_lora_adapter", lora_name=lora_name, lora_path=lora_path, pinned=pinned),
        )

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter, once the requests that use it have ended. Raises NotFoundError."""
        self._wait(
            lambda manager: manager.adapters.unload(lora_name),
            lambda http: http.tell("/unload_lora_adapter", lora_name=lora_name),
        )

    def lora_adapters(self) -> list[str]:
        """Names of all adapters."""
        return self._call(
            lambda manager: manager.adapters.names,
            lambda http: [card["id"] for card in http.get("/v1/models")["data"] if card["parent"] is not None],
        )

    # -- the state of the engine

    def internal_state(self) -> InternalState:
        """Counters and pool accounting of all schedulers together."""
        return self._wait(
            lambda manager: manager.control.internal_state(),
            lambda http: msgspec.convert(http.get("/internal_state"), InternalState),
        )

    def get_loads(self) -> list[dict[str, Any]]:
        """Load of each replica: requests, tokens, throughput."""

        async def here(manager: "TokenizerManager") -> list[dict[str, Any]]:
            return [describe_load(state) for state in await manager.control.internal_states()]

        return self._wait(here, lambda http: list(http.get("/v1/loads")["loads"]))

    def metrics(self) -> str:
        """The text of /metrics."""

        async def here(manager: "TokenizerManager") -> str:
            return (await manager.metrics_text()).decode()

        return self._wait(here, lambda http: http.text("/metrics"))

    # -- control operations

    def _ask(self, operation: Operation[Any, Any], request: msgspec.Struct) -> Any:
        """What the operation's route replies with."""

        async def here(manager: "TokenizerManager") -> Any:
            return msgspec.to_builtins(operation.combine(await operation.ask(manager.control, request)))

        def over_http(http: NativeClient) -> Any:
            assert operation.route is not None, operation.name
            fields = msgspec.to_builtins(request)
            if operation.route.method == "GET":
                return http.get(f"{operation.route.path}?{urllib.parse.urlencode(without_none(fields))}")
            return http.ask(operation.route.path, **fields)

        return self._wait(here, over_http)

    def collective_rpc(self, method: str, params: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
        """What the route of an operation replies with, by its name in `messages.operations`: SGLang's way to ask all schedulers. Nothing else can be
        called, but for `save_sharded_model`. arguments, params: the fields of its request, as names or as a dict."""
        fields = {**(params or {}), **arguments}
        if method == "save_sharded_model":
            return self.save_sharded_model(**fields)
        if method == "save_remote_model":
            raise RequestError(
                "save_remote_model: weights are not sent; save_sharded_model writes them to a folder", "method"
            )
        return self._ask(*operation_named(method, fields, "save_sharded_model"))

    def cache_trees(self, max_depth: int = 8, max_nodes: int = 200) -> list[CacheTree]:
        """The outline of each replica's prefix cache: how its tree branches, without any text."""
        found = self._ask(CACHE_TREE, CacheTreeQuery(max_depth, max_nodes))
        return msgspec.convert(found["data"], list[CacheTree])

    def get_ranks(self) -> list[dict[str, Any]]:
        """The process of each rank of each replica, and its bytes: resident, of weights, of the KV cache."""
        return list(self._ask(RANKS, Nothing())["data"])

    def slow_down(self, forward_sleep_time: float | None = None) -> str:
        """Let every scheduler sleep so many seconds after each step, to see how load behaves on a slower engine; None = full speed.

        Returns a line for the operator.
        """
        return str(self._ask(SLOW_DOWN, SlowDownBody(forward_sleep_time))["message"])

    def start_profile(
        self, output_name: str = "", num_steps: int = 0, activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU",)
    ) -> str:
        """Record the worker's steps to a file below `profile_dir`. Returns a line for the operator.

        num_steps: stop after this many steps; 0 = at `stop_profile`.
        """
        request = StartProfileBody(output_name or None, num_steps or None, activities)
        return str(self._ask(START_PROFILE, request)["message"])

    def stop_profile(self) -> str:
        """Stop and write the trace. Returns a line with the file's name."""
        return str(self._ask(STOP_PROFILE, Nothing())["message"])

    def start_expert_distribution_record(self) -> None:
        """Start counting the tokens that each layer of a mixture sends to each expert."""
        self._ask(START_EXPERTS, Nothing())

    def stop_expert_distribution_record(self) -> None:
        """Stop counting; the counts can still be dumped."""
        self._ask(STOP_EXPERTS, Nothing())

    def dump_expert_distribution_record(self) -> dict[str, Any]:
        """Return the reply of the route, with the tokens per expert under `layers`, and reset the counts."""
        return dict(self._ask(DUMP_EXPERTS, Nothing()))

    def configure_logging(
        self, level: LogLevel | None = None, log_requests: bool | None = None, log_requests_level: int | None = None
    ) -> dict[str, Any]:
        """Change what is logged, in every process; None = unchanged. Returns the current settings."""
        asked = {"level": level, "log_requests": log_requests, "log_requests_level": log_requests_level}
        now = self._ask(CONFIGURE_LOGGING, _as(ConfigureLoggingBody, asked))
        return {name: now[name] for name in asked}

    def freeze_gc(self) -> None:
        """Exclude all objects that exist now from garbage collection, in every process."""
        self._ask(FREEZE_GC, Nothing())

    def set_internal_state(self, **limits: float) -> dict[str, Any]:
        """Change limits (fields of `LimitChanges`) in every replica. Returns the current limits."""
        request = SetInternalStateBody(_as(LimitChanges, limits))
        return dict(self._ask(SET_INTERNAL_STATE, request)["server_args"])

    def dump_requests(self) -> str:
        """Write a dump of the most recent requests to `dump_requests_dir` and return the file's name."""
        return str(self._ask(DUMP_REQUESTS, Nothing())["file"])

    # -- generation

    def _operate(self, path: str, operation: WeightOperation) -> Result:
        """Carry out one operation. path: of its route, whose body is the operation's fields."""
        reply = self._wait(
            lambda manager: manager.weights.operate(operation),
            lambda http: weight_op_reply(http.operate(path, json.dumps(msgspec.structs.asdict(operation)).encode())),
        )
        return reply.success, reply.message

    def pause_generation(self, mode: PauseMode = "abort") -> Result:
        """Run no steps until `continue_generation`; new requests wait.

        abort: end every request with its output so far. retract: running requests go back to the queue and are computed again later.
        in_place: they keep their KV cache.
        """
        return self._operate("/pause_generation", PauseGeneration(mode))

    def continue_generation(self) -> Result:
        """Continue after a pause."""
        return self._operate("/continue_generation", ContinueGeneration())

    # -- weights

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """Replace all weights by those of the checkpoint at `model_path`, which must be of the same model."""
        operation = UpdateFromDisk(model_path, checked_load_format(load_format), abort_all_requests, weight_version)
        return self._operate("/update_weights_from_disk", operation)

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]],
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """Replace the named weights, all or some, by these tensors (torch or numpy). Names and shapes are Hugging Face's."""
        parts = safetensors_parts(named_tensors)
        reply = self._update_from_tensors(parts, abort_all_requests, weight_version)
        return reply.success, reply.message

    def update_weights_from_bucket(
        self,
        flattened_tensor: Any,
        metadata: str,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """Like `update_weights_from_tensor`, with the result of `headrace.weight_sync.bucket.pack`: all tensors in one, and their places."""
        parts = safetensors_parts([("flattened_tensor", flattened_tensor)], {"metadata": metadata})
        reply = self._update_from_tensors(parts, abort_all_requests, weight_version, bucketed=True)
        return reply.success, reply.message

    def cancel_weight_update(self) -> Result:
        """Cancel every update and join of a group that has not taken effect: those calls fail, and nothing has changed."""
        return self._operate("/cancel_weight_update", CancelUpdate())

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP_NAME,
        backend: str = "gloo",
        *,
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> Result:
        """Join the trainer's process group. The trainer is rank 0 and must join at the same time, or this times out."""
        operation = checked_group(
            master_address, master_port, rank_offset, world_size, group_name, backend, timeout_s=timeout_s
        )
        return self._operate("/init_weights_update_group", operation)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = GROUP_NAME,
        *,
        bucketed: bool = False,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """Replace the named weights by tensors that rank 0 broadcasts in this order; bucketed: as one uint8 tensor of all their bytes."""
        operation = UpdateFromDistributed(
            *checked_tensors(names, dtypes, shapes), group_name, bucketed, abort_all_requests, weight_version
        )
        return self._operate("/update_weights_from_distributed", operation)

    def destroy_weights_update_group(self, group_name: str = GROUP_NAME) -> Result:
        """Leave a group."""
        return self._operate("/destroy_weights_update_group", DestroyGroup(group_name))

    def get_weights_by_name(self, name: str, truncate_size: int = TRUNCATE_SIZE) -> list[Any]:
        """The first rows of a weight (elements of a vector) as lists. Raises RequestError for an unknown name."""

        async def here(manager: "TokenizerManager") -> list[Any]:
            if truncate_size < 0:
                raise RequestError(f"truncate_size must be at least 0, got {truncate_size}", "truncate_size")
            return nested_values(await manager.weights.operate(GetWeight(name, truncate_size)))

        def over_http(http: NativeClient) -> list[Any]:
            body = json.dumps({"name": name, "truncate_size": truncate_size}).encode()
            answer = http.operate("/get_weights_by_name", body)
            if isinstance(answer, dict):
                raise RequestError(answer["message"], "name")
            return list(answer)

        return self._wait(here, over_http)

    def check_weights(
        self,
        action: str = "checksum",
        *,
        allow_quant_error: bool = False,
        skip_tensor_list: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Check what updates have done to the weights. Returns `success`, `message` and for checksums `ranks`, as SGLang's route does.

        checksum: of every weight. snapshot: keep the checksums. compare: fails unless they are those of the snapshot. reset_tensors: random
        values, so that a comparison shows whether an update replaces everything. skip_tensor_list: leave out names that hold one of these.
        allow_quant_error: accepted without effect.
        """

        async def here(manager: "TokenizerManager") -> dict[str, Any]:
            return check_result(await manager.weights.operate(checking(action, skip_tensor_list)))

        names = None if skip_tensor_list is None else list(skip_tensor_list)
        asked = {"action": action, "allow_quant_error": allow_quant_error, "skip_tensor_list": names}
        return self._wait(here, lambda http: dict(http.operate("/weights_checker", json.dumps(asked).encode())))

    def post_process_weights(
        self, *, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> Result:
        """Nothing: an update is complete when it has been installed."""
        asked = {
            "restore_weights_before_load": restore_weights_before_load,
            "post_process_quantization": post_process_quantization,
        }
        reply = self._call(
            lambda manager: {"success": True, "message": NOTHING_TO_PROCESS},
            lambda http: http.operate("/post_process_weights", json.dumps(asked).encode()),
        )
        return reply["success"], reply["message"]

    def save_sharded_state(self, path: str) -> Result:
        """Write the current weights to a new folder called `path` below --save-dir, from which they can be served again."""
        return self._operate("/save_sharded_state", SaveWeights(path))

    def save_sharded_model(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """`save_sharded_state` under SGLang's name. Raises RequestError if it fails, and for files of other names, or smaller ones than these."""
        if pattern not in (None, SAVED_FILES) or (max_size is not None and max_size < SAVED_BYTES):
            raise RequestError(f"weights are saved in files {SAVED_FILES} of about {SAVED_BYTES} bytes", "pattern")
        success, message = self.save_sharded_state(path)
        if not success:
            raise RequestError(message, "path")

    def update_weight_version(self, new_version: str, *, abort_all_requests: bool = False) -> Result:
        """Set the version name of the weights, which replies have as `meta_info.weight_version` from now on."""
        return self._operate("/update_weight_version", SetWeightVersion(new_version, abort_all_requests))

    # -- memory

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> Result:
        """Release the memory of "kv_cache", "weights" or both (None) to the system. Requests wait until all of it is resumed.

        "cuda_graph", as sent to other servers, is accepted without effect.
        """
        return self._on_memory("/release_memory_occupation", ReleaseMemory(checked_tags(tags)), tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> Result:
        """Take released memory back."""
        return self._on_memory("/resume_memory_occupation", ResumeMemory(checked_tags(tags)), tags)

    def _on_memory(self, path: str, operation: ReleaseMemory | ResumeMemory, tags: Sequence[str] | None) -> Result:
        note = note_on_tags(tags)
        if not operation.tags:
            return True, note
        success, message = self._operate(path, operation)
        return success, f"{message}; {note}" if note else message


def weight_op_reply(answer: Any) -> WeightOpReply:
    return WeightOpReply(0, answer["success"], answer["message"], answer["weight_version"])


def _as(kind: type[T], fields: dict[str, Any]) -> T:
    """Raises RequestError that names the field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None
