"""How many tokens the KV pool has: what was asked for or fits into memory, and the same on every rank. Runs once, at start."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from headrace.checkpoint.model_config import ModelConfig
from headrace.config.resolve import Config
from headrace.config.server_args import ServerArgs
from headrace.distributed.rank import Rank
from headrace.errors import ConfigError
from headrace.execution.graphs import graph_bytes
from headrace.execution.memory import available_bytes, kv_token_budget
from headrace.execution.model_runner import logits_shape
from headrace.messages.packing import pack_int32, unpack_int32
from headrace.sampling.penalties import penalty_bytes

_ROOM = "tokens of KV"
"""Under which each rank with a device tells the leader what it has room for."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Size of the KV pool, of a rank if each has other sequences, and the longest sequence that it allows."""

    num_tokens: int
    context_length: int


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """Bytes of a rank's weights, of its KV of a token, and of what its steps need beside those of a model alone."""

    weight_bytes: int
    bytes_per_token: int
    step_bytes: int = 0

    def beside(self, other: "RankNeeds") -> "RankNeeds":
        """Those of both in one process."""
        return RankNeeds(
            self.weight_bytes + other.weight_bytes,
            self.bytes_per_token + other.bytes_per_token,
            self.step_bytes + other.step_bytes,
        )


def agreed_plan(
    rank: Rank,
    args: ServerArgs,
    config: Config,
    needs: Sequence[RankNeeds],
    reserved_bytes: int,
    device: torch.device,
    decisions: list[str],
    check: Callable[[], None],
) -> PoolPlan:
    """The same plan on every rank: the leader's, for the stage with the least room. Of the ranks of a stage the first needs the most. If each has
    a device, with memory of its own, it is that of the rank with the least room.

    needs: of a rank of each stage, this one's first. check: called while the leader waits for the others; what it raises ends the wait. Raises
    ConfigError if the pool is too small for one sequence.
    """
    if rank.group is not None and not rank.leads:
        if rank.devices is not None:
            rank.devices.offer(_ROOM, _plan(args, config, needs[0], reserved_bytes, device, []).num_tokens)
        [num_tokens] = unpack_int32(rank.group.receive())
        args, needs = replace(args, max_total_tokens=num_tokens * args.num_kv_parts), needs[:1]
    plans: list[tuple[PoolPlan, list[str]]] = []
    for one in needs:
        found: list[str] = []
        plans.append((_plan(args, config, one, reserved_bytes, device, found), found))
    plan, found = min(plans, key=lambda both: both[0].num_tokens)
    decisions += found
    if rank.devices is not None and rank.leads:
        plan = _of_least_room(plan, rank.devices.offered(_ROOM, check), args, decisions)
    if rank.group is not None and rank.leads:
        rank.group.send(pack_int32([plan.num_tokens]))
    return plan


def _of_least_room(plan: PoolPlan, of_others: Sequence[int], args: ServerArgs, decisions: list[str]) -> PoolPlan:
    """of_others: tokens that ranks 1, 2, ... have room for. Raises ConfigError if --context-length does not fit any more."""
    least = min(of_others)
    if least >= plan.num_tokens:
        return plan
    who = f"the GPU of rank {of_others.index(least) + 1} has room for no more, this one for {plan.num_tokens}"
    if args.context_length is not None and least < args.context_length:
        raise ConfigError(
            f"--context-length {args.context_length}: {who}, which is less than a sequence may have: {least} tokens; "
            "raise --mem-fraction-static, or lower --context-length"
        )
    decisions.append(f"max_total_tokens {least}: {who}")
    return PoolPlan(least, min(plan.context_length, least))


def reserved_bytes(
    config: Config,
    model_config: ModelConfig,
    graph_sizes: tuple[int, ...],
    verifying_sizes: tuple[int, ...] = (),
    gathers: bool = False,
) -> int:
    """Bytes that steps need: logits on the CPU, penalties and graphs of these sizes on a GPU. verifying_sizes: of graphs that verify drafts. gathers:
    logits come from several ranks."""
    if config.device == "cpu":
        return 4 * math.prod(logits_shape(config.max_running_requests, model_config.vocab_size))
    penalties = penalty_bytes(config.max_running_requests, model_config.vocab_size, config.context_length)
    if not graph_sizes:
        return penalties
    row_bytes = 0
    if config.deterministic:
        from headrace.kernels.triton.attention import DETERMINISTIC_SPLIT  # needs Triton, so it is imported only here

        splits = -(-config.context_length // DETERMINISTIC_SPLIT)
        row_bytes = model_config.num_q_heads * splits * model_config.head_dim * 4
    if gathers:
        # A rank's own logits, padded, and those of all ranks, in 16 bits.
        row_bytes += 2 * 2 * model_config.vocab_size
    return penalties + graph_bytes(
        graph_sizes[-1],
        model_config.vocab_size,
        model_config.hidden_size,
        config.context_length,
        row_bytes,
        verifying_sizes,
    )


def whole_pages(args: ServerArgs, page_size: int) -> int:
    """What each part of the KV cache gets of --max-total-tokens, which is given: whole pages. Raises ConfigError if it is less than one."""
    total, num_parts = args.max_total_tokens, args.num_kv_parts
    assert total is not None
    if total < num_parts * page_size:
        needed = f"one page of {page_size} tokens" + ("" if num_parts == 1 else f" for each of {num_parts} ranks")
        raise ConfigError(f"--max-total-tokens {total} is less than {needed}")
    return total // (num_parts * page_size) * page_size


def _plan(
    args: ServerArgs,
    config: Config,
    needs: RankNeeds,
    reserved_bytes: int,
    device: torch.device,
    decisions: list[str],
) -> PoolPlan:
    """The number of tokens in the pool. Raises ConfigError if it is too small for one sequence."""
    page_size, context_length = config.page_size, config.context_length
    if args.max_total_tokens is not None:
        num_tokens = whole_pages(args, page_size)
        in_all = num_tokens * args.num_kv_parts
        if in_all != args.max_total_tokens:
            decisions.append(f"max_total_tokens {in_all}: {args.max_total_tokens} rounded down to pages of {page_size}")
    else:
        num_tokens, reason = kv_token_budget(
            available=available_bytes(device),
            weight_bytes=needs.weight_bytes,
            mem_fraction_static=config.mem_fraction_static,
            reserved_bytes=reserved_bytes + needs.step_bytes,
            bytes_per_token=needs.bytes_per_token,
            page_size=page_size,
            max_tokens_useful=config.max_running_requests * context_length,
        )
        decisions.append(f"max_total_tokens {num_tokens}: {reason}")
        if num_tokens == 0 or (args.context_length is not None and num_tokens < context_length):
            raise ConfigError(
                f"memory has room for {num_tokens} KV tokens ({reason}), but a sequence may have {context_length} tokens; "
                "raise --mem-fraction-static, lower --context-length, or choose a smaller --kv-cache-dtype"
            )
    if num_tokens < context_length:
        decisions.append(f"context_length {num_tokens}: the KV cache has no room for longer sequences")
        context_length = num_tokens
    return PoolPlan(num_tokens, context_length)
