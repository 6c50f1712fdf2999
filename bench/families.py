"""Try every causal language model that transformers knows: does it give transformers' logits here, or is it refused, and in which words?

    .venv/bin/python -m bench.families [MODEL_TYPE ...] [--markdown]

For each type a random checkpoint of toy size is made in a temporary folder, and an engine is started with it as `headrace serve` does (on CPU,
float32; families of ours also with `--model-impl transformers`). Its logprobs over a prompt, whole and token by token, are compared with those of
transformers. Every type runs in a process of its own. `--markdown` prints the table of docs/models.md. The exit code is 1 when a type gives other
logits or an error that is no refusal.
"""

import dataclasses
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from bench.program import parser_of
from headrace.api.engine import Engine
from headrace.checkpoint.families import check_family, native_types
from headrace.errors import HeadraceError

POSITIONS = 160
VOCAB = 199
TOLERANCE = 1e-3
LIMIT_S = 400
PROMPT_TOKENS = 70

# Every field of a config that has one of these names gets this value; what a family spells in its own way is in _OWN.
_NAMES: tuple[tuple[Any, str], ...] = (
    (VOCAB, "vocab_size unpadded_vocab_size n_token n_words vocab_size_per_layer_input"),
    (POSITIONS, "max_position_embeddings n_positions max_seq_len model_max_length context_length"),
    (64, "hidden_size n_embd d_model emb_dim embedding_size word_embed_proj_dim"),
    (96, "intermediate_size n_inner ffn_dim decoder_ffn_dim d_inner ffn_hidden_size dff"),
    (48, "expert_ffn_hidden_size moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size"),
    (48, "prefix_dense_intermediate_size encoder_ffn_dim"),
    (4, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    (4, "encoder_attention_heads swa_num_attention_heads index_n_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    (16, "head_dim swa_head_dim kv_channels attention_head_dim global_head_dim index_head_dim"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_k moe_topk num_experts_per_token top_k_experts"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank hidden_size_per_layer_input"),
    (16, "linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (4, "linear_num_key_heads linear_num_value_heads linear_num_heads"),
    (21, "sliding_window sliding_window_size window_size attention_window_size"),
    (128, "mamba_d_ssm lru_width"),
    (8, "mamba_n_heads n_mamba_heads mamba_num_heads rotary_dim"),
    (16, "mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size mamba_head_dim"),
    (512, "index_topk"),
    (0, "num_kv_shared_layers pad_token_id"),
    (1, "bos_token_id decoder_start_token_id"),
    (2, "eos_token_id"),
    (True, "is_decoder"),
)
_SIZES = {name: value for value, names in _NAMES for name in names.split()}
_DBRX_EXPERTS = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "intermediate_size": None},
    "gemma3": {"mm_tokens_per_image": 49},
    "gpt2": {"n_inner": None},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": _DBRX_EXPERTS},
    "falcon": {"new_decoder_architecture": True},
    "gemma3n_text": {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    "opt": {"activation_function": "relu"},
    "xlnet": {"d_inner": 96},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"head_dim": 16, "num_heads": 8, "expand": 2},
}
_NESTED = ("text_config", "decoder", "decoder_config")

Outcome = Literal["runs", "refused", "differs", "error", "not tried"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one type. detail: the refusal, the error, or the largest difference."""

    model_type: str
    outcome: Outcome
    detail: str


def _sizes(config_class: Any, model_type: str) -> dict[str, Any]:
    """Those of a transformers config of toy size."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    changes = {name: value for name, value in _SIZES.items() if name in fields}
    if "qk_rope_head_dim" in fields:
        changes.pop("head_dim", None)  # derived from the parts of a head, of which each query head has its own
        changes.pop("index_head_dim", None)
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    for name in _NESTED:
        inner: Any = config_class.sub_configs.get(name)
        if name in fields and inner is not None and dataclasses.is_dataclass(inner):
            changes[name] = _sizes(inner, config_class.sub_configs[name].model_type)
    return changes | _OWN.get(model_type, {})


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that every part of the model matters."""
    generator = torch.Generator().manual_seed(0)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor.data + 0.2 * noise


def difference_of(folder: Path, tokens: list[int], want: torch.Tensor, **options: Any) -> float:
    """The largest difference from the logprobs `want` [tokens, vocabulary], of the most likely tokens after each of these, relative to the largest.

    Ours are from an engine that is started as a server's is.
    """
    with Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        single_process=True,
        skip_tokenizer_init=True,
        num_threads=1,
        max_total_tokens=POSITIONS,
        disable_radix_cache=True,
        attention_backend="torch_native",
        log_level="error",
        **options,
    ) as engine:
        # The logprobs of a prompt are of the tokens before: one token more shows those after the last.
        asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": VOCAB}
        answer = engine.generate(input_ids=[*tokens, tokens[0]], sampling_params={"max_new_tokens": 0}, **asked)
    rows = zip(want, answer["meta_info"]["input_top_logprobs"][1:], strict=True)
    differences = torch.tensor([logprob - float(row[token_id]) for row, top in rows for logprob, token_id, _ in top])
    return float(differences.abs().max() / want.abs().max())  # NaN if one of them is


def attempt(model_type: str, folder: Path) -> Result:
    """Make, open and compare one type."""
    try:
        check_family(model_type, "config.json")
    except HeadraceError as error:
        return Result(model_type, "refused", error.message)
    try:
        config_class = transformers.CONFIG_MAPPING[model_type]
        config = config_class(**_sizes(config_class, model_type))
        kind = transformers.AutoModelForCausalLM
        reference = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
        randomise(reference)
        reference.eval().save_pretrained(folder)
        tokens = torch.randint(3, VOCAB, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
        with torch.inference_mode():
            want = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    except Exception as error:  # whatever a family's own code does with a toy config
        return Result(model_type, "not tried", f"{type(error).__name__}: {error}")
    try:
        ways: list[dict[str, Any]] = [{"chunked_prefill_size": 1}, {}]
        if model_type in native_types():
            ways.append({"model_impl": "transformers"})
        for options in ways:
            difference = difference_of(folder, tokens, want, **options)
            if not difference < TOLERANCE:
                return Result(model_type, "differs", f"{difference:.2g} with {options}")
    except HeadraceError as error:
        return Result(model_type, "refused", error.message.replace(folder.name, "model"))
    except Exception as error:  # what should have been a refusal
        return Result(model_type, "error", f"{type(error).__name__}: {error}")
    return Result(model_type, "runs", f"{difference:.1g}")


def in_a_process(model_type: str) -> Result:
    """`attempt` in a child, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=lambda: sender.send(attempt(model_type, Path(folder))))
        child.start()
        sender.close()
        made = Path(folder, "model.safetensors")
        try:
            slow = not receiver.poll(LIMIT_S)
            result: Result = Result(model_type, "error", "it hangs") if slow else receiver.recv()
        except EOFError:
            result = Result(model_type, "error", "the process died")
        if result.outcome == "error" and not made.exists():
            result = Result(model_type, "not tried", "its toy model is too large")
        child.kill()
        child.join()
    return result


def markdown(results: list[Result]) -> str:
    """The table of docs/models.md: families by what became of them, refused ones by the reason."""
    groups: dict[str, list[str]] = {}
    for result in results:
        reason = {"runs": "**runs**", "refused": _reason(result)}.get(result.outcome, f"*{result.outcome}*")
        groups.setdefault(reason, []).append(f"`{result.model_type}`")

    def place(reason: str) -> tuple[bool, bool, int, str]:
        return reason != "**runs**", reason.startswith("*"), -len(groups[reason]), reason

    rows = [f"| {reason} | {', '.join(groups[reason])} |" for reason in sorted(groups, key=place)]
    return "\n".join(["| | families |", "|---|---|", *rows])


def _reason(result: Result) -> str:
    """Of a refusal, in the words that all families share: without the type, with N in place of numbers."""
    named = rf"model.type '?{result.model_type}\S* (cannot be served: |is not supported: )?"
    detail = " ".join(result.detail.split())
    return re.sub(r"\d+", "N", re.sub(rf"^config\.json: |^model: |{named}|\. Supported are .*", "", detail))


def main() -> int:
    """Print one line a type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = parser_of(__doc__, output=False)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = []
    for model_type in args.model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        result = in_a_process(model_type)
        results.append(result)
        if not args.markdown:
            print(f"{model_type:26} {result.outcome:9} {' '.join(result.detail.split())}", flush=True)
    if args.markdown:
        print(markdown(results))
    return int(any(result.outcome in ("differs", "error") for result in results))


if __name__ == "__main__":
    sys.exit(main())
