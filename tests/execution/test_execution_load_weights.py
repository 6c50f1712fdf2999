"""Loading: each tensor once, and refusals that name what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from runner_harness import save_llama
from safetensors.torch import load_file, save_file

from headrace.checkpoint.source import dummy_checkpoint, open_checkpoint
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ModelError
from headrace.execution import setup
from headrace.execution.build import build_worker
from headrace.execution.load_weights import load_model
from headrace.execution.model_source import open_model
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for

PLACEMENT = Placement(torch.device("cpu"), torch.float32, 96)


def load(folder: Path, **options):
    checkpoint = open_checkpoint(folder)
    return load_model(checkpoint, model_class_for(checkpoint.config), PLACEMENT, **options)


def edit(folder: Path, change) -> None:
    """Rewrite the checkpoint in `folder` after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_progress_counts_every_byte_once(tmp_path: Path):
    model = save_llama(tmp_path)
    seen: list[tuple[int, int]] = []

    load(tmp_path, progress=lambda done, total: seen.append((done, total)))

    total = 4 * sum(p.numel() for p in model.parameters())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.update(stray=torch.ones(3)), r"no place for: stray"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            r"model\.norm\.weight is \[31\] but the config makes it \[32\]",
        ),
        (lambda t: [t.pop(name) for name in list(t) if "layers.0" in name], r"9 missing: .*, \.\.\."),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change, message: str):
    save_llama(tmp_path)
    edit(tmp_path, change)

    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_rotary_buffers_and_a_tied_output_projection_may_be_in_the_file(tmp_path: Path):
    save_llama(tmp_path, tie_word_embeddings=True)
    edit(
        tmp_path,
        lambda t: t.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
            }
        ),
    )

    model = load(tmp_path)

    hidden = torch.randn(2, 32)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(model.logits(hidden), hidden @ embedding.T)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path):
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = dummy_checkpoint(tmp_path)

    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = load_model(checkpoint, model_class_for(checkpoint.config), PLACEMENT, seed=seed)
        return {weight.name: weight.read() for weight in model.weights()}

    first, again, other = weights(1), weights(1), weights(2)

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(first["model.norm.weight"], torch.ones(32))


def test_load_format_dummy_needs_only_the_config(tmp_path: Path):
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    worker, info = build_worker(
        ServerArgs(model_path=str(tmp_path), load_format="dummy", max_total_tokens=96, max_running_requests=2)
    )
    worker.close()

    assert info.weight_bytes > 0


def test_a_load_format_that_is_not_the_files_is_refused(tmp_path: Path):
    save_llama(tmp_path)

    with pytest.raises(ModelError, match="gguf"):
        open_model(ServerArgs(model_path=str(tmp_path), load_format="gguf"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"json_model_override_args": "[1]"}, ConfigError),
        ({"json_model_override_args": '{"num_hidden_layers": 0}'}, ModelError),
        ({"json_model_override_args": '{"num_hidden_layers": 3}'}, ModelError),
        ({"context_length": 97}, ConfigError),
        ({"dtype": "float16"}, ConfigError),
        ({"max_total_tokens": 15, "page_size": 16}, ConfigError),
        ({"mem_fraction_static": 1e-9}, ConfigError),
        ({"custom_logit_processors": "nonsense"}, ConfigError),
    ],
)
def test_options_that_cannot_work_refuse_to_start(tmp_path: Path, options, error):
    save_llama(tmp_path)

    with pytest.raises(error):
        build_worker(ServerArgs(model_path=str(tmp_path), **options))


def test_overrides_change_the_config_that_is_built(tmp_path: Path):
    save_llama(tmp_path)
    changes = json.dumps({"max_position_embeddings": 64})

    worker, info = build_worker(
        ServerArgs(model_path=str(tmp_path), json_model_override_args=changes, max_running_requests=1)
    )
    worker.close()

    assert info.context_length == 64


@pytest.mark.parametrize(("disable_native_kernels", "later"), [(False, 1), (True, 2)])
def test_weights_are_packed_by_one_thread_of_torch(
    tmp_path: Path, monkeypatch, disable_native_kernels: bool, later: int
):
    save_llama(tmp_path)
    before, while_loading = torch.get_num_threads(), []

    def load_and_look(*args, **options):
        while_loading.append(torch.get_num_threads())
        return load_model(*args, **options)

    monkeypatch.setattr(setup, "load_model", load_and_look)
    options = {"max_total_tokens": 96, "max_running_requests": 2, "num_threads": 2}

    worker, _ = build_worker(
        ServerArgs(model_path=str(tmp_path), disable_native_kernels=disable_native_kernels, **options)
    )
    running = torch.get_num_threads()
    worker.close()
    torch.set_num_threads(before)

    assert (while_loading, running) == ([1], later)
