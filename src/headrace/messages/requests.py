"""Requests on their way in: as the front end receives them and as they cross to the scheduler."""

from typing import Annotated

import msgspec

from headrace.sampling.params import ResolvedSamplingParams, SamplingParams

NotYet = Annotated[object | None, msgspec.Meta(extra_json_schema={"enum": [None, False, "", [], {}, [None]]})]
"""A field that is known and not supported: refused by name when it asks for something."""


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in an open session a request goes on.

    id: of the session. rid: the request it goes on from; None = the latest one, or the session's beginning with `replace`.
    offset: go on after so many tokens of what there is (negative: from its end); None or 0 = after all of it.
    replace: what came after that request is forgotten, and aborted if it runs. drop_previous_output: go on after its prompt.
    """

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


class GenerateReqInput(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of `generate`: one prompt or a batch of prompts, `n` samples of each.

    Exactly one of `text`, `input_ids` and `input_embeds` is given; a list of prompts makes a batch.
    `input_embeds` is float[num_tokens][hidden_size] for one prompt, or the same as little-endian float32 bytes (in JSON base64).
    Fields that may be one value or one per prompt are lists
    when they differ. What this build cannot do (images, disaggregation) is refused by name.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: bytes | list[bytes | list[float | list[float]]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_hidden_states: bool | list[bool] = False
    custom_logit_processor: str | list[str | None] | None = None
    priority: int | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None
    session_params: SessionParams | list[SessionParams] | None = None
    image_data: NotYet = None
    audio_data: NotYet = None
    video_data: NotYet = None
    routed_dp_rank: int | None = None
    bootstrap_host: NotYet = None
    bootstrap_port: NotYet = None
    bootstrap_room: NotYet = None


class LogprobSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which logprobs a sample wants.

    prompt_start: first prompt index whose logprob is wanted, >= 1; num_prompt_tokens or more = outputs only.
    top_num: most likely alternatives per position. token_ids: further ids whose logprob is wanted at each position.
    """

    prompt_start: int
    top_num: int = 0
    token_ids: tuple[int, ...] = ()


class SampleTask(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """What is asked of the engine: sample tokens after the prompt.

    stream: report outputs every few tokens, not only at the end. custom_logit_processor: its name, or empty.
    """

    params: ResolvedSamplingParams
    stream: bool = False
    logprobs: LogprobSpec | None = None
    return_hidden_states: bool = False
    custom_logit_processor: str = ""


class TokenizedGenerateReqInput(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """One sample: what the scheduler receives. `rid` is the sample's own (unique among the live ones).

    task: what is asked of the engine; the other fields say on which tokens, for whom and when.
    input_ids: int32[num_prompt_tokens] little-endian. input_embeds: float32[num_prompt_tokens, hidden_size] or empty;
    with embeds, input_ids are placeholders and nothing of it enters the prefix cache.
    group: samples of one prompt share it, so that the prompt is prefilled once; empty = alone.
    namespace: requests of different namespaces never share KV. created_s: time.monotonic() at arrival (one clock for all processes of a machine).
    deadline_s: time.monotonic() after which it is aborted (0 = none). queue_deadline_s: the same while it has never run.
    tenant, weight: whose it is and its share beside other tenants that wait; weight > 0.
    lora_id: the adapter, which is loaded; 0 = the base model.
    output_ids: int32[m], outputs of an earlier life of the scheduler that have reached the front end: this one goes on after them.
    attempt: how often the sample was sent before (0 = never).
    """

    rid: str
    input_ids: bytes
    task: SampleTask
    input_embeds: bytes = b""
    namespace: str = ""
    priority: int = 0
    group: str = ""
    created_s: float = 0.0
    deadline_s: float = 0.0
    queue_deadline_s: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    output_ids: bytes = b""
    attempt: int = 0
    lora_id: int = 0


class BatchTokenizedGenerateReqInput(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Samples that arrived together: one message."""

    requests: tuple[TokenizedGenerateReqInput, ...]
