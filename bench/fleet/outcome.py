"""The figures of one simulated run."""

import statistics
from array import array
from dataclasses import dataclass, field

from headrace.benchmark.figures import Distribution, distribution


@dataclass(frozen=True, slots=True)
class Outcome:
    """Simulated seconds, except for wall_s, which the simulation itself took. duration_s: from the first arrival to the last answer.

    hit_rate: part of the prompts' tokens that was found in a prefix cache. busiest: the busy time of the busiest replica over the mean.
    busy_spread: the standard deviation of the busy times over the mean. num_moved: times that a request went on at another replica because
    its own had died. num_retracted: times that one was set back because a KV pool was full. num_used: replicas that got a request.
    """

    num_requests: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    ttft_s: Distribution
    e2e_s: Distribution
    request_throughput: float
    output_throughput: float
    busy_fraction: float
    busiest: float
    busy_spread: float
    num_used: int
    num_deaths: int
    num_moved: int
    num_retracted: int
    num_steps: int
    wall_s: float


@dataclass(slots=True)
class Tally:
    """What is counted while a run goes on. busy_s: by replica. ttft_s, e2e_s: of the requests that have ended."""

    busy_s: list[float]
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    e2e_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_deaths: int = 0
    num_moved: int = 0
    num_retracted: int = 0
    num_steps: int = 0

    def outcome(self, duration_s: float, num_used: int, wall_s: float) -> Outcome:
        """The figures of a run that is over."""
        mean_s = statistics.fmean(self.busy_s)
        counted = ("prompt_tokens", "output_tokens", "num_deaths", "num_moved", "num_retracted", "num_steps")
        return Outcome(
            **{name: getattr(self, name) for name in counted},
            num_requests=len(self.e2e_s),
            duration_s=duration_s,
            hit_rate=_ratio(self.cached_tokens, self.prompt_tokens),
            ttft_s=distribution(self.ttft_s),
            e2e_s=distribution(self.e2e_s),
            request_throughput=_ratio(len(self.e2e_s), duration_s),
            output_throughput=_ratio(self.output_tokens, duration_s),
            busy_fraction=_ratio(mean_s, duration_s),
            busiest=_ratio(max(self.busy_s), mean_s),
            busy_spread=_ratio(statistics.pstdev(self.busy_s, mean_s), mean_s),
            num_used=num_used,
            wall_s=wall_s,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
