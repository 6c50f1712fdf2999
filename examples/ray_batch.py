"""Continue every prompt of a dataset, on all nodes of a Ray cluster: Ray Data reads, hands out batches and writes; each actor holds an engine.

pip install 'headrace[ray]'
python examples/ray_batch.py prompts.jsonl replies --replicas 2 --cpus 1

prompts.jsonl has a JSON object with `prompt` on each line; other columns are kept. The folder `replies` gets the same lines with `reply`, in
any order. RAY_ADDRESS names a cluster to use (with RAY_AUTH_MODE=token if it has tokens); without it, Ray runs on this machine. Every node needs
the model.
"""

import argparse
import os
from typing import Any

# Before Ray is imported, which reads them: its ports are closed to whoever lacks its token, and it reports to nobody.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

SAMPLING = {"temperature": 0, "max_new_tokens": 16}


class Replies:
    """One actor: the engine is started once, and used for many batches."""

    def __init__(self, model: str, cpus: int) -> None:
        from headrace import Engine

        self.engine = Engine(model_path=model, num_threads=cpus, max_total_tokens=16384)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The engine computes the prompts of a batch together."""
        replies = self.engine.generate([str(prompt) for prompt in batch["prompt"]], SAMPLING)
        return batch | {"reply": [reply["text"] for reply in replies]}

    def __del__(self) -> None:
        """Called when the dataset is done."""
        self.engine.shutdown()


def main() -> None:
    """Read, generate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a .jsonl file or a folder of them, which every node can read")
    parser.add_argument("replies", help="folder for the results")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=1, help="actors, each with an engine")
    parser.add_argument(
        "--cpus", type=int, default=1, help="CPUs that an actor reserves, and its threads; leave one for reading"
    )
    parser.add_argument("--batch", type=int, default=64, help="prompts that an engine gets at a time")
    args = parser.parse_args()

    ray.init(include_dashboard=None if "RAY_ADDRESS" in os.environ else False)
    prompts = ray.data.read_json(args.prompts, lines=True)
    replies = prompts.map_batches(
        Replies,
        fn_constructor_kwargs={"model": args.model, "cpus": args.cpus},
        compute=ray.data.ActorPoolStrategy(size=args.replicas),
        num_cpus=args.cpus,
        batch_size=args.batch,
    )
    replies.write_json(args.replies)


if __name__ == "__main__":
    main()
