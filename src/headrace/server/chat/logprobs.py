"""Logprobs of tokens, as OpenAI's APIs show them. Pure functions; any thread."""

from headrace.frontend.sample_update import LogprobItem
from headrace.text.tokenizers import Tokenizer

_UNKNOWN = "\ufffd"
"""What is decoded where bytes are no text."""


def token_logprob(tokenizer: Tokenizer, entry: LogprobItem, as_id: bool = False) -> dict[str, object]:
    """A token: its text, see `token_text`, logprob and bytes."""
    value, token_id, text = entry
    shown = token_text(tokenizer, token_id, text, as_id)
    if tokenizer.fixed_bytes:
        raw = tokenizer.token_bytes(token_id)
    else:
        raw = _decoded(tokenizer, token_id, text).encode(errors="replace")
    return {"token": shown, "logprob": finite_logprob(value), "bytes": list(raw)}


def token_text(tokenizer: Tokenizer, token_id: int, text: str | None, as_id: bool = False) -> str:
    """The text of a token, its bytes as OpenAI writes them (`bytes:\\xe5\\xae`) if they are part of a character, or `token_id:123`.

    text: as it was decoded; None = not yet.
    """
    if as_id:
        return f"token_id:{token_id}"
    shown = _decoded(tokenizer, token_id, text)
    if _UNKNOWN not in shown or not tokenizer.fixed_bytes:
        return shown
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + repr(raw)[2:-1]


def _decoded(tokenizer: Tokenizer, token_id: int, text: str | None) -> str:
    return text if text is not None else tokenizer.decode([token_id], False)


def finite_logprob(value: float | None) -> float:
    """A logprob that JSON and clients can represent; -inf and a missing one as OpenAI writes them."""
    return -9999.0 if value is None or value < -9999.0 or value != value else value
