"""Control operations that the main process carries out itself (`at="main"` in `messages.operations`): a function of the row's name each.

They go through the parts that own the state, and say what their routes reply. Run in the tokenizer manager's event loop.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.frontend.expert_recording import ExpertRecording
from headrace.frontend.records import Records
from headrace.frontend.runtime_settings import RuntimeSettings
from headrace.messages.operations import ConfigureLoggingBody, Nothing, SetInternalStateBody


def main_operations(
    experts: ExpertRecording, settings: RuntimeSettings, records: Records
) -> Mapping[str, Callable[[Any], Any]]:
    """The work of each operation, by its name. Some of it is awaited."""

    async def start_expert_distribution_record(request: Nothing) -> dict[str, Any]:
        await experts.start()
        return {"success": True, "message": "the choice of experts is being recorded"}

    async def stop_expert_distribution_record(request: Nothing) -> dict[str, Any]:
        await experts.stop()
        return {"success": True, "message": "the choice of experts is not recorded any more"}

    async def dump_expert_distribution_record(request: Nothing) -> dict[str, Any]:
        return {"success": True, **await experts.dump()}

    def configure_logging(request: ConfigureLoggingBody) -> dict[str, Any]:
        now = settings.configure_logging(request.level, request.log_requests, request.log_requests_level)
        return {"success": True, **now}

    def freeze_gc(request: Nothing) -> dict[str, Any]:
        settings.freeze_gc()
        message = "the objects that exist now are left out of garbage collection, in every process"
        return {"success": True, "message": message}

    def set_internal_state(request: SetInternalStateBody) -> dict[str, Any]:
        return {"success": True, "updated": True, "server_args": settings.change_limits(request.server_args)}

    async def dump_requests(request: Nothing) -> dict[str, Any]:
        name, count = await records.dump()
        message = f"wrote {name}; number of requests: {count}"
        return {"success": True, "message": message, "file": name, "num_requests": count}

    work = (
        start_expert_distribution_record,
        stop_expert_distribution_record,
        dump_expert_distribution_record,
        configure_logging,
        freeze_gc,
        set_internal_state,
        dump_requests,
    )
    return {function.__name__: function for function in work}
