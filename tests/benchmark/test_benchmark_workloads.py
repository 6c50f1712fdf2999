"""The presets hold what docs/benchmarking.md says, and always the same prompts."""

import pytest

from headrace.benchmark.workloads import PRESETS, make_workloads, preset_names
from headrace.errors import ConfigError

TEXT = list(range(50_000))


def chat(text):
    """One id per character."""
    return list(map(ord, text))


@pytest.fixture(scope="module")
def workloads():
    """Of all presets, with the seed that they have by default."""
    return make_workloads(TEXT, chat).workloads


@pytest.mark.parametrize(
    ("name", "num_requests", "shortest", "longest", "new_tokens", "concurrency"),
    [
        ("A", 5, 128, 128, 256, 1),
        ("B1", 64, 128, 512, 128, 1),
        ("B8", 64, 128, 512, 128, 8),
        ("B32", 64, 128, 512, 128, 32),
        ("C", 64, 1056, 1056, 32, 16),
        ("Ccold", 64, 1056, 1056, 32, 16),
        ("Cspaced", 64, 1056, 1056, 32, 16),
        ("D", 5, 2048, 2048, 1, 1),
        ("D8k", 5, 8000, 8000, 1, 1),
        ("LS", 32, 16, 16, 8, 1),
        ("E", 32, 300, 1100, 256, 1),
        ("R", 32, 600, 1600, 256, 1),
        ("F", 32, 600, 1600, 128, 1),
        ("G", 32, 180, 320, 192, 1),
        ("H", 32, 30, 80, 128, 1),
    ],
)
def test_shapes(workloads, name, num_requests, shortest, longest, new_tokens, concurrency):
    workload = workloads[name]
    lengths = [len(prompt) for prompt in workload.prompts]

    assert len(lengths) == num_requests
    assert shortest <= min(lengths) <= max(lengths) <= longest
    assert workload.preset.answer.max_new_tokens == new_tokens
    assert workload.preset.concurrency == concurrency


def test_one_seed_gives_the_same_prompts_and_another_gives_others():
    first, again, other = (
        make_workloads(TEXT, chat, seed, max_requests=3).workloads["B8"].prompts for seed in (1, 1, 2)
    )
    assert first == again != other


def test_fewer_requests_are_the_first_ones(workloads):
    few = make_workloads(TEXT, chat, max_requests=3).workloads["B8"].prompts
    assert few == workloads["B8"].prompts[:3]


def test_c_shares_its_prefix_and_is_primed_with_a_request_that_is_not_measured(workloads):
    warm, cold, spaced = workloads["C"], workloads["Ccold"], workloads["Cspaced"]

    assert {tuple(prompt[:1024]) for prompt in warm.prompts} == {tuple(warm.priming[0][:1024])}
    assert warm.priming[0] not in warm.prompts
    assert cold.priming == spaced.priming == []
    assert spaced.prompts[0][:1024] not in (warm.prompts[0][:1024], cold.prompts[0][:1024])
    assert cold.prompts[0][:1024] != warm.prompts[0][:1024]


def test_long_and_short_has_long_prompts_beside(workloads):

    assert {len(prompt) for prompt in workloads["LS"].beside} == {8000}
    assert not any(workload.beside for name, workload in workloads.items() if name != "LS")


def test_other_presets_share_no_beginning(workloads):
    prompts = [p for name in ("A", "B1", "B8", "B32", "D", "D8k") for p in workloads[name].prompts]
    assert len({tuple(prompt[:8]) for prompt in prompts}) >= len(prompts) - 1  # two random cuts may meet


def test_tasks_are_whole_texts_and_models_may_end_their_answers(workloads):
    tasks = {name: workloads[name] for name in "ERFGH"}

    def text(name):
        return "".join(map(chr, tasks[name].prompts[0]))

    assert "def " in text("E")
    assert text("E").endswith("```")
    assert text("R").startswith("Correct the spelling")
    assert all(task.preset.answer.ends for task in tasks.values())
    assert [name for name, task in tasks.items() if task.preset.answer.schema is not None] == ["G"]


def test_preset_lists():
    assert preset_names("A, B32,C") == ["A", "B32", "C"]
    generating = [name for name in PRESETS if not PRESETS[name].answer.is_embedding]
    assert preset_names(",".join(generating)) == generating
    assert preset_names("EMB,EMB32") == ["EMB", "EMB32"]
    for bad in ("", "A,Z", "b1", "A,EMB"):
        with pytest.raises(ConfigError, match="--presets"):
            preset_names(bad)
