"""The command `python -m bench.fleet`."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

import bench.fleet
from bench.fleet.costs import read_costs
from bench.fleet.options import FleetOptions, ReplicaOptions, WorkloadOptions, policy_names
from bench.fleet.run import run_fleet
from bench.program import counts, parser_of, refusals


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate what the options say."""
    parser = parser_of(bench.fleet.__doc__)
    parser.add_argument("--replicas", type=counts, default="10", help="sizes of the fleets")
    parser.add_argument("--policies", type=policy_names, default="round_robin,shortest_queue,cache_aware")
    parser.add_argument("--num-requests", type=int, metavar="N", help="to each fleet; default: 100 for each replica")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second for each replica (Poisson)")
    parser.add_argument(
        "--failures", type=int, default=0, metavar="N", help="N times a replica dies while requests arrive"
    )
    parser.add_argument("--restart-s", type=float, default=10.0, help="until it is back, with an empty cache")
    parser.add_argument("--repeat", type=int, default=1, help="medians of N runs")
    parser.add_argument("--seed", type=int, default=1234, help="of sessions, arrivals and failures")
    parser.add_argument("--plot", type=Path, help="plot of hit rates, latencies and imbalance, .svg or .png")
    sessions = parser.add_argument_group("what is asked")
    sessions.add_argument("--groups", type=int, default=100, help="number of system prompts")
    sessions.add_argument("--zipf", type=float, default=1.0, help="system prompt k is chosen with weight 1 / k^ZIPF")
    sessions.add_argument("--system-tokens", type=int, default=256, help="mean length of a system prompt")
    sessions.add_argument("--turns", type=int, default=4, help="mean number of turns of a session")
    sessions.add_argument("--turn-tokens", type=int, default=64, help="mean length of the user's text in a turn")
    sessions.add_argument("--output-tokens", type=int, default=32, help="mean length of an answer")
    sessions.add_argument("--think-s", type=float, default=5.0, help="mean time from an answer to the next turn")
    one = parser.add_argument_group("one replica")
    one.add_argument("--step-costs", type=Path, help="results of `headrace bench step`; default: SmolLM2 on 2 cores")
    one.add_argument("--kv-tokens", type=int, default=32768, help="size of the KV cache")
    one.add_argument("--max-running-requests", type=int, default=32, dest="max_running", help="the others wait")
    one.add_argument(
        "--chunked-prefill-size", type=int, default=512, dest="chunk_tokens", help="prompt tokens in a step"
    )
    one.add_argument("--tokens-per-step", type=int, default=1, metavar="N", help="simulate N steps of decoding as one")
    with refusals():
        given = vars(parser.parse_args(arguments))
        if (costs := given.pop("step_costs")) is not None:
            given["cost"] = read_costs(costs)

        def of(kind: Any) -> dict[str, Any]:
            return {field.name: given[field.name] for field in fields(kind) if field.name in given}

        options = FleetOptions(
            **of(FleetOptions),
            workload=WorkloadOptions(**of(WorkloadOptions)),
            replica=ReplicaOptions(**of(ReplicaOptions)),
        )
        run_fleet(options, Console())


if __name__ == "__main__":
    main()
