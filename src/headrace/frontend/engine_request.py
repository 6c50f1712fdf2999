"""The scheduler's request for a sample: its task, and for whom and until when. Runs in the tokenizer manager's event loop."""

from headrace.frontend.request_state import ReqState
from headrace.messages.namespaces import of_adapter
from headrace.messages.requests import EngineTask, PromptContent, TokenizedGenerateReqInput


def engine_request(
    sample: ReqState, content: PromptContent, task: EngineTask, *, namespace: str, priority: int | None, group: str = ""
) -> TokenizedGenerateReqInput:
    """namespace: what the call asks for, within that of its tenant and of its adapter. group: see `TokenizedGenerateReqInput`."""
    call, adapter = sample.call, sample.adapter
    tenant = call.tenant
    lora_id, lora_name = (adapter.lora_id, adapter.name) if adapter is not None else (0, "")
    return TokenizedGenerateReqInput(
        rid=sample.rid,
        content=content,
        task=task,
        namespace=of_adapter(tenant.namespace(namespace), lora_id, lora_name),
        priority=priority or 0,
        group=group,
        created_s=sample.created_s,
        deadline_s=sample.created_s + call.timeout_s if call.timeout_s > 0 else 0.0,
        queue_deadline_s=sample.created_s + call.queue_timeout_s if call.queue_timeout_s > 0 else 0.0,
        tenant=tenant.limits.name,
        weight=tenant.limits.weight,
        lora_id=lora_id,
    )
