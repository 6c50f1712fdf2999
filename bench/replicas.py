"""What a policy of --load-balance-method does to the hit rate of real replicas, beside what `python -m bench.fleet` says of them.

    .venv/bin/python -m bench.replicas MODEL [--replicas 4] [--policies cache_aware,...] [--num-requests 150] [--repeat 3] [--output FILE]

Starts `headrace serve MODEL` with one replica, then with `--replicas` of them and each policy, one server after the other, and sends each the
sessions of `bench.fleet`, with the answers of the model. Each repetition has sessions of its own (another seed) and begins with empty caches.
The simulation gets the same sessions. Hit rate: cached tokens over prompt tokens, as the replies say. How fast the answers come is not looked
at: replicas of one machine share its cores. Prints JSON.
"""

import asyncio
import statistics
from array import array
from dataclasses import asdict
from typing import Any, get_args

import aiohttp

from bench.fleet.options import FleetOptions, ReplicaOptions, WorkloadOptions, policy_names
from bench.fleet.simulation import Fleet
from bench.fleet.workload import Session, Workload
from bench.program import parser_of, write_report
from bench.servers import own_server
from headrace.frontend.balancers import Method

KV_TOKENS = 16384
WORKLOAD = WorkloadOptions(groups=16, system_tokens=256, turns=3, turn_tokens=32, output_tokens=8, think_s=0.5)
RATE = 4.0
"""Requests per second, over all replicas."""
SEED = 1234


class Clients:
    """Sends sessions to a server and counts what the replies say."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.num_answers = 0

    async def run(self, workload: Workload) -> None:
        """All sessions of the workload, each when it begins."""
        await (await self._http.post(f"{self._url}/flush_cache")).read()
        async with asyncio.TaskGroup() as group:
            for begins_s, session in workload.sessions():
                group.create_task(self._run_session(begins_s, session))

    async def _run_session(self, wait_s: float, session: Session) -> None:
        while session.turns_left:
            await asyncio.sleep(wait_s)
            request = session.next_request()
            body = {
                "input_ids": request.content.ids(),
                "sampling_params": {
                    "max_new_tokens": request.task.max_new_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            }
            async with self._http.post(f"{self._url}/generate", json=body) as reply:
                reply.raise_for_status()
                answer = await reply.json()
            self.num_answers += 1
            self.prompt_tokens += answer["meta_info"]["prompt_tokens"]
            self.cached_tokens += answer["meta_info"]["cached_tokens"]
            wait_s = session.answered(array("i", answer["output_ids"]))


async def hit_rates(url: str, num_requests: int, repeat: int) -> tuple[list[float], list[int]]:
    """The hit rate of each repetition, and how many requests each replica has answered in all of them."""
    rates = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for repetition in range(repeat):
            clients = Clients(http, url)
            await clients.run(Workload(WORKLOAD, num_requests, RATE, SEED + repetition))
            assert clients.num_answers == num_requests
            rates.append(clients.cached_tokens / clients.prompt_tokens)
        async with http.get(f"{url}/internal_state") as reply:
            state = await reply.json()
    return rates, [replica["num_finished"] for replica in state.get("replicas", [state])]


def simulated(num_replicas: int, policy: Method, num_requests: int, repeat: int) -> list[float]:
    """The same of the simulation."""
    options = FleetOptions(
        workload=WORKLOAD,
        replica=ReplicaOptions(kv_tokens=KV_TOKENS),
        rate=RATE / num_replicas,
        num_requests=num_requests,
    )
    return [Fleet(options, num_replicas, policy, SEED + repetition).run().hit_rate for repetition in range(repeat)]


def described(rates: list[float]) -> dict[str, Any]:
    """Median and spread, (largest - smallest) / median."""
    median = statistics.median(rates)
    return {"hit_rates": rates, "median": median, "spread": (max(rates) - min(rates)) / median}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--policies", type=policy_names, default=get_args(Method))
    parser.add_argument("--num-requests", type=int, default=150)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    cases: list[tuple[int, Method]] = [(1, "round_robin"), *((options.replicas, policy) for policy in options.policies)]
    results: list[dict[str, Any]] = []
    for num_replicas, policy in cases:
        arguments = [
            "--dp-size",
            str(num_replicas),
            "--load-balance-method",
            policy,
            "--max-total-tokens",
            str(KV_TOKENS),
        ]
        with own_server(options.model, arguments) as server:
            measured, answered = asyncio.run(hit_rates(server.url, options.num_requests, options.repeat))
        results.append(
            {
                "replicas": num_replicas,
                "policy": policy if num_replicas > 1 else None,
                "answered_by_replica": answered,
                "measured": described(measured),
                "simulated": described(simulated(num_replicas, policy, options.num_requests, options.repeat)),
            }
        )
        results[-1]["over_one_replica"] = results[-1]["measured"]["median"] / results[0]["measured"]["median"]
    found = {
        "model": options.model,
        "num_requests": options.num_requests,
        "rate": RATE,
        "kv_tokens": KV_TOKENS,
        "workload": asdict(WORKLOAD),
        "results": results,
    }
    write_report(found, options.output)


if __name__ == "__main__":
    main()
