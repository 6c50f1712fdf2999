"""An EAGLE-3 head, trained here: it guesses what its published form says, changes no token, and saves steps."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from engines import (
    FILTERED,
    GREEDY,
    PENALISED,
    SEEDED,
    Case,
    drafts_after_transfer,
    drafts_of,
    ids_after_retraction,
    make_cases,
    one_by_one,
    running_engine,
    running_pair,
    together,
)
from safetensors.torch import save_file
from torch import nn

from headrace.errors import ConfigError, ModelError
from headrace.execution import build_draft, pool_plan
from headrace.execution.drafting import DeviceDraftSteps, DeviceEagleDrafter, DraftSteps, EagleDrafter, Guessed
from headrace.execution.setup import Setup
from headrace.messages.step import MOST_VERIFIED, ModelWorkerBatch
from headrace.sampling import grammar_rows
from headrace.speculative import base

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from device_harness import FakeDevice, queue_on

SIZE, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
NUM_LAYERS, READS = 5, (1, 3, 4)
PROMPTS = [list(range(40 + 7 * k, 52 + 9 * k)) for k in range(6)]
OUTPUT = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


class Reference(nn.Module):
    """The head over a whole sequence, as its published form has it, with the names of its tensors. ids: of the target that it can guess."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(SIZE, eps=1e-5)

        kv = KV_HEADS * HEAD_DIM
        self.ids = ids
        self.fc = linear(3 * SIZE, SIZE)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": norm(),
                "hidden_norm": norm(),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * SIZE, SIZE),
                        "k_proj": linear(2 * SIZE, kv),
                        "v_proj": linear(2 * SIZE, kv),
                        "o_proj": linear(SIZE, SIZE),
                    }
                ),
                "post_attention_layernorm": norm(),
                "mlp": nn.ModuleDict(
                    {"gate_proj": linear(SIZE, 96), "up_proj": linear(SIZE, 96), "down_proj": linear(96, SIZE)}
                ),
            }
        )
        self.norm = norm()
        self.lm_head = linear(SIZE, len(ids))

    def features(self, features: torch.Tensor, next_embeddings: torch.Tensor) -> torch.Tensor:
        """Of the tokens one position further. features, next_embeddings: [n, SIZE]."""
        layer = self.midlayer
        x = torch.cat((layer["input_layernorm"](next_embeddings), layer["hidden_norm"](features)), 1)
        attention = layer["self_attn"]
        q, k, v = (attention[f"{name}_proj"](x).view(len(x), -1, HEAD_DIM).transpose(0, 1) for name in "qkv")
        attended = F.scaled_dot_product_attention(
            rotated(q)[None], rotated(k)[None], v[None], is_causal=True, enable_gqa=True
        )
        residual = features + attention["o_proj"](attended[0].transpose(0, 1).reshape(len(x), SIZE))
        x = layer["post_attention_layernorm"](residual)
        mlp = layer["mlp"]
        return residual + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(features))

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        return own | {"d2t": self.ids - torch.arange(len(self.ids))}


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [heads, n, HEAD_DIM] with positions 0 .. n - 1, halves convention."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Target:
    """The model in transformers."""

    def __init__(self, folder: str) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    @torch.no_grad()
    def streams(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), 3 * SIZE]: before the layers that the head reads."""
        states = self._model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in READS], 1)

    @torch.no_grad()
    def embeddings(self, ids: list[int]) -> torch.Tensor:
        return self._model.get_input_embeddings()(torch.tensor(ids))


def train(head: Reference, target: Target, sequences: list[list[int]]) -> None:
    """On what the target says, for the tokens that the head can guess. Features of its own, as later guesses are made of, are not learnt."""
    places = {token_id: place for place, token_id in enumerate(head.ids.tolist())}
    data = [(target.streams(ids), target.embeddings(ids), ids) for ids in sequences]
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(60):
        losses = []
        for streams, embeddings, ids in data:
            known = [(t, places[ids[t + 2]]) for t in range(len(ids) - 2) if ids[t + 2] in places]
            at, wanted = zip(*known, strict=True)
            logits = head.logits(head.features(head.fc(streams[:-2]), embeddings[1:-1]))
            losses.append(F.cross_entropy(logits[list(at)], torch.tensor(wanted)))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()


@dataclass(frozen=True)
class Trained:
    """A head in a folder, and what it was made of. sequences: prompts with their outputs."""

    folder: str
    head: Reference
    target: Target
    sequences: list[list[int]]


@pytest.fixture(scope="module")
def trained(tiny_deep_model: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    with running_engine(tiny_deep_model, speculative_algorithm="off", dtype="float32") as engine:
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=OUTPUT)
    said = [output["output_ids"] for output in outputs]
    sequences = [prompt + ids for prompt, ids in zip(PROMPTS, said, strict=True)]
    torch.manual_seed(0)
    target, head = Target(tiny_deep_model), Reference(torch.tensor(sorted({i for ids in said for i in ids})))
    train(head, target, sequences)
    folder = tmp_path_factory.mktemp("head")
    save_file(head.tensors() | {"t2d": torch.zeros(1, dtype=torch.bool)}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(head.ids),
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in READS]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Trained(str(folder), head, target, sequences)


@pytest.fixture(autouse=True)
def _always_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not pay."""
    monkeypatch.setattr(base, "worthwhile", lambda chances, counts, times, pass_time: counts)


def guessing(trained: Trained, **options: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "eagle3",
        "speculative_draft_model_path": trained.folder,
        "speculative_num_draft_tokens": 3,
        **options,
    }


def most_likely(logits: torch.Tensor, position: int) -> int:
    return int(logits.argmax())


@torch.no_grad()
def guessed(
    trained: Trained, known: list[int], count: int, choose: Callable[[torch.Tensor, int], int] = most_likely
) -> list[int]:
    """What follows the known tokens, by the reference, which computes everything anew for each guess. choose: an id from logits [1, vocabulary], at
    its position."""
    head, ids = trained.head, list(known)
    features = head.fc(trained.target.streams(known[:-1]))
    for _ in range(count):
        out = head.features(features, trained.target.embeddings(ids[1:]))
        logits = torch.full((1, trained.target.vocab_size), -torch.inf)
        logits[:, head.ids] = head.logits(out[-1:])
        ids.append(choose(logits, len(ids)))
        features = torch.cat((features, out[-1:]))
    return ids[len(known) :]


def test_guesses_are_those_of_the_published_head(
    tiny_deep_model: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every step of a request whose prompt takes several, and of one whose prompt is cached. Of each, the first guess is right."""
    rounds: list[list[tuple[int, int]]] = []
    end, guess = EagleDrafter.end, DraftSteps.guess

    def end_and_begin(self: EagleDrafter, plan: Any, kept: Any) -> None:
        rounds.append([])
        end(self, plan, kept)

    def note(self: DraftSteps, logits: torch.Tensor, seqs: Any, positions: Any) -> Guessed:
        guessed = guess(self, logits, seqs, positions)
        [token_id] = guessed()
        rounds[-1].append((int(positions[0]), token_id))
        return guessed

    monkeypatch.setattr(EagleDrafter, "end", end_and_begin)
    monkeypatch.setattr(DraftSteps, "guess", note)
    options = guessing(trained, dtype="float32", chunked_prefill_size=5)
    with running_engine(tiny_deep_model, **options) as engine:
        for prompt, sequence in [
            *zip(PROMPTS[:2], trained.sequences, strict=False),
            (PROMPTS[0], trained.sequences[0]),
        ]:
            rounds.clear()
            output = engine.generate(input_ids=prompt, sampling_params=OUTPUT)

            assert prompt + output["output_ids"] == sequence
            assert len(rounds) < 40
            for guesses in filter(None, rounds):
                positions, ids = zip(*guesses, strict=True)
                assert list(ids) == guessed(trained, sequence[: positions[0]], len(ids)), positions
            assert output["meta_info"]["spec_accept_length"] > 1.8


def test_answers_are_those_without_a_head(tiny_deep_model: str, trained: Trained) -> None:
    cases = make_cases([1, 130], {"greedy": GREEDY, "seeded": SEEDED, "filtered": FILTERED, "penalised": PENALISED})
    for options in ({}, {"max_total_tokens": 448}, {"attention_backend": "torch_native"}):
        if "attention_backend" in options:
            cases = [case for case in cases if len(case.ids) > 1]
        with running_engine(tiny_deep_model, speculative_algorithm="off", **options) as engine:
            plain = one_by_one(engine, cases)
        with running_engine(tiny_deep_model, **guessing(trained, **options)) as engine:
            assert one_by_one(engine, cases) == plain
            assert together(engine, cases) == plain


# Few ids, so that a draw does not depend on how the attention of the tests rounds.
DRAWN = {**SEEDED, "top_k": 4}
WEARY = {**PENALISED, "top_k": 4}
ON_DEVICE: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch_native",
    "context_length": 256,  # the attention of the tests reads all of it
    "chunked_prefill_size": 16,
}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 4), {}),
        ((1, 4), {"max_total_tokens": 288, "schedule_conservativeness": 0.1}),
        ((), {"disable_overlap_schedule": True}),
    ],
    ids=["graphs", "graphs, retracting", "without graphs"],
)
def test_answers_on_a_device_are_those_without_a_head(
    tiny_deep_model: str,
    trained: Trained,
    sizes: tuple[int, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in chunks, with prompts beside, and where the host samples."""
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)
    cases = [
        Case(f"{name} {n}", [*range(first, first + n)], sampling)
        for name, first, sampling in (("greedy", 50, GREEDY), ("drawn", 500, DRAWN))
        for n in (1, 23, 120)
    ]
    by_host = [
        Case("penalised", [*range(50, 70)], WEARY),
        Case("constrained", [*range(50, 60)], {**DRAWN, "regex": "[a-z ]{6,20}"}),
    ]
    with running_engine(tiny_deep_model, speculative_algorithm="off", **ON_DEVICE) as engine:
        plain = one_by_one(engine, cases + by_host)
    device = FakeDevice()
    waits = queue_on(device, monkeypatch, sizes)
    with running_engine(tiny_deep_model, **guessing(trained, **(ON_DEVICE | options))) as engine:
        found = together(engine, cases)
        assert sum(waits) == 0
        found |= one_by_one(engine, by_host)
        assert found == plain
        assert together(engine, cases + by_host) == plain
        state = engine.internal_state()
    assert ("max_total_tokens" in options) == (state.num_retracted > 0)
    assert (device.num_replays > 0) == bool(sizes)


@pytest.mark.parametrize("chunk", [5, 512], ids=["chunks", "whole prompts"])
def test_guesses_on_a_device_are_those_of_the_published_head(
    tiny_deep_model: str, trained: Trained, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, alone and beside others, with a cached prompt, after an abort and after being set back."""
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)
    num_guesses = 0
    begin, guess = DeviceEagleDrafter.begin, DeviceDraftSteps.guess
    of_step: dict[int, dict[int, int]] = {}

    def note(self: DeviceDraftSteps, logits: torch.Tensor, seqs: Any, positions: Any) -> Guessed:
        found = guess(self, logits, seqs, positions)
        for seq, position, token_id in zip(seqs.tolist(), positions.tolist(), found(), strict=True):
            of_step.setdefault(seq, {})[position] = token_id
        return found

    def compare(self: DeviceEagleDrafter, plan: ModelWorkerBatch) -> None:
        nonlocal num_guesses
        of_step.clear()
        begin(self, plan)
        steps, promised = self._steps, plan.num_logits - 1
        assert {seq: len(ids) for seq, ids in of_step.items()} == {
            seq: count for seq, count in zip(plan.seqs.tolist(), promised.tolist(), strict=True) if count > 0
        }
        for seq, ids in of_step.items():
            known = steps._table.tokens[seq, : min(ids)].tolist()
            want = guessed(
                trained,
                known,
                len(ids),
                lambda logits, position, seq=seq: int(steps._drawn(logits, np.array([seq]), np.array([position]))[0]),  # type: ignore[misc]
            )
            assert list(ids) == list(range(len(known), len(known) + len(ids)))
            assert list(ids.values()) == want, (seq, known)
            num_guesses += len(ids)

    monkeypatch.setattr(DeviceDraftSteps, "guess", note)
    monkeypatch.setattr(DeviceEagleDrafter, "begin", compare)
    queue_on(FakeDevice(), monkeypatch)
    sampling = [
        *({**OUTPUT, "max_new_tokens": count} for count in (25, 20, 9)),
        *(DRAWN, {**DRAWN, "regex": "[a-z ]{10,40}"}, WEARY),
    ]
    options = guessing(trained, **(ON_DEVICE | {"chunked_prefill_size": chunk}))
    with running_engine(tiny_deep_model, **options) as engine:
        for _ in range(2):
            output = engine.generate(input_ids=PROMPTS[0], sampling_params={**OUTPUT, "max_new_tokens": 30})
            assert PROMPTS[0] + output["output_ids"] == trained.sequences[0][: len(PROMPTS[0]) + 30]
            assert output["meta_info"]["spec_accept_length"] > 1.8
        assert num_guesses > 30
        stream = engine.generate(input_ids=[*range(300, 320)], sampling_params=OUTPUT, stream=True)
        next(stream)
        stream.close()
        beside = engine.generate(input_ids=PROMPTS, sampling_params=sampling)
        again = ids_after_retraction(engine, PROMPTS, sampling)

    assert [output["output_ids"] for output in beside] == again
    assert num_guesses > 150


def test_the_kv_cache_leaves_room_for_the_streams_that_the_head_reads(
    tiny_deep_model: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    budget = pool_plan.kv_token_budget

    def note(**facts: Any) -> Any:
        reserved.append(facts["reserved_bytes"])
        return budget(**facts)

    monkeypatch.setattr(pool_plan, "kv_token_budget", note)
    for size in (64, 128):
        options = guessing(trained, max_total_tokens=None, max_running_requests=2, chunked_prefill_size=size)
        with running_engine(tiny_deep_model, **options):
            pass

    small, large = reserved
    own = 4 * SIZE + 2 * (HEADS + KV_HEADS) * HEAD_DIM + 3 * 96
    assert large - small > 64 * 4 * (own + 3 * SIZE)


def test_the_kv_cache_leaves_room_for_what_a_head_on_a_device_keeps(
    tiny_deep_model: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    planned: list[int] = []
    reserved: list[int] = []
    budget, init, kept_bytes = pool_plan.kv_token_budget, DeviceEagleDrafter.__init__, build_draft._kept_bytes

    def note_budget(**facts: Any) -> Any:
        reserved.append(facts["reserved_bytes"])
        return budget(**facts)

    def note_drafter(self: DeviceEagleDrafter, *arguments: Any) -> None:
        init(self, *arguments)
        kept.append(self._features.nbytes + self._target._kept.nbytes)

    def note_plan(target: Setup) -> int:
        planned.append(kept_bytes(target))
        return planned[-1]

    monkeypatch.setattr(pool_plan, "kv_token_budget", note_budget)
    monkeypatch.setattr(DeviceEagleDrafter, "__init__", note_drafter)
    monkeypatch.setattr(build_draft, "_kept_bytes", note_plan)
    queue_on(FakeDevice(), monkeypatch)
    for most in (1, 5):
        options = ON_DEVICE | {
            "max_total_tokens": None,
            "max_running_requests": 3,
            "speculative_num_draft_tokens": most,
        }
        with running_engine(tiny_deep_model, **guessing(trained, **options)):
            pass

    assert planned == kept
    assert reserved[1] - reserved[0] == kept[1] - kept[0] == 3 * 4 * SIZE * 4
    assert kept[0] == (3 * MOST_VERIFIED + 3 * 2) * SIZE * 4


def test_a_head_lets_its_memory_go_with_the_models_and_guesses_on(tiny_deep_model: str, trained: Trained) -> None:
    with running_engine(tiny_deep_model, **guessing(trained, dtype="float32")) as engine:
        before = engine.generate(input_ids=PROMPTS[0], sampling_params=OUTPUT)
        text = engine.release_memory_occupation(["weights"])[1]
        weight_bytes = engine.get_server_info()["weight_bytes"]
        engine.resume_memory_occupation()
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation()
        after = engine.generate(input_ids=PROMPTS[0], sampling_params=OUTPUT)

    assert int(text.split()[0]) > weight_bytes + 4 * SIZE * 96
    assert after["output_ids"] == before["output_ids"]
    assert drafts_of(after) == drafts_of(before)


@pytest.mark.usefixtures("patient")
def test_kv_of_a_head_comes_with_that_of_the_prompt(
    tiny_deep_model: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another server: every guess is that of one server. Where that server has no head, some are others."""
    guesses: dict[int, list[tuple[list[int], list[int]]]] = {}
    guess = DraftSteps.guess

    def note(self: DraftSteps, logits: torch.Tensor, seqs: Any, positions: Any) -> Guessed:
        found = guess(self, logits, seqs, positions)
        guesses.setdefault(id(self), []).append((positions.tolist(), found()))
        return found

    monkeypatch.setattr(DraftSteps, "guess", note)
    own, off = guessing(trained), {"speculative_algorithm": "off"}
    with running_engine(tiny_deep_model, **own) as alone:
        for prefill in (own, off):
            guesses.clear()
            with running_pair(tiny_deep_model, prefill, own) as pair:
                got, want = drafts_after_transfer(pair, alone, PROMPTS, 40)
            of_decode, of_one = (
                made for made in guesses.values() if len(made) > len(PROMPTS)
            )  # not after prefill's tokens
            assert (of_decode == of_one) == (prefill is own)
            assert got == want or prefill is off
            assert want[2] > 50


def test_a_head_that_does_not_fit_is_refused(
    tiny_model: str, tiny_deep_model: str, trained: Trained, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError, match=r"--speculative-draft-model-path: a head that reads before layers \(1, 3, 4\)"
    ):
        running_engine(tiny_model, **guessing(trained)).__enter__()
    with pytest.raises(ModelError, match="a head for hidden states of 64 elements; the model's have 576"):
        running_engine("smollm2", **guessing(trained)).__enter__()
    broken = tmp_path / "head"
    shutil.copytree(trained.folder, broken)
    save_file(
        trained.head.tensors() | {"d2t": torch.full((len(trained.head.ids),), 60000)}, broken / "model.safetensors"
    )
    with pytest.raises(ModelError, match="d2t gives ids that the model's 49152 tokens do not have"):
        running_engine(tiny_deep_model, **guessing(trained, speculative_draft_model_path=str(broken))).__enter__()
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    with pytest.raises(ConfigError, match=r"cpu cannot serve the head .*multiple of 16, not 8.*--attention-backend"):
        running_engine(tiny_deep_model, **guessing(trained, speculative_draft_model_path=str(broken))).__enter__()
    with pytest.raises(ConfigError, match="cannot be combined with --enable-torch-compile"):
        running_engine(tiny_model, **guessing(trained, enable_torch_compile=True)).__enter__()
