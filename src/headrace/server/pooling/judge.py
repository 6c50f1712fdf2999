"""Asks a model that generates whether a document answers a query: how likely its next token is "yes" instead of "no".

The prompt is the one that Qwen3-Reranker was trained with (Zhang et al., 2025, https://arxiv.org/abs/2506.05176, and the model's card), put into
the model's own chat template. So the query comes before the document, and the documents of a query share its prefix in the cache. Any model with
such a template and these tokens can be asked; what other models say means little. Plain computation, in a thread.
"""

from dataclasses import dataclass

from headrace.errors import ContextLengthError, ExecutionError, RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.server.chat.conversation import Conversation
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import ServingContext

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Used if the request has no instruction of its own."""


@dataclass(frozen=True, slots=True)
class Judge:
    """yes_id, no_id: the tokens between which the model chooses."""

    context: ServingContext
    yes_id: int
    no_id: int

    @classmethod
    def of(cls, context: ServingContext) -> "Judge":
        """The served model as a judge. Raises RequestError if it has no chat template or "yes" or "no" is not one token."""
        context.check_tokenizer("query")
        if context.model.chat_template is None:
            raise RequestError("this model cannot be asked for scores: it has no chat template", "model")
        return cls(context, _only_token(context, "yes"), _only_token(context, "no"))

    def prompt(self, query: str, document: str, instruction: str, place: int) -> list[int]:
        """Token ids of the question about a document. place: its number in the request. Text never becomes special tokens. Raises RequestError."""
        self.context.check_text_length("documents", len(query) + len(document))
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        messages: list[dict[str, object]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": asked},
        ]
        try:
            ids = list(chat_prompt(self.context, Conversation(messages=messages, thinking=False)).ids)
        except RequestError as error:
            if error.param == "messages":
                error.param = "documents"
            raise
        limit = self.context.model.context_length
        if len(ids) >= limit:
            asked = (
                f"the query and document {place} have {len(ids)} tokens with the instruction, and the answer needs one"
            )
            raise ContextLengthError("documents", limit, asked, "document")
        return ids

    def log_odds(self, update: SampleUpdate) -> float:
        """ln P(yes) - ln P(no) of the token after the prompt."""
        found = picked_logprobs(update)
        return found[self.yes_id] - found[self.no_id]


def picked_logprobs(update: SampleUpdate) -> dict[int, float]:
    """The logprobs of the ids that were asked for, at the first output token."""
    assert update.logprobs is not None, "they were requested"
    assert update.logprobs.output.picked, "there is an output token"
    found = {token_id: value for value, token_id, _ in update.logprobs.output.picked[0] or () if value is not None}
    if len(found) < len(update.logprobs.output.picked[0] or ()):
        raise ExecutionError("the model gave logprobs that are not finite")
    return found


def _only_token(context: ServingContext, word: str) -> int:
    ids = context.model.tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        message = f"this model cannot be asked for scores: {word!r} is {len(ids)} tokens in its vocabulary, not one"
        raise RequestError(message, "model")
    return ids[0]
