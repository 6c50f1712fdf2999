"""Logprobs of tokens, as OpenAI's APIs show them. Pure functions; any thread."""

from headrace.frontend.sample_update import LogprobItem
from headrace.text.tokenizers import Tokenizer


def token_logprob(tokenizer: Tokenizer, entry: LogprobItem) -> dict[str, object]:
    """A token: its text, logprob and bytes."""
    value, token_id, text = entry
    shown = text if text is not None else tokenizer.decode([token_id], False)
    raw = tokenizer.token_bytes(token_id) if tokenizer.fixed_bytes else shown.encode(errors="replace")
    return {"token": shown, "logprob": finite_logprob(value), "bytes": list(raw)}


def finite_logprob(value: float | None) -> float:
    """A logprob that JSON and clients can represent; -inf and a missing one as OpenAI writes them."""
    return -9999.0 if value is None or value < -9999.0 or value != value else value
