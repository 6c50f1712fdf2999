"""The line that --log-requests writes for each finished request.

Owns what a level shows. Used by the tokenizer manager, in its event loop.

```
 level 0   counts and times
       1   also the sampling parameters
       2   also the first 2,048 characters of the input and of the output
       3   also all of the input and the output
```
"""

from headrace.frontend.inputs import PromptInput
from headrace.frontend.request_state import ReqState
from headrace.log import as_words, get_logger, with_fields
from headrace.messages.requests import PromptContent

logger = get_logger(__name__)

MAX_CHARACTERS = 2048
"""Most characters of an input, and of an output, at level 2."""


class RequestLog:
    """enabled, level: as --log-requests and --log-requests-level, until they are changed."""

    def __init__(self, enabled: bool, level: int) -> None:
        self.enabled = enabled
        self.level = level

    def input_of(self, given: PromptInput, content: PromptContent) -> str:
        """The text of a prompt for the log line; empty if it is not logged. Call it once for all samples: it may be long."""
        if not self.enabled or self.level < 2:
            return ""
        if given.embeds is not None:
            return f"{content.num_tokens} embeddings"
        limit = MAX_CHARACTERS if self.level == 2 else None
        # An id takes at least two characters.
        return _cut(given.text, limit) if given.text is not None else repr(content.ids(stop=limit))[:limit]

    def write(self, sample: ReqState) -> None:
        """One line for a sample that has ended."""
        assert sample.finish is not None
        if not self.enabled:
            return
        queue_s, ttft_s = sample.stats.queue_time_s, max(0.0, sample.first_token_s - sample.created_s)
        e2e_s = sample.finished_s - sample.created_s
        who: dict[str, object] = {"rid": sample.timeline.own_rid, "key": sample.call.tenant.name or "-"}
        counts: dict[str, object] = {
            "reason": sample.finish.type,
            "prompt_tokens": sample.num_prompt_tokens,
            "cached_tokens": sample.stats.cached_tokens,
            "completion_tokens": len(sample.output_ids),
        }
        events: dict[str, object] = {
            "retractions": sample.stats.num_retractions,
            "replays": max(0, sample.num_sends - 1),
            "chunks": sum(event.kind == "chunk" for event in sample.stats.events),
        }
        details: dict[str, object] = {}
        if self.level >= 1 and sample.request is not None:
            details["sampling"] = sample.request.task.described()
        if self.level >= 2:
            details["prompt"] = sample.logged_input
            details["text"] = _cut(sample.text, MAX_CHARACTERS if self.level == 2 else None)
        logger.info(
            "finished %s %s queue=%.3fs ttft=%.3fs e2e=%.3fs %s%s",
            as_words(who),
            as_words(counts),
            queue_s,
            ttft_s,
            e2e_s,
            as_words(events),
            "".join(f" {name}={text}" for name, text in details.items()),
            extra=with_fields(who | counts | {"queue_s": queue_s, "ttft_s": ttft_s, "e2e_s": e2e_s} | events | details),
        )


def _cut(text: str, limit: int | None) -> str:
    """At most `limit` characters of the text, as one line."""
    if limit is None or len(text) <= limit:
        return repr(text)
    return f"{text[:limit]!r}... ({len(text)} characters)"
