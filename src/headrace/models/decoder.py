"""The decoder of most families: blocks of attention and a gated feed-forward layer around one residual stream.

Differences between families are in `DecoderOptions`, which each fills in (`headrace.families`). Runs in the thread that runs the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from headrace.attention.base import (
    AttentionLayerSpec,
    HeadNorms,
    OwnRows,
    PagedKv,
    ReadTokens,
    RotatingBackend,
    StepAttention,
)
from headrace.checkpoint.family import DecoderOptions
from headrace.checkpoint.layer_config import RopeConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.distributed.base import head_share
from headrace.distributed.one_host import SharedMemoryGroup
from headrace.distributed.two_halves import TwoHalves
from headrace.errors import ModelError
from headrace.kernels import DecoderLayerSpec, DecoderSpec, FusedDecoder
from headrace.kernels.decoder import why_not
from headrace.layers.embedding import Embedding, vocabulary_part
from headrace.layers.linear import Linear
from headrace.layers.logits import LogitsHead, Peaks
from headrace.layers.mlp import ExpertCounts, GatedMlp, SparseMoe
from headrace.layers.norm import LayerNorm, RMSNorm
from headrace.layers.rotary import NoRotary, Rotary, SectionedRotary
from headrace.layers.weight import Placement, Weight, elsewhere
from headrace.models import piecewise
from headrace.models.media import DeepRows, MediaEncoder
from headrace.models.piecewise import PiecewiseDecoder
from headrace.models.spec import stage_layers

Mlp = GatedMlp | SparseMoe


def feed_forward(config: ModelConfig, layer: int, options: DecoderOptions, placement: Placement) -> Mlp:
    """The feed-forward layer of decoder layer `layer`. Raises ModelError if all layers have experts, and the config names none."""
    if options.experts == "all" and config.moe is None:
        raise ModelError(f"this {config.model_type} config names no experts (num_local_experts)")
    if options.experts == "none" or config.moe is None or not (options.experts == "all" or config.moe.is_sparse(layer)):
        return GatedMlp(
            config.hidden_size, config.intermediate_size, config.hidden_act, placement, bias=config.mlp_bias
        )
    return SparseMoe(config.hidden_size, config.moe, config.hidden_act, placement, renames=options.expert_names)


class Attention:
    """Projections, head norms, rotation, paged attention, output projection.

    Of several ranks, each computes some heads of all tokens or, with `Placement.whole_attention`, all heads of its own rows' tokens.
    in_size: elements of what it reads of a token; None = hidden_size.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        options: DecoderOptions,
        rotary: Rotary,
        placement: Placement,
        in_size: int | None = None,
    ) -> None:
        self._group = placement.shard.group if placement.whole_attention else None
        placement = placement.attention
        share = head_share(placement.shard, config.num_q_heads, config.num_kv_heads)
        own = {"q_proj": share.query, "k_proj": share.kv, "v_proj": share.kv}
        own = {name: slice(heads.start * config.head_dim, heads.stop * config.head_dim) for name, heads in own.items()}
        self._q_size = share.num_query * config.head_dim
        self._kv_size = share.num_kv * config.head_dim
        slides = config.layer_types[layer] == "sliding_attention" and config.sliding_window is not None
        self.spec = AttentionLayerSpec(
            layer_id=layer - stage_layers(config, placement.stage).start,
            num_q_heads=share.num_query,
            num_kv_heads=share.num_kv,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            sliding_window=(config.sliding_window or 0) if slides else 0,
            soft_cap=config.attn_logit_softcapping or 0.0,
        )
        heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
        sizes = {name: count * config.head_dim for name, count in heads.items()}
        qkv_bias = config.attention_bias if options.qkv_bias is None else options.qkv_bias
        self.qkv = Linear(in_size or config.hidden_size, sizes, placement, bias=qkv_bias, own_outputs=own)
        self.out = Linear(
            sizes["q_proj"],
            {"o_proj": config.hidden_size},
            placement,
            bias=config.attention_bias if options.out_bias is None else options.out_bias,
            own_inputs=None if placement.shard.is_whole else own["q_proj"],
        )
        self.rotary = rotary
        self.is_interleaved = options.interleaved and not isinstance(rotary, NoRotary)
        self.head_norms: tuple[RMSNorm, RMSNorm] | None = None
        if options.qk_norm:
            q_norm, k_norm = (
                RMSNorm(config.head_dim, config.rms_norm_eps, placement, unit_offset=options.norm_offset)
                for _ in range(2)
            )
            self.head_norms = (q_norm, k_norm)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        reads: ReadTokens | None = None,
        own: OwnRows | None = None,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape, or [num_read, hidden_size]. Keys and values are written of all tokens. own: given,
        `positions` and `attention` are those of these rows; the other ranks compute the others."""
        if own is None:
            return self._attend(x, positions, attention, reads)
        assert self._group is not None, own
        place, own_reads = (own.tokens, None) if reads is None else own.of_reads(reads)
        y = torch.zeros(len(x) if reads is None else len(reads.index), x.shape[1])
        if own.num_tokens:
            y[place] = self._attend(x[own.tokens], positions, attention, own_reads)
        # A token's output comes from one rank, and adding zeros to it changes no bit.
        self._group.all_reduce(y)
        return y

    def _attend(
        self, x: torch.Tensor, positions: torch.Tensor, attention: StepAttention, reads: ReadTokens | None
    ) -> torch.Tensor:
        spec = self.spec
        qkv = self.qkv(x)
        q, k, v = qkv.split((self._q_size, self._kv_size, self._kv_size), dim=1)
        q = q.unflatten(1, (spec.num_q_heads, spec.head_dim))
        k = k.unflatten(1, (spec.num_kv_heads, spec.head_dim))
        v = v.unflatten(1, (spec.num_kv_heads, spec.head_dim))
        norms = None
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            if isinstance(attention, RotatingBackend) and not self.is_interleaved:
                norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)
            else:
                q, k = q_norm.heads(q), k_norm.heads(k)
        if self.is_interleaved:
            q, k = _in_halves(q), _in_halves(k)
        if isinstance(attention, RotatingBackend):
            attended = attention.forward_rotating(q, k, v, self.rotary.cos, self.rotary.sin, spec, norms)
            return self.out(attended if reads is None else attended[reads.index])
        self.rotary(q, k, positions)
        if reads is None:
            return self.out(attention.forward(q, k, v, spec))
        return self.out(attention.forward_read(q, k, v, spec, reads))

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.q_proj`, `.k_proj`, `.v_proj`, `.o_proj`, and `.q_norm`, `.k_norm` where there are."""
        yield from self.qkv.weights(f"{prefix}.")
        yield from self.out.weights(f"{prefix}.")
        if self.head_norms is not None:
            yield from self.head_norms[0].weights(f"{prefix}.q_norm")
            yield from self.head_norms[1].weights(f"{prefix}.k_norm")


def _in_halves(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim], contiguous, with the first elements of all pairs before the second ones: products of q and k are the same."""
    return x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)


def make_norm(config: ModelConfig, options: DecoderOptions, placement: Placement) -> RMSNorm | LayerNorm:
    if options.layer_norms:
        return LayerNorm(config.hidden_size, config.rms_norm_eps, placement, bias=False)
    return RMSNorm(config.hidden_size, config.rms_norm_eps, placement, unit_offset=options.norm_offset)


class Block:
    """One decoder layer. `residual` is the stream; the output of a part is added to it at the next norm, in the same kernel."""

    def __init__(
        self, config: ModelConfig, layer: int, options: DecoderOptions, rotary: Rotary, placement: Placement
    ) -> None:
        def norm() -> RMSNorm | LayerNorm:
            return make_norm(config, options, placement)

        self._attention_norm = norm()
        self.attention = Attention(config, layer, options, rotary, placement)
        self._mlp_norm = None if options.parallel else norm()
        self._mlp = feed_forward(config, layer, options, placement)
        self._mlp_name = options.mlp_name
        self._after = (norm(), norm()) if options.sandwich_norms else None

    def __call__(
        self,
        added: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        reads: ReadTokens | None = None,
        own: OwnRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """added: the previous layer's output, to be added to `residual` [num_tokens, hidden_size] (None at the first). reads: in the last
        layer, the tokens that go beyond attention. own: see `Attention`. Returns this layer's output, and the residual stream to add it to."""
        normed = self._attention_norm(residual) if added is None else self._attention_norm(added, residual)
        x = self.attention(normed, positions, attention, reads, own)
        if reads is not None:
            residual = residual[reads.index]
        if self._mlp_norm is None:
            return x + self._mlp(normed if reads is None else normed[reads.index]), residual
        if self._after is not None:
            x = self._after[0](x)
        x = self._mlp(self._mlp_norm(x, residual))
        return (x if self._after is None else self._after[1](x)), residual

    def weights_changed(self) -> None:
        if isinstance(self._mlp, SparseMoe):
            self._mlp.weights_changed()

    @property
    def expert_counts(self) -> ExpertCounts | None:
        return self._mlp.counts if isinstance(self._mlp, SparseMoe) else None

    def fused(self) -> DecoderLayerSpec | str:
        """The layer for a native call that runs all of them, or what the call has not."""
        attention, mlp = self.attention, self._mlp
        if not isinstance(mlp, GatedMlp):
            return "a mixture of experts"
        heads, after = attention.head_norms, self._after
        norms = (self._attention_norm, self._mlp_norm, *(after or ()))
        weights = [norm.weight for norm in norms if isinstance(norm, RMSNorm)]
        if len(weights) < len(norms) or attention.is_interleaved:
            return "other norms or another rotation"
        return DecoderLayerSpec(
            attention_norm=weights[0],
            qkv=attention.qkv.packed,
            head_norms=None if heads is None else (heads[0].weight, heads[1].weight),
            cos=attention.rotary.cos,
            sin=attention.rotary.sin,
            scale=attention.spec.scale,
            window=attention.spec.sliding_window,
            softcap=attention.spec.soft_cap,
            out=attention.out.packed,
            after_attention=None if after is None else weights[2],
            mlp_norm=weights[1],
            gate_up=mlp.gate_up.packed,
            activation=mlp.activation,
            down=mlp.down.packed,
            after_mlp=None if after is None else weights[3],
        )

    def weights(self, prefix: str) -> Iterator[Weight]:
        """The layer's tensors; sandwich norms have Gemma's names."""
        yield from self._attention_norm.weights(f"{prefix}.input_layernorm")
        yield from self.attention.weights(f"{prefix}.self_attn")
        if self._mlp_norm is None:
            pass
        elif self._after is None:
            yield from self._mlp_norm.weights(f"{prefix}.post_attention_layernorm")
        else:
            yield from self._after[0].weights(f"{prefix}.post_attention_layernorm")
            yield from self._mlp_norm.weights(f"{prefix}.pre_feedforward_layernorm")
            yield from self._after[1].weights(f"{prefix}.post_feedforward_layernorm")
        yield from self._mlp.weights(f"{prefix}.{self._mlp_name}")


class DecoderLM:
    """Embedding, blocks, final norm, logits: a `CausalLM`. What belongs to other stages is there by its names, without weights.

    media_encoder: of a multimodal model, set before weights are loaded. sectioned: the rotation, where image tokens have three positions each.
    deep: what images add after the first layers, in a step by layer.
    """

    def __init__(self, config: ModelConfig, options: DecoderOptions, placement: Placement) -> None:
        self._halves: TwoHalves | None = None
        if placement.shard.halves_from:
            assert isinstance(placement.shard.group, SharedMemoryGroup), placement.shard
            self._halves = TwoHalves(placement.shard.group)
            placement = replace(placement, shard=replace(placement.shard, group=self._halves))
        self._config = config
        self._options, self._placement = options, placement
        self.media_encoder: MediaEncoder | None = None
        self.sectioned: SectionedRotary | None = None
        self.deep = DeepRows()
        self._fused: tuple[list[FusedDecoder], PagedKv] | None = None
        self.taps: tuple[int, ...] = ()
        self._tapped: list[torch.Tensor] = []
        self._kept = torch.empty(0, 0, config.hidden_size, dtype=placement.compute_dtype, device=placement.device)
        self._pieces: PiecewiseDecoder | None = None
        ropes: dict[str, Rotary] = {}

        def rotary(layer: int) -> Rotary:
            # Layers with the same parameters share their tables.
            rope = config.rope_for(layer)
            rotates = options.rotates == "all" or config.layer_types[layer] == "sliding_attention"
            key = repr((rope, rotates))
            if key not in ropes:
                ropes[key] = self._make_rotary(rope, rotates)
            return ropes[key]

        own_ids = vocabulary_part(config.vocab_size, placement)
        head = Linear(
            config.hidden_size, {"lm_head": config.vocab_size}, placement.head, own_outputs={"lm_head": own_ids}
        )
        tied = config.tie_word_embeddings
        self._embedding = self._make_embedding(head if tied else None)
        self._stage = placement.stage
        self._layers = stage_layers(config, self._stage)
        self._all_blocks = [
            Block(config, layer, options, rotary(layer), placement) for layer in range(config.num_layers)
        ]
        self._blocks = self._all_blocks[self._layers.start : self._layers.stop]
        self._norm = make_norm(config, options, placement)
        self._shard = placement.shard
        self._whole_attention = placement.whole_attention
        self._head: LogitsHead | None = LogitsHead(
            head, soft_cap=config.final_logit_softcapping or 0.0, tied=tied, shard=placement.shard
        )

    def _make_rotary(self, rope: RopeConfig, rotates: bool) -> Rotary:
        config = self._config
        table = (rope, config.head_dim, config.max_position_embeddings, self._placement)
        if not rotates:
            return NoRotary(*table)
        if config.media is None or not config.media.rope_sections:
            return Rotary(*table)
        self.sectioned = SectionedRotary(*table, config.media.rope_sections, config.media.rope_interleaved)
        return self.sectioned

    def drop_head(self) -> None:
        """Do without the output projection: the model will not be asked for logits. Before weights are loaded."""
        self._head = None
        self._embedding = self._make_embedding(None)

    def _make_embedding(self, tied: Linear | None) -> Embedding:
        config, scale = self._config, 1.0
        if self._options.scales_embeddings:
            # Rounded to the precision of the weights, as when the model was trained.
            scale = float(torch.tensor(config.hidden_size**0.5, dtype=self._placement.weight_dtype))
        return Embedding(config.vocab_size, config.hidden_size, self._placement, scale=scale, tied=tied)

    def weights(self) -> Iterator[Weight]:
        first, last = self._stage.is_first, self._stage.is_last
        yield from _here(first, self._embedding.weights("model.embed_tokens"))
        for index, block in enumerate(self._all_blocks):
            yield from _here(index in self._layers, block.weights(f"model.layers.{index}"))
        yield from _here(last, self._norm.weights("model.norm"))
        if self._head is not None:
            yield from _here(first, self._head.weights(""))
        if self.media_encoder is not None:
            yield from self.media_encoder.weights()

    def expert_counts(self) -> dict[int, ExpertCounts]:
        found = ((layer, block.expert_counts) for layer, block in zip(self._layers, self._blocks, strict=True))
        return {layer: counts for layer, counts in found if counts is not None}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids)

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
        if self._fused is not None and not by_layer and attention.paged_kv() is self._fused[1]:
            return self._run_fused(*self._fused, hidden, positions, reads)
        if self._pieces is not None and not by_layer:
            out = self._pieces(hidden, positions, attention, [block.attention.spec for block in self._blocks])
            return out if reads is None else out[reads.index]
        if self._halves is not None and not by_layer and len(hidden) >= self._shard.halves_from:
            middle = len(hidden) // 2
            parts = [
                self._part(tokens, hidden, positions, attention, reads)
                for tokens in (slice(0, middle), slice(middle, len(hidden)))
            ]
            if parts[0] is not None and parts[1] is not None:
                return torch.cat(self._halves.run(parts[0], parts[1]))
        return self._run_blocks(hidden, positions, attention, reads, own)

    def _part(
        self,
        tokens: slice,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        reads: ReadTokens | None,
    ) -> Callable[[], torch.Tensor] | None:
        """`_run_blocks` for some tokens, None if this attention has no views."""
        found = attention.part(tokens)
        if found is None:
            return None
        view, rows = found
        own_reads = None if reads is None else reads.part(tokens, rows)
        return partial(self._run_blocks, hidden[tokens], positions[tokens], view, own_reads)

    def _run_blocks(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        reads: ReadTokens | None,
        own: OwnRows | None = None,
    ) -> torch.Tensor:
        *blocks, last = self._blocks
        residual, added = hidden, None
        self._tapped = []
        for index, block in enumerate(blocks):
            self._tap(index, residual, added)
            added, residual = block(added, residual, positions, attention, own=own)
            self.deep.add_to(added, index)
        self._tap(len(blocks), residual, added)
        if not self._stage.is_last:
            added, residual = last(added, residual, positions, attention, own=own)
            return residual + added
        if reads is not None and (counts := last.expert_counts) is not None and counts.is_on:
            added, residual = last(added, residual, positions, attention, own=own)
            return self._norm(added, residual)[reads.index]
        added, residual = last(added, residual, positions, attention, reads, own)
        return self._norm(added, residual)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep the residual stream before these layers from now on, of all tokens of the last step, for `tapped`. layers: ascending, none of them
        the first. Before `fuse`; for a model in one stage."""
        assert all(a < b for a, b in pairwise((0, *layers, len(self._blocks)))), layers
        self.taps = layers

    def keep_tapped(self, num_tokens: int) -> None:
        """Write the streams of every step of at most `num_tokens` tokens to the same memory from now on: a captured graph has no other way to give
        them. After `tap`, before the graphs are captured."""
        self._kept = self._kept.new_zeros(len(self.taps), num_tokens, self._config.hidden_size)

    def tapped(self, num_tokens: int) -> list[torch.Tensor]:
        """The residual streams before the layers of `tap`, [num_tokens, hidden_size] each, until the next step. num_tokens: of the last step, without
        the padding of a graph."""
        return list(self._kept[:, :num_tokens]) if num_tokens <= self._kept.shape[1] else self._tapped

    def _tap(self, index: int, residual: torch.Tensor, added: torch.Tensor | None) -> None:
        if index not in self.taps:
            return
        assert added is not None, index
        if len(added) <= self._kept.shape[1]:
            torch.add(residual, added, out=self._kept[self.taps.index(index), : len(added)])
        else:
            self._tapped.append(residual + added)

    def _run_fused(
        self,
        decoders: list[FusedDecoder],
        kv: PagedKv,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        reads: ReadTokens | None,
    ) -> torch.Tensor:
        rows = kv.rows
        step = (positions, rows.out_slots, kv.page_table, rows.seq_lens, rows.row_starts)
        first = None if kv.sparsity is None else rows.sparse_first
        *between, last = decoders
        self._tapped = []
        for decoder in between:
            hidden = decoder(hidden, *step, None, first)
            self._tapped.append(hidden.clone())
        return last(hidden, *step, None if reads is None else torch.tensor(reads.starts, dtype=torch.int32), first)

    def fuse(self, attention: StepAttention) -> str:
        self._fused = None
        if self.media_encoder is not None:
            self.media_encoder.fuse(attention.name.startswith("cpu"))
        for block in self._blocks:
            block.weights_changed()
        if self._pieces is not None:
            spec = self._spec()
            assert isinstance(spec, DecoderSpec), spec
            self._pieces.spec = spec
        kv = attention.paged_kv()
        if kv is None:
            return f"attention backend {attention.name} does not keep pages in the kernels' layout"
        group = self._shard.group
        if self._whole_attention:
            return "ranks compute attention of different tokens, and sum between the layers"
        if group is not None and group.address is None:
            return "ranks on several hosts sum between the layers"
        spec = self._spec()
        if isinstance(spec, str):
            return spec
        reason = why_not(spec)
        if not reason:
            self._fused = (
                [self._fused_part(spec, kv, *part) for part in pairwise((0, *self.taps, len(spec.layers)))],
                kv,
            )
        return reason

    def _fused_part(self, spec: DecoderSpec, kv: PagedKv, begin: int, end: int) -> FusedDecoder:
        part = replace(
            spec, layers=spec.layers[begin:end], final_norm=spec.final_norm if end == len(spec.layers) else None
        )
        k, v = kv.pool.k[begin:end], kv.pool.v[begin:end]
        sparsity = None if kv.sparsity is None else kv.sparsity.of_layers(begin, end)
        shard = self._shard
        return FusedDecoder(
            part, k, v, rounded=kv.rounded, group=shard.group, halves_from=shard.halves_from, sparsity=sparsity
        )

    def compile_pieces(self, backend: str = "inductor") -> str:
        """Run the parts between attention calls as compiled functions from now on. Returns "", or why that is impossible. Weights must be loaded."""
        spec = self._spec()
        reason = spec if isinstance(spec, str) else piecewise.why_not(spec)
        if isinstance(spec, DecoderSpec) and not reason:
            self._pieces = PiecewiseDecoder(spec, backend)
        return reason

    def _spec(self) -> DecoderSpec | str:
        """The current layers as a `DecoderSpec`, or why they are not the common block."""
        layers: list[DecoderLayerSpec] = []
        for index, block in enumerate(self._blocks):
            layer = block.fused()
            if isinstance(layer, str):
                return f"layer {index} has {layer}"
            layers.append(layer)
        config, heads, norm = self._config, self._blocks[0].attention.spec, self._norm
        assert isinstance(norm, RMSNorm), norm
        return DecoderSpec(
            layers=tuple(layers),
            final_norm=norm.weight if self._stage.is_last else None,
            eps=config.rms_norm_eps,
            num_q_heads=heads.num_q_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=config.head_dim,
        )

    def phase_seconds(self) -> dict[str, float]:
        """See `FusedDecoder.phase_seconds`; empty when the layers run op by op."""
        found: dict[str, float] = {}
        for decoder in [] if self._fused is None else self._fused[0]:
            found = {phase: found.get(phase, 0.0) + taken for phase, taken in decoder.phase_seconds().items()}
        return found

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert self._head is not None
        return self._head(self._scaled(hidden), out)

    def peaks(self, hidden: torch.Tensor) -> Peaks:
        assert self._head is not None
        return self._head.peaks(self._scaled(hidden))

    def _scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """The factor on the logits, before the product: of a power of two, as Cohere's are, the bits are the same."""
        return hidden if self._config.logit_scale == 1.0 else hidden * self._config.logit_scale


def _here(is_here: bool, weights: Iterator[Weight]) -> Iterator[Weight]:
    return weights if is_here else map(elsewhere, weights)
