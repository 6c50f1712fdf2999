"""Model types that cannot be served are refused by their name, in one line and before torch is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.checkpoint import families
from headrace.checkpoint.families import check_family, native_types
from headrace.checkpoint.model_config import parse_hf_config
from headrace.errors import ModelError

TABLE = Path(__file__).parents[2] / "docs" / "models.md"


def rows() -> dict[str, list[str]]:
    """The table of families in the docs: types by what became of them."""
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| .* \| `", line)]
    return {line.split(" | ")[0][2:]: re.findall(r"`([^`]+)`", line.split(" | ")[1]) for line in lines}


def test_every_family_that_runs_passes():
    running = rows()["**runs**"]
    assert len(running) > 50
    for model_type in [*running, *native_types()]:
        check_family(model_type, "config.json")


def test_the_needs_are_those_of_the_docs():
    refused = {reason: names for reason, names in rows().items() if reason.startswith("it needs ")}
    assert {f"it needs {need}": sorted(names.split()) for need, names in families._NEEDS.items()} == refused


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gpt_oss", "it needs attention sinks"),
        ("mamba2", "it needs a state"),
        ("nonesuch", "neither Headrace nor transformers has a causal language model"),
        ("t5", "neither Headrace nor transformers has a causal language model"),
    ],
)
def test_a_config_is_refused_in_one_line_without_torch(model_type: str, why: str):
    program = (
        "import sys; from headrace.checkpoint.model_config import parse_hf_config\n"
        "from headrace.errors import ModelError\n"
        f"try: parse_hf_config({{'model_type': {model_type!r}}})\n"
        "except ModelError as error: print(error.message)\n"
        "print(*{'torch', 'transformers'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    line, imported = done.stdout.splitlines()
    assert line.startswith(f"config.json: model type '{model_type}' is not supported: {why}")
    assert "qwen3_moe" in line
    assert "docs/models.md" in line
    assert imported == ""


ATTENDS = {
    "granitemoehybrid": {"layer_types": ["attention", "attention"]},
    "minimax": {"layer_types": ["full_attention", "full_attention"]},
    "lfm2": {"full_attn_idxs": [0, 1]},
    "bamba": {"attn_layer_indices": [0, 1]},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "nemotron_h": {"layers_block_type": ["attention", "attention"]},
    "qwen3_next": {"full_attention_interval": 1},
}


@pytest.mark.parametrize("model_type", ATTENDS)
def test_a_hybrid_family_is_refused_for_what_its_config_says_and_not_for_its_name(model_type: str):
    config = {"num_hidden_layers": 2, **ATTENDS[model_type]}
    check_family(model_type, "config.json", config)

    mixed = {"layer_types": ["mamba", "attention"]}, {"layer_types": ["attention"]}, {"attn_layer_period": 2}, {}
    for other in mixed:
        with pytest.raises(ModelError, match="it needs a state"):
            check_family(model_type, "config.json", {"num_hidden_layers": 2, **other})
    # What keeps other families from being served does not depend on the kinds of their layers.
    with pytest.raises(ModelError, match="it needs attention sinks"):
        check_family("gpt_oss", "config.json", config)


def test_the_list_is_that_of_transformers():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    assert families._transformers_types() == NAMES.keys() | {
        name for names in NAMES.values() for name in ([names] if isinstance(names, str) else names)
    }


def test_a_checkpoint_with_code_of_its_own_is_told_that_it_is_not_run():
    with pytest.raises(ModelError, match="the checkpoint's own code is not run"):
        parse_hf_config({"model_type": "custom", "auto_map": {"AutoModelForCausalLM": "modeling.Custom"}})


def test_names_that_are_no_names_are_refused_in_one_line():
    for name in ("a\nb", "x" * 1000, "LlamaConfig2"):
        with pytest.raises(ModelError) as refused:
            parse_hf_config({"model_type": name})
        assert "\n" not in refused.value.message
        assert len(refused.value.message) < 400
