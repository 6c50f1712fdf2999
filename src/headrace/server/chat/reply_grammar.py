"""What a reply with tools must match: the grammar of the model's own way to write calls, joined with the one that the request asks for.

Pure functions, run in the event loop that serves HTTP.
"""

from headrace.errors import RequestError
from headrace.parsers.registry import OutputFormat
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import Conversation
from headrace.server.chat.prompt import ChatPrompt


def bound_by_tools(
    sampling: SamplingParams, conversation: Conversation, output_format: OutputFormat | None, prompt: ChatPrompt
) -> SamplingParams:
    """The sampling parameters with what `tool_choice`, `strict` and reasoning ask of the output.

    Raises RequestError for a grammar of the request that cannot be joined with them.
    """
    if conversation.choice.mode == "required":
        raise RequestError("tool_choice: required calls are not supported yet", "tool_choice")
    return sampling
