"""Fields of vLLM's API in the OpenAI routes: token ids of prompt and output, prompt logprobs, truncated prompts.

Owns the checks of those fields and their shapes in replies. Pure functions, run in the event loop that serves HTTP.
"""

from typing import Any

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.server.openai.protocol import AS_MANY_AS_FIT, MAX_LOGPROBS, GenerationRequest
from headrace.text.tokenizers import Tokenizer


def check_token_details(request: GenerationRequest) -> None:
    """Raises RequestError naming the field at fault."""
    if request.prompt_logprobs is not None:
        if request.stream:
            raise RequestError("prompt_logprobs are not available in a stream", "prompt_logprobs")
        if not 0 <= request.prompt_logprobs <= MAX_LOGPROBS:
            message = f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}, got {request.prompt_logprobs}"
            raise RequestError(message, "prompt_logprobs")
    if request.logprob_token_ids and not request.wants_logprobs:
        raise RequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
    if request.session_params is not None and request.return_token_ids:
        raise RequestError("return_token_ids: a request of a session does not show its prompt", "return_token_ids")
    kept = request.truncate_prompt_tokens
    if kept is not None and kept != AS_MANY_AS_FIT and kept < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got {kept}", "truncate_prompt_tokens"
        )


def truncated(ids: list[int], request: GenerationRequest, context_length: int) -> list[int]:
    """The prompt's tokens that `truncate_prompt_tokens` keeps: the last ones, or the first with truncation_side "right".

    -1 keeps as many as fit into the context beside the requested output (one token if it is not limited; at most half of the context if that
    would leave the prompt nothing).
    """
    count = request.truncate_prompt_tokens
    if count is None:
        return ids
    if count == AS_MANY_AS_FIT:
        output = max(1, request.output_limit or 1)
        count = context_length - (output if output < context_length else context_length // 2)
    return ids[:count] if request.truncation_side == "right" else ids[-count:]


def logprob_options(request: GenerationRequest, whole_prompt: bool = False) -> dict[str, Any]:
    """The logprob fields of `GenerateReqInput`. whole_prompt: the prompt's logprobs are wanted for an echo."""
    prompt = request.prompt_logprobs
    wanted = request.wants_logprobs or prompt is not None
    return {
        "return_logprob": wanted,
        "logprob_start_len": 0 if prompt is not None or (whole_prompt and request.wants_logprobs) else -1,
        "top_logprobs_num": max(request.num_top_logprobs, prompt or 0),
        "token_ids_logprob": list(request.logprob_token_ids) if request.logprob_token_ids else None,
        "return_text_in_logprobs": wanted,
    }


def prompt_logprobs(tokenizer: Tokenizer, request: GenerationRequest, update: SampleUpdate) -> list[object]:
    """For each prompt token null (the first) or an object: token id -> {logprob, rank, decoded_token}.

    The token itself is always there, beside the `prompt_logprobs` most likely ones. rank: 1 = the most likely; null for a token that
    is not among them.
    """
    assert update.logprobs is not None, "they were requested"
    prompt = update.logprobs.prompt
    tops = prompt.top or []
    rows: list[object] = []
    for position, (value, token_id, text) in enumerate(prompt.tokens):
        if value is None:
            rows.append(None)
            continue
        best = (tops[position] if position < len(tops) else None) or ()
        entries = {
            str(top_id): _entry(tokenizer, top_value, rank, top_id, top_text)
            for rank, (top_value, top_id, top_text) in enumerate(best[: request.prompt_logprobs], start=1)
        }
        entries.setdefault(str(token_id), _entry(tokenizer, value, None, token_id, text))
        rows.append(entries)
    return rows


def _entry(tokenizer: Tokenizer, value: float | None, rank: int | None, token_id: int, text: str | None) -> object:
    return {
        "logprob": -9999.0 if value is None else max(value, -9999.0),
        "rank": rank,
        "decoded_token": text if text is not None else tokenizer.decode([token_id], False),
    }
