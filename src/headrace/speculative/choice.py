"""Makes the drafters that --speculative-algorithm names."""

from headrace.config.checks import guesses_by_text
from headrace.config.server_args import ServerArgs
from headrace.sampling.sampler import Sampler
from headrace.speculative.base import Drafts
from headrace.speculative.forced import ForcedDrafter
from headrace.speculative.ngram import NgramDrafter
from headrace.speculative.shared import SharedOutputs


def make_drafts(args: ServerArgs, sampler: Sampler, on_host: bool) -> Drafts | None:
    """What guesses without weights. None: nothing is guessed.

    sampler: of the sequences, whose grammars it has. on_host: the model is, too; on a device masks of grammars are filled at other times, and what
    they demand is not guessed.
    """
    if not guesses_by_text(args):
        return None
    most, shared = args.speculative_num_draft_tokens, args.speculative_shared_tokens
    ngram = NgramDrafter(most, SharedOutputs(shared) if shared else None)
    if args.speculative_algorithm == "ngram" or not on_host:
        return Drafts([ngram])
    sampler.grammars.notes_demands = True
    return Drafts([ForcedDrafter(sampler.grammars.demanded, most), ngram])
