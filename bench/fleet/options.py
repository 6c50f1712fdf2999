"""What a simulated fleet is, what it is asked, and what breaks: plain data, checked."""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

from bench.fleet.costs import DEFAULT_COSTS, StepSeconds
from headrace.errors import ConfigError
from headrace.frontend.balancers import Method

MAX_REPLICAS = 100_000


def _check(options: object, least: int, *names: str) -> None:
    """Raises ConfigError for a value below `least`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Sessions of several turns, each turn with all text before it. Lengths are drawn evenly from half to one and a half of these.

    groups: system prompts, of which number k is chosen with a weight of 1 / k ** zipf. system_tokens: their length.
    turns: of a session, on average. turn_tokens: new text of the user in each turn. output_tokens: of each answer.
    think_s: mean time from an answer to the next turn. vocab_size: token ids are below it.
    """

    groups: int = 100
    zipf: float = 1.0
    system_tokens: int = 256
    turns: int = 4
    turn_tokens: int = 64
    output_tokens: int = 32
    think_s: float = 5.0
    vocab_size: int = 49152

    def __post_init__(self) -> None:
        """Raises ConfigError for values that make no sense."""
        _check(self, 1, "groups", "turns", "turn_tokens", "output_tokens")
        _check(self, 0, "zipf", "system_tokens", "think_s")

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a request and its answer can have."""
        turns = 2 * self.turns - 1
        return most(self.system_tokens) + turns * (most(self.turn_tokens) + most(self.output_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """One replica: its limits, as `headrace serve` has them, and how long its steps take.

    tokens_per_step: 1 = the real thing. k > 1: a step stands for k steps of the rows that decode, which is k times as quick to simulate;
    requests then wait for up to k steps before they are seen.
    """

    cost: StepSeconds = DEFAULT_COSTS
    kv_tokens: int = 32768
    page_size: int = 16
    max_running: int = 32
    chunk_tokens: int = 512
    max_step_s: float = 0.2
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError for values that make no sense."""
        _check(self, 1, "kv_tokens", "page_size", "max_running", "chunk_tokens", "tokens_per_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Which fleets are simulated, with which policies, and where the results go.

    rate: requests per second and replica. num_requests: of each fleet; None = 100 for each replica. failures: replicas that die, at random
    times while requests arrive; each is back, empty, after restart_s. repeat: runs of each fleet and policy, with seeds seed, seed + 1, ...
    """

    replicas: tuple[int, ...] = (10,)
    policies: tuple[Method, ...] = ("round_robin", "shortest_queue", "cache_aware")
    workload: WorkloadOptions = WorkloadOptions()
    replica: ReplicaOptions = ReplicaOptions()
    rate: float = 1.0
    num_requests: int | None = None
    failures: int = 0
    restart_s: float = 10.0
    repeat: int = 1
    seed: int = 1234
    output: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for values that make no sense, before a long simulation."""
        if not self.replicas or not all(1 <= count <= MAX_REPLICAS for count in self.replicas):
            raise ConfigError(f"--replicas takes numbers from 1 to {MAX_REPLICAS}, got {self.replicas}")
        if self.rate <= 0:
            raise ConfigError(f"--rate must be above 0, got {self.rate}")
        _check(self, 0, "failures", "restart_s")
        _check(self, 1, "repeat", "num_requests")
        longest = self.workload.longest_tokens + self.replica.page_size
        if longest > self.replica.kv_tokens:
            raise ConfigError(
                f"a session may have up to {longest} tokens, but a replica holds only {self.replica.kv_tokens}: "
                "give more --kv-tokens, or fewer turns or tokens"
            )
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")

    def requests_of(self, num_replicas: int) -> int:
        """Requests that a fleet of this size gets."""
        return self.num_requests or 100 * num_replicas


def most(mean: int) -> int:
    """The most that is drawn for a length of this mean."""
    return mean + mean // 2
