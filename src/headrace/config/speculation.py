"""Which options about guessed tokens can be combined, and where tokens can be guessed."""

from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.server_args import ServerArgs

_OPTION = "--speculative-algorithm"


def guesses_by_text(args: "ServerArgs") -> bool:
    """Whether tokens are guessed from those that are known, without a model."""
    return args.speculative_algorithm in ("ngram", "auto")


def check_speculation(args: "ServerArgs") -> None:
    """Raises ConfigError if options contradict each other."""
    algorithm, path = args.speculative_algorithm, args.speculative_draft_model_path
    has_weights = algorithm in ("draft", "eagle3")
    if has_weights and path is None:
        raise ConfigError(f"{_OPTION} {algorithm} needs --speculative-draft-model-path")
    if path is not None and not has_weights:
        raise ConfigError(f"--speculative-draft-model-path needs {_OPTION} draft or eagle3")
    if args.speculative_draft_model_quantization != "auto" and algorithm != "draft":
        raise ConfigError(f"--speculative-draft-model-quantization needs {_OPTION} draft")
    if args.speculative_shared_tokens and not guesses_by_text(args):
        raise ConfigError(f"--speculative-shared-tokens needs {_OPTION} ngram or auto")
    if has_weights and (args.num_ranks > 1 or args.enable_dp_attention):
        raise ConfigError(
            f"{_OPTION} {algorithm} cannot be combined with --tp-size, --pp-size and --enable-dp-attention so far: use ngram or auto"
        )
    if algorithm == "eagle3" and args.enable_torch_compile:
        raise ConfigError(f"{_OPTION} eagle3 cannot be combined with --enable-torch-compile")


def check_guesses_on(device: str, args: "ServerArgs", batch_invariant: bool) -> None:
    """Raises ConfigError if tokens cannot be guessed there.

    batch_invariant: whether, on a CPU, a token has the same logits in a step of several tokens as alone.
    """
    algorithm = args.speculative_algorithm
    if algorithm == "off":
        return
    if device != "cpu" and args.num_ranks > 1:
        raise ConfigError(
            f"{_OPTION} {algorithm} with several ranks works on CPUs only so far, and the device is {device}"
        )
    if not batch_invariant:
        raise ConfigError(
            f"{_OPTION} {algorithm}: this model runs through transformers' code, whose bits depend on the batch, so guesses would change tokens"
        )
