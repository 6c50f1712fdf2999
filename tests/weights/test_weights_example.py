"""The example of reinforcement learning, in short: the reward rises, and the comparison of logprobs notices stale weights."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "rl_rollout.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("rl_rollout", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_rollout"] = module
    spec.loader.exec_module(module)
    return module


def options(example, *more):
    words = [
        "--steps",
        "8",
        "--prompts",
        "2",
        "--samples",
        "16",
        "--new-tokens",
        "12",
        "--learning-rate",
        "0.01",
        "--single-process",
    ]
    return example.options().parse_args([*words, *more])  # fmt: skip


@pytest.mark.parametrize("sync", ["tensor", "distributed"])
def test_the_reward_rises(sync, example, capsys):
    rewards = example.run(options(example, "--sync", sync))
    assert sum(rewards[-2:]) > 1.5 * sum(rewards[:2])
    assert "logprobs differ by" in capsys.readouterr().out


def test_stale_weights_are_noticed(example, monkeypatch):
    monkeypatch.setattr(example, "tensor_sync", lambda engine: lambda named, version: None)
    with pytest.raises(RuntimeError, match="logprobs differ"):
        example.run(options(example))
