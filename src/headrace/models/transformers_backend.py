"""Any other causal language model: the transformers implementation with our attention and our linear layers.

Plugs into transformers' attention interface, through which a model hands us q, k and v of each layer. All tokens of a step go through the model as
one sequence of batch size 1; positions tell them apart. Architectures whose attention does not go through the interface, or does something that ours
does not, are refused. Attention and linear layers are batch-invariant here too, but what transformers computes between them is plain torch: the last
bits of a row may depend on the rows beside it. transformers is imported when a model is built. Runs in the thread that runs the model.
"""

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from headrace.attention.base import AttentionLayerSpec, OwnRows, ReadTokens, StepAttention
from headrace.checkpoint.config_keys import transformers_config
from headrace.checkpoint.model_config import ModelConfig
from headrace.errors import ModelError
from headrace.layers.linear import Linear
from headrace.layers.logits import Peaks, peaks_of
from headrace.layers.mlp import ExpertCounts
from headrace.layers.weight import Keeper, Placement, Weight
from headrace.models.spec import CausalLM, ModelSpec
from headrace.models.transformers_names import ExpertStack, Parameter, read_names, stacking_of

_INTERFACE = "headrace"
_STATEFUL = re.compile(
    "Mamba|SSM|ShortConv|Recurren|DeltaNet|DeltaRule|LinearAttention|LightningAttention|LSTM|RGLRU|Rwkv"
)
"""In names of modules that keep a state of their own from token to token."""

_IGNORED = (
    *("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "attn.bias", "attn.masked_bias"),
    *("vision_tower.", "multi_modal_projector.", "audio_tower."),
)
_EXTRAS = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "a bias by distance (ALiBi)",
    "head_mask": "a mask of heads",
}
_SAME = 1e-3  # far above what the other row of a batch does to the last bits, far below what any mixing of rows does
_ROUTERS = ("gate", "router", "shared_expert_gate")  # names of linear layers that choose experts


class _Step:
    """What the attention function, which transformers calls, needs to know of the step. Every module of the model holds it."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.masks_slide = False
        self.attention: StepAttention
        self.layers_called: list[int] = []


class _LinearModule(nn.Module):
    def __init__(self, linear: Linear, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.in_features = linear.in_size
        self.out_features = sum(linear.outputs.values())
        # Some models read the dtype of a projection's weight; none of them computes with this one.
        self.weight = torch.empty(0, dtype=compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)


class _Passthrough(nn.Module):
    """Stands in for the layers where only the head is wanted: what goes in comes out as the last hidden state."""

    @property
    def decoder(self) -> "_Passthrough":
        """Where a family calls a part of its base model."""
        return self

    def forward(self, *unused: object, inputs_embeds: torch.Tensor, **ignored: object) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)
        output.router_logits = None  # which mixtures of experts pass on
        return output


class TransformersLM:
    """A `CausalLM` over a transformers model. Raises ModelError when transformers does not know the architecture or it cannot be served."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self._placement = placement
        self._step = _Step(config)
        self._model = _make(config, placement)
        self._names = read_names(self._model)
        # Some families have a window in their config and never mask by it: only those whose code makes such masks slide.
        self._step.masks_slide = "create_sliding_window_causal_mask" in vars(sys.modules[type(self._model).__module__])
        self._tied_head: Linear | None = None
        self._linears: dict[str, Linear] = {}
        self._replace_linears(bool(config.tie_word_embeddings))
        for module in self._model.modules():
            module.headrace_step = self._step
        self._layers = self._model.base_model
        # The same model with its layers short-circuited: whatever it does to logits (scales, soft caps) stays its own.
        self._head = copy.copy(self._model)
        self._head._modules = {**self._model._modules, self._model.base_model_prefix: _Passthrough()}

    def expert_counts(self) -> dict[int, ExpertCounts]:
        return {}

    def weights(self) -> Iterator[Weight]:
        """See `CausalLM.weights`. Matrices of linear layers are packed; everything else is kept in the compute dtype."""
        for name, linear in self._linears.items():
            if linear is not self._tied_head:
                yield from linear.weights(name.removesuffix(name.rpartition(".")[2]))
        embedding = self._model.get_input_embeddings()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            stacking = stacking_of(name, tensor, self._names.stackings)
            if stacking is not None:
                yield from ExpertStack(tensor, name, stacking).weights()
                continue
            load = functools.partial(_copy_into, tensor.data)
            keepers: tuple[Keeper, ...] = (Parameter(tensor),)
            part, tied_name = "weight", ""
            if isinstance(embedding, nn.Embedding) and tensor is embedding.weight and self._tied_head is not None:
                load = functools.partial(_load_tied, tensor.data, self._tied_head)
                keepers = (*keepers, self._tied_head)
                part = next(self._tied_head.weights("")).part
                tied_name = next(
                    f"{name}.weight" for name, linear in self._linears.items() if linear is self._tied_head
                )
            init: Literal["normal", "ones", "zeros"] = "normal"
            if tensor.ndim == 1:
                init = "zeros" if name.endswith("bias") else "ones"
            yield Weight(
                name,
                tuple(tensor.shape),
                load,
                tensor.detach,
                init,
                tensor.element_size(),
                keepers=keepers,
                part=part,
                tied_name=tied_name,
            )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        return embedded

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        reads: ReadTokens | None = None,
        *,
        own: OwnRows | None = None,
        by_layer: bool = False,
    ) -> torch.Tensor:
        assert own is None, "ranks do not run this model"
        self._step.attention = attention
        self._step.layers_called = []
        out = self._layers(
            inputs_embeds=hidden.unsqueeze(0), position_ids=positions.long().unsqueeze(0), use_cache=False
        )
        states: torch.Tensor = out.last_hidden_state.squeeze(0)
        return states if reads is None else states[reads.index]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits.squeeze(0).float()

    def peaks(self, hidden: torch.Tensor) -> Peaks:
        return peaks_of(self.logits(hidden))

    def fuse(self, attention: StepAttention) -> str:
        return "transformers runs the layers"

    def check(self) -> None:
        """Run two tokens through a recording attention. Raises ModelError unless every layer attends through us, once, as configured."""
        config = self._step.config
        try:
            with torch.inference_mode():
                first, second = (self._without_attention(token) for token in (0, 1))
                by_ids = self._without_attention(1, by_ids=True)
                self.logits(first)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(
                f"model type {config.model_type} cannot be served: its code in transformers does not run: {reason:.200}"
            ) from error
        called = sorted(self._step.layers_called)
        if called != list(range(config.num_layers)):
            raise ModelError(
                f"model type {config.model_type} cannot be served: its {config.num_layers} layers attend {len(called)} times "
                "through transformers' attention interface, not once each"
            )
        if not _same(by_ids, second):
            raise ModelError(
                f"model type {config.model_type} cannot be served: it uses token ids for more than their embedding"
            )
        if not _same(first[1], second[1]):
            raise ModelError(
                f"model type {config.model_type} cannot be served: besides attention, another part of it sees earlier "
                "tokens (a convolution, a recurrence, a shift), and only keys and values are kept"
            )

    def _without_attention(self, first: int, by_ids: bool = False) -> torch.Tensor:
        """Hidden states [2, hidden_size] of token `first` and then token 2, with attention that gives zeros.

        by_ids: the model embeds them itself.
        """
        device = self._placement.device
        ids, positions = torch.tensor([first, 2], device=device), torch.arange(2, device=device)
        if not by_ids:
            return self.forward(self.embed(ids), positions, _Recorder())
        self._step.attention, self._step.layers_called = _Recorder(), []
        out = self._layers(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        states: torch.Tensor = out.last_hidden_state.squeeze(0)
        return states

    def _replace_linears(self, tied: bool) -> None:
        head = self._model.get_output_embeddings()
        for name, module in list(self._model.named_modules()):
            if type(module) is not nn.Linear:
                continue
            parent, _, leaf = name.rpartition(".")
            has_bias = module.bias is not None
            placement = self._placement
            if module is head:
                placement = placement.head
            elif leaf in _ROUTERS:
                placement = placement.unquantized
            linear = Linear(module.in_features, {leaf: module.out_features}, placement, bias=has_bias)
            if module is head and tied:
                if has_bias:
                    raise _unserved(self._step.config, "its output projection is tied to the embedding and has a bias")
                self._tied_head = linear
            setattr(self._model.get_submodule(parent), leaf, _LinearModule(linear, self._placement.compute_dtype))
            self._linears[name] = linear
        if tied and self._tied_head is None:
            raise _unserved(
                self._step.config, "its output projection is tied to the embedding and is no plain linear layer"
            )


class _Recorder(StepAttention):
    """Stores nothing and attends to nothing."""

    name = "recorder"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        return q.new_zeros(q.shape[0], layer.num_q_heads * layer.head_dim)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The function behind transformers' attention interface: q [1, heads, num_tokens, head_dim], k and v likewise. Returns [1, num_tokens, heads,
    head_dim] and no weights. Raises ModelError for what our attention does not do."""
    step = module.headrace_step
    assert isinstance(step, _Step), type(step)
    config, layer = step.config, module.layer_idx
    assert isinstance(layer, int), layer
    expected = (
        ("query", query, config.num_q_heads),
        ("key", key, config.num_kv_heads),
        ("value", value, config.num_kv_heads),
    )
    for kind, tensor, heads in expected:
        if tensor.shape[0] != 1 or tensor.shape[1] != heads or tensor.shape[3] != config.head_dim:
            raise ModelError(
                f"model type {config.model_type} cannot be served: its layer {layer} attends with {tensor.shape[1]} {kind} heads of "
                f"{tensor.shape[3]}; only {heads} of {config.head_dim}, the same in every layer and for keys and values, can be served"
            )
    extra = [words for name, words in _EXTRAS.items() if kwargs.get(name) is not None]
    if attention_mask is not None:
        extra.append("a mask of its own")
    if kwargs.get("is_causal") is False:
        extra.append("attention to later tokens")
    if extra:
        raise ModelError(
            f"model type {config.model_type} cannot be served: its attention is not plain and causal, it has {' and '.join(extra)}"
        )
    if (
        sliding_window is None
        and step.masks_slide
        and layer < len(config.layer_types)
        and config.layer_types[layer] == "sliding_attention"
    ):
        sliding_window = config.sliding_window
    spec = AttentionLayerSpec(
        layer_id=layer,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window or 0,
        soft_cap=softcap or 0.0,
    )
    step.layers_called.append(layer)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    out = step.attention.forward(q, k, v, spec)
    return out.view(1, q.shape[0], config.num_q_heads, config.head_dim), None


def _make(config: ModelConfig, placement: Placement) -> Any:
    rope = config.rope
    limit = rope.scaling.get("original_max_position_embeddings", config.max_position_embeddings)
    if rope.rope_type in ("dynamic", "longrope") and placement.max_positions > limit:
        raise ModelError(
            f"rope type {rope.rope_type} changes keys already cached when a sequence passes {limit} tokens; "
            f"serve it with --context-length {limit}"
        )
    model = _instance(config, placement.compute_dtype)
    wanted = inspect.signature(model.base_model.forward).parameters
    missing = [name for name in ("inputs_embeds", "position_ids") if name not in wanted]
    if missing:
        raise _unserved(config, f"it takes no {' and no '.join(missing)}")
    other = sorted({type(module).__name__ for module in model.modules() if _looks_back(module)})
    if other:
        raise _unserved(config, f"beside attention it has {', '.join(other)}, whose state is not kept between steps")
    return model.to(placement.device).eval().requires_grad_(False)


def _unserved(config: ModelConfig, why: str) -> ModelError:
    return ModelError(f"model type {config.model_type} cannot be served: {why}")


def _looks_back(module: nn.Module) -> bool:
    """Whether a module combines tokens without going through attention, as far as its kind tells."""
    # transformers' Conv1D is a linear layer with a transposed matrix.
    return isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase) or bool(_STATEFUL.search(type(module).__name__))


def _instance(config: ModelConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _unserved(config, "transformers has no causal language model of this type")
    ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, attend)
    hf_config = transformers_config(config.raw, "config.json")
    try:
        with no_init_weights():
            return AutoModelForCausalLM.from_config(hf_config, attn_implementation=_INTERFACE, dtype=dtype)
    except (ValueError, LookupError, ImportError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, KeyError) and error.args == (_INTERFACE,):
            raise _unserved(config, "its attention cannot be replaced") from error
        raise _unserved(config, f"transformers cannot build it: {' '.join(str(error).split()):.200}") from error


def _renaming(config: ModelConfig) -> Callable[[str], str]:
    """transformers' rules from names in checkpoints to names in today's modules."""
    with torch.device("meta"):
        return read_names(_instance(config, torch.float32)).rename


def _check(model: CausalLM) -> None:
    assert isinstance(model, TransformersLM), type(model)
    model.check()


def _unsupported(config: ModelConfig) -> list[str]:
    """What can be said from the config alone."""
    if "chunked_attention" in config.layer_types:
        return ["attention in chunks is not supported"]
    if config.raw.get("auto_map"):
        return ["it needs its own code, which Headrace does not run"]
    return []


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=_SAME, atol=_SAME * float(one.abs().max()))


def _copy_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


def _load_tied(target: torch.Tensor, head: Linear, tensor: torch.Tensor) -> None:
    target.copy_(tensor)
    for weight in head.weights(""):
        weight.load(tensor)


SPEC = ModelSpec(
    "transformers",
    TransformersLM,
    unsupported=_unsupported,
    ignored=_IGNORED,
    batch_invariant=False,
    renaming=_renaming,
    check=_check,
)
