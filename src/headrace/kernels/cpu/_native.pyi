"""Kernels in csrc/cpu. Addresses are tensor.data_ptr(), sizes and strides count elements; no size is checked here.

Indices inside tensors (slots, positions, ids, pages) are: ValueError.
"""

import builtins

def linear(
    x: int,
    x_stride: int,
    weight: int,
    type: int,
    bias: int,
    y: int,
    y_stride: int,
    rows: int,
    n: int,
    k: int,
    accumulate: bool,
) -> None: ...
def linear_quantized(
    x: int,
    x_stride: int,
    scheme: int,
    weight: int,
    column_scales: int,
    bias: int,
    y: int,
    y_stride: int,
    rows: int,
    n: int,
    k: int,
    accumulate: bool,
) -> None: ...
def pack_gguf(type: int, rows: int, row_bytes: int, n: int, k: int, entries: int) -> None: ...
def unpack_gguf(entries: int, n: int, k: int, rows: int, row_bytes: int) -> None: ...
def gguf_block_bytes(type: int, k: int) -> int: ...
def quantize_rows(
    x: int, x_stride: int, values: int, scales: int, rows: int, k: int, group: int, value_bytes: int, rotated: bool
) -> None: ...
def paged_attention(
    q: int,
    q_stride: int,
    out: int,
    k_cache: int,
    v_cache: int,
    kv_type: int,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    page_table: int,
    max_pages: int,
    seq_lens: int,
    q_starts: int,
    num_seqs: int,
    num_tokens: int,
    num_q_heads: int,
    scale: float,
    window: int,
    softcap: float,
    last_keys: int,
) -> None: ...
def sparse_attention(
    q: int,
    q_stride: int,
    out: int,
    k_cache: int,
    v_cache: int,
    kv_type: int,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    page_table: int,
    max_pages: int,
    seq_lens: int,
    q_starts: int,
    num_seqs: int,
    num_tokens: int,
    num_q_heads: int,
    scale: float,
    window: int,
    softcap: float,
    last_keys: int,
    sparse_first: int,
    channels: int,
    pages: int,
    recent: int,
) -> None: ...
def packed_attention(
    q: int,
    q_stride: int,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    out: int,
    row_starts: int,
    num_seqs: int,
    tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    rounded: bool,
) -> None: ...
def write_kv(
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    k_cache: int,
    v_cache: int,
    kv_type: int,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    slots: int,
    tokens: int,
) -> None: ...
def gather_kv(
    k: int,
    v: int,
    k_cache: int,
    v_cache: int,
    kv_type: int,
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    slots: int,
    tokens: int,
) -> None: ...
def rms_norm(x: int, x_stride: int, residual: int, weight: int, out: int, rows: int, size: int, eps: float) -> None: ...
def rotary(
    q: int,
    q_stride: int,
    num_q_heads: int,
    k: int,
    k_stride: int,
    num_kv_heads: int,
    positions: int,
    cos: int,
    sin: int,
    tokens: int,
    head_dim: int,
    rotary_dim: int,
    max_positions: int,
) -> None: ...
def silu_mul(x: int, x_stride: int, out: int, rows: int, size: int) -> None: ...
def gelu_tanh_mul(x: int, x_stride: int, out: int, rows: int, size: int) -> None: ...
def gelu_mul(x: int, x_stride: int, out: int, rows: int, size: int) -> None: ...
def gelu(x: int, x_stride: int, out: int, rows: int, size: int) -> None: ...
def gelu_tanh(x: int, x_stride: int, out: int, rows: int, size: int) -> None: ...
def embedding(
    table: int,
    type: int,
    order: int,
    ids: int,
    ids_are_int64: bool,
    out: int,
    tokens: int,
    vocab_size: int,
    hidden_size: int,
    scale: float,
) -> None: ...
def argmax(x: int, x_stride: int, out: int, rows: int, size: int) -> None: ...
def layer_norm(
    x: int, x_stride: int, residual: int, weight: int, bias: int, out: int, rows: int, size: int, eps: float
) -> None: ...
def draw(
    x: int,
    x_stride: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_weight: int,
    u: int,
    masks: int,
    mask_rows: int,
    num_masks: int,
    out: int,
    rows: int,
    size: int,
) -> None: ...
def exp_sums(x: int, x_stride: int, peaks: int, sums: int, rows: int, size: int) -> None: ...
def moe(
    x: int,
    x_stride: int,
    ids: int,
    shares: int,
    experts: int,
    out: int,
    rows: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    gelu: bool,
) -> None: ...
def known_isas() -> list[str]: ...
def why_not_isa(isa: str) -> str: ...
def select_isa(isa: str) -> None: ...
def isa() -> str: ...
def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...

class Decoder:
    """A linear is (address, is bfloat16, QuantScheme or -1, column scales, bias, n, k); an absent tensor is 0."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        gelu: bool,
        kv_type: int,
        num_pages: int,
        final_norm: int,
    ) -> None: ...
    def add_layer(
        self,
        attention_norm: int,
        qkv: tuple[int, int, int, int, int, int],
        q_norm: int,
        k_norm: int,
        cos: int,
        sin: int,
        rotary_dim: int,
        max_positions: int,
        scale: float,
        window: int,
        softcap: float,
        k_cache: int,
        v_cache: int,
        out: tuple[int, int, int, int, int, int],
        after_attention: int,
        mlp_norm: int,
        gate_up: tuple[int, int, int, int, int, int],
        down: tuple[int, int, int, int, int, int],
        after_mlp: int,
    ) -> None: ...
    def set_sparse(self, channels: int, pages: int, recent: int, orders: list[int]) -> None: ...
    def set_group(self, group: int, halves_from: int) -> None: ...
    def forward(
        self,
        hidden: int,
        out: int,
        tokens: int,
        positions: int,
        out_slots: int,
        page_table: int,
        max_pages: int,
        seq_lens: int,
        q_starts: int,
        read_starts: int,
        num_seqs: int,
    ) -> None: ...
    def forward_sparse(
        self,
        hidden: int,
        out: int,
        tokens: int,
        positions: int,
        out_slots: int,
        page_table: int,
        max_pages: int,
        seq_lens: int,
        q_starts: int,
        read_starts: int,
        num_seqs: int,
        sparse_first: int,
    ) -> None: ...
    def phase_seconds(self) -> list[float]: ...

class Encoder:
    """See `Decoder`. activation: 0 gelu, 1 gelu_tanh, 2 silu, 3 relu."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        scale: float,
        eps: float,
        pre_norm: bool,
        activation: int,
        gated: bool,
        rounded: bool,
        final_norm: int,
        final_bias: int,
    ) -> None: ...
    def add_layer(
        self,
        attention_norm: int,
        attention_bias: int,
        qkv: tuple[int, int, int, int, int, int],
        out: tuple[int, int, int, int, int, int],
        mlp_norm: int,
        mlp_bias: int,
        up: tuple[int, int, int, int, int, int],
        down: tuple[int, int, int, int, int, int],
        window: int,
        cos: int,
        sin: int,
        rotary_dim: int,
        max_positions: int,
    ) -> None: ...
    def forward(self, hidden: int, tokens: int, positions: int, row_starts: int, num_seqs: int) -> None: ...
    def phase_seconds(self) -> list[float]: ...

class RankGroup:
    """See csrc/cpu/rank_group.h. RuntimeError with the reason when the group is broken."""

    @staticmethod
    def bytes(size: int) -> int: ...
    def __init__(self, fd: int, rank: int, size: int, limit_s: float) -> None: ...
    def address(self) -> int: ...
    def all_reduce(self, x: int, n: int) -> None: ...
    def begin_sum(self, x: int, n: int) -> None: ...
    def finish_sum(self, x: int, n: int) -> None: ...
    def num_begun(self) -> int: ...
    def gather(self, x: int, x_stride: int, rows: int, columns: list[int], out: int, out_stride: int) -> None: ...
    def send(self, message: builtins.bytes) -> None: ...
    def receive(self) -> builtins.bytes: ...
    def break_up(self, reason: str) -> None: ...

def copy_kv_pages(
    layers: list[int],
    row_bytes: list[int],
    num_pages: int,
    pages: list[int],
    bytes: int,
    to_pool: bool,
    sums: int,
) -> None: ...
def probe_read(memory: int, bytes: int) -> float: ...
def probe_fma(rounds: int) -> float: ...
def probe_dot(rounds: int, kind: int) -> float: ...
