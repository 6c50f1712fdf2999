"""Reinforcement learning with rollouts by an Engine: a tiny policy learns to write words with many letters `e`.

    python examples/rl_rollout.py                    # weights go to the engine as tensors
    python examples/rl_rollout.py --sync distributed # over a process group, from this process to the engine's
    python examples/rl_rollout.py --plot rewards.svg

One step: the engine samples `--samples` answers to each prompt; each is rewarded; the policy gets one step of REINFORCE with the mean
reward of its group as baseline (as GRPO does, Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, without clipping, since the samples
are always fresh); the new weights go to the engine. After every sync the engine's and the trainer's logprobs of the same tokens are
compared. The policy is a Llama of two layers with random weights and the tokenizer of smollm2, so nothing is downloaded.
"""

import argparse
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import headrace
from headrace.checkpoint.names import resolve_model
from headrace.text.tokenizers import Tokenizer, load_tokenizer
from headrace.weight_sync.sender import WeightSender, describe

LOGPROB_TOLERANCE = 2e-3
"""Largest difference between the trainer's and the engine's logprob of a token. Both compute in float32, but add in another order:
differences of 1e-5 are usual; wrong or stale weights give differences of 0.1 and more."""

VOCABULARY = 512
"""Only so many of the tokenizer's ids exist in the policy: a small output layer trains fast."""

Sync = Callable[[list[tuple[str, torch.Tensor]], str], None]


@dataclass(frozen=True)
class Rollout:
    """One sampled answer. logprobs: of `output_ids`, by the engine."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    reward: float


def make_policy(folder: Path, tokenizer: Tokenizer, seed: int) -> transformers.LlamaForCausalLM:
    """A random policy, saved to `folder` with its tokenizer as an engine loads it."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    policy = transformers.LlamaForCausalLM(config).to(torch.float32)
    policy.save_pretrained(folder)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    return policy


def reward_of(text: str) -> float:
    """Share of the characters that are an `e`."""
    return text.count("e") / max(1, len(text))


def sample(
    engine: headrace.Engine, tokenizer: Tokenizer, prompts: list[list[int]], samples: int, new_tokens: int, seed: int
) -> list[list[Rollout]]:
    """A group of answers to each prompt."""
    sampling = {"n": samples, "temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True, "seed": seed}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    rollouts = []
    for index, output in enumerate(outputs):
        ids = output["output_ids"]
        logprobs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        rollouts.append(Rollout(prompts[index // samples], ids, logprobs, reward_of(tokenizer.decode(ids))))
    return [rollouts[start : start + samples] for start in range(0, len(rollouts), samples)]


def policy_logprobs(policy: transformers.LlamaForCausalLM, rollouts: list[Rollout]) -> torch.Tensor:
    """[len(rollouts), new_tokens]: the trainer's logprob of every sampled token. All prompts have one length."""
    ids = torch.tensor([rollout.prompt_ids + rollout.output_ids for rollout in rollouts])
    num_prompt = len(rollouts[0].prompt_ids)
    logits = policy(ids).logits[:, num_prompt - 1 : -1]
    chosen = ids[:, num_prompt:, None]
    logprobs: torch.Tensor = torch.log_softmax(logits, dim=-1).gather(2, chosen).squeeze(2)
    return logprobs


def learn(
    policy: transformers.LlamaForCausalLM, optimizer: torch.optim.Optimizer, groups: list[list[Rollout]]
) -> float:
    """One step of the optimizer. Returns the largest difference between the engine's logprobs and the trainer's, before it."""
    rollouts = [rollout for group in groups for rollout in group]
    advantages = []
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group])
        advantages.append((rewards - rewards.mean()) / (rewards.std() + 1e-4))
    logprobs = policy_logprobs(policy, rollouts)
    difference = (logprobs.detach() - torch.tensor([rollout.logprobs for rollout in rollouts])).abs().max()
    loss = -(torch.cat(advantages)[:, None] * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(difference)


def tensor_sync(engine: headrace.Engine) -> Sync:
    """Weights go as tensors, in memory that both processes see."""

    def sync(named: list[tuple[str, torch.Tensor]], version: str) -> None:
        success, message = engine.update_weights_from_tensor(named, weight_version=version)
        if not success:
            raise RuntimeError(message)

    return sync


def distributed_sync(engine: headrace.Engine) -> Sync:
    """Weights are broadcast to the engine's process, all of them as one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def meanwhile(call: Callable[[], tuple[bool, str]], own: Callable[[], Any]) -> Any:
        """Run both sides of a collective call."""
        results: list[tuple[bool, str]] = []
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        mine = own()
        thread.join()
        if not results or not results[0][0]:
            raise RuntimeError(results[0][1] if results else "the engine did not answer")
        return mine

    sender = meanwhile(
        lambda: engine.init_weights_update_group("127.0.0.1", port, 1, 2, timeout_s=30.0),
        lambda: WeightSender("127.0.0.1", port, 2, timeout_s=30.0),
    )

    def sync(named: list[tuple[str, torch.Tensor]], version: str) -> None:
        meanwhile(
            lambda: engine.update_weights_from_distributed(*describe(named), bucketed=True, weight_version=version),
            lambda: sender.send(named, bucketed=True),
        )

    return sync


def run(args: argparse.Namespace) -> list[float]:
    """Train; mean reward of each step."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    rewards: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder), tokenizer, args.seed)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
        prompts = [[100 + i, 200 + i, 300 + i] for i in range(args.prompts)]
        with headrace.Engine(
            model_path=folder,
            dtype="float32",
            max_total_tokens=16384,
            num_threads=1,
            single_process=args.single_process,
        ) as engine:
            sync = distributed_sync(engine) if args.sync == "distributed" else tensor_sync(engine)
            for step in range(args.steps):
                begin = time.perf_counter()
                groups = sample(engine, tokenizer, prompts, args.samples, args.new_tokens, seed=1000 * step)
                sampled = time.perf_counter()
                # These rollouts were made with the weights of the last sync: the comparison checks that sync.
                difference = learn(policy, optimizer, groups)
                if difference > LOGPROB_TOLERANCE:
                    raise RuntimeError(
                        f"step {step}: the engine's logprobs differ from the trainer's by {difference:g}"
                    )
                learned = time.perf_counter()
                sync([(name, tensor.detach()) for name, tensor in policy.named_parameters()], str(step + 1))
                synced = time.perf_counter()
                rewards.append(sum(r.reward for group in groups for r in group) / (args.prompts * args.samples))
                bar = "#" * round(60 * rewards[-1])
                print(
                    f"step {step:3}  reward {rewards[-1]:.3f} {bar:<30} sample {sampled - begin:.2f} s  learn {learned - sampled:.2f} s  "
                    f"sync {1000 * (synced - learned):.0f} ms  logprobs differ by {difference:.1e}",
                    flush=True,
                )
    return rewards


def plot(rewards: list[float], path: str) -> None:
    """Reward by step, as SVG or PNG by the name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(rewards)
    axes.set(xlabel="step", ylabel="mean reward", title="Share of the letter e in sampled text")
    figure.savefig(path)


def options() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description="Reinforcement learning with rollouts by a Headrace Engine.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", choices=("tensor", "distributed"), default="tensor")
    parser.add_argument("--single-process", action="store_true", help="the engine in threads of this process")
    parser.add_argument("--plot", help="file for a plot of the rewards")
    return parser


def main() -> None:
    """Train, and say whether the reward rose."""
    args = options().parse_args()
    rewards = run(args)
    if args.plot:
        plot(rewards, args.plot)
    quarter = max(1, len(rewards) // 4)
    first, last = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    print(f"mean reward: first quarter {first:.3f}, last quarter {last:.3f}")
    if last <= first:
        raise SystemExit("the reward did not rise")


if __name__ == "__main__":
    main()
