"""The command `python -m bench.fleet`."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

import bench.fleet
from bench.fleet.costs import read_costs
from bench.fleet.options import FleetOptions, ReplicaOptions, WorkloadOptions
from bench.fleet.run import run_fleet
from bench.program import counts, names_of, parser_of, refusals
from headrace.frontend.balancers import Method


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate what the options say."""
    parser = parser_of(bench.fleet.__doc__)
    parser.argument_default = argparse.SUPPRESS
    parser.epilog = "What is not given is as bench/fleet/options.py has it."
    add = parser.add_argument
    add("--replicas", type=counts, help="sizes of the fleets")
    add("--policies", type=names_of(get_args(Method)), help=f"any of {', '.join(get_args(Method))}")
    add("--num-requests", type=int, metavar="N", help="to each fleet; default: 100 for each replica")
    add("--rate", type=float, help="requests per second for each replica (Poisson)")
    add("--failures", type=int, metavar="N", help="N times a replica dies while requests arrive")
    add("--restart-s", type=float, help="until it is back, with an empty cache")
    add("--repeat", type=int, help="medians of N runs")
    add("--seed", type=int, help="of sessions, arrivals and failures")
    add("--plot", type=Path, help="plot of hit rates, latencies and imbalance, .svg or .png")
    add = parser.add_argument_group("what is asked").add_argument
    add("--groups", type=int, help="number of system prompts")
    add("--zipf", type=float, help="system prompt k is chosen with weight 1 / k^ZIPF")
    add("--system-tokens", type=int, help="mean length of a system prompt")
    add("--turns", type=int, help="mean number of turns of a session")
    add("--turn-tokens", type=int, help="mean length of the user's text in a turn")
    add("--output-tokens", type=int, help="mean length of an answer")
    add("--think-s", type=float, help="mean time from an answer to the next turn")
    add = parser.add_argument_group("one replica").add_argument
    add("--step-costs", type=Path, help="results of `headrace bench step`; default: SmolLM2 on 2 cores")
    add("--kv-tokens", type=int, help="size of the KV cache")
    add("--max-running-requests", type=int, dest="max_running", help="the others wait")
    add("--chunked-prefill-size", type=int, dest="chunk_tokens", help="prompt tokens in a step")
    add("--tokens-per-step", type=int, metavar="N", help="simulate N steps of decoding as one")
    with refusals():
        given = vars(parser.parse_args(arguments))
        if "step_costs" in given:
            given["cost"] = read_costs(given.pop("step_costs"))

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
