"""The weight formats, a row of a table each: everything about them that needs no torch.

The arithmetic is in `layers.quantization`, one class a format. Used in any process. How to add a format: docs/adding/weight-format.md.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Quantization = Literal["auto", "none", "gguf", "int16", "int8", "int8-fast", "int4", "fp8"]
"""What `--quantization` takes: the name of a weight format, or auto, that of the checkpoint; GGUF files are dequantised."""

Scheme = Literal[
    "none", "gguf", "int16", "int8", "int8-fast", "int4", "fp8", "bfloat16", "int8-rotated"
]  # the name of a weight format
StoredScheme = Literal["int8", "int4"]  # the name of a format in which `headrace quantize` writes checkpoints
STORED: tuple[StoredScheme, ...] = get_args(StoredScheme)
"""Every format in which `headrace quantize` writes checkpoints."""

FINEST_STORED: StoredScheme = "int8"
"""The most exact of them. When the parts of one product are stored in different formats, all of them are converted to it."""

KERNEL_GROUP = 32  # elements that share a scale in the kernels; a checkpoint's groups are multiples of it
BLOCK_OF_FILES = 256  # elements of a row in the largest blocks of GGUF files
WIDE_GROUP = 128  # elements of a row of activations that share a scale where weights have one scale a row
MAX_WORDS_NORM = 23170
"""Of 128 weights as 16-bit integers: sqrt(sum of squares). Sums of their products with activations fit 32 bits."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The integers that stand for weights: weight = scale * (code - zero), or scale * code - minimum.

    bits: of a code. dtype: of a tensor that holds one code per element. zero: the code that stands for weight 0 when there are no minimums.
    scale_per_row: each row has one scale; otherwise each KERNEL_GROUP elements of a row (or a multiple of that) have one.
    minimums: matrices of this format may have minimums. rotated: they stand for rotated weights (`checkpoint.quantized_matrix`).
    max_norm: the largest sqrt(sum of squares) that the codes in any WIDE_GROUP elements of a row may have; None = no limit.
    """

    bits: int
    dtype: Literal["uint8", "int16"]
    zero: int
    scale_per_row: bool = False
    minimums: bool = False
    rotated: bool = False
    max_norm: int | None = None


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a linear layer rounds its input on CPU: to integers of `bits` bits, with one scale for each `group` elements of a row.

    rotated: the row is rotated first, as its weights were (`checkpoint.quantized_matrix`).
    """

    bits: Literal[8, 16]
    group: int
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """What a format requires on a GPU. dtype: of the model; "" = any. capability: the lowest compute capability that has the kernel. experts: it
    runs mixtures of experts, too."""

    dtype: str = ""
    capability: tuple[int, int] = (0, 0)
    experts: bool = False


@dataclass(frozen=True, slots=True)
class FormatNeeds:
    """The device and the model that a format is asked to serve. has_experts: the model is a mixture of experts."""

    device: str
    dtype: str
    cuda_capability: tuple[int, int]
    has_experts: bool


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """One weight format: how linear layers keep their weights, and how they round their input.

    codes: None if weights stay floats. blocks: matrices are kept in the blocks of their GGUF file, and their products round activations to 8
        bits; other tensors stay floats.
    activations: None if the input is not rounded to integers (bfloat16 rounds it to bfloat16).
    bytes_per_weight: of a packed weight with its share of the scales; None = the bytes of the model's dtype.
    error: upper bound of norm(rounded - weights) / norm(weights) for normally distributed weights.
    on_cpu: it runs on CPU. gpu: what it requires on a GPU; None = it does not run on GPUs.
    head: the format of the output projection on CPU; None = the same. On a GPU the output projection stays in float.
    option: the command line option that chooses it; "" = none, another format rounds to it.
    takes: stored matrices of these formats are used unchanged when this format is requested.
    rounds_to: weights that are not used as they are stored are rounded to this format; None = this one.
    kv_cache: element type of the KV cache that `--kv-cache-dtype auto` gives it on CPU, unless it hurts the model; else that of floats.
    note: shown in brackets behind the name in the help text.
    """

    name: Scheme
    codes: Codes | None = None
    blocks: bool = False
    activations: Rounding | None = None
    bytes_per_weight: float | None = None
    error: float = 0.0
    on_cpu: bool = True
    gpu: GpuKernel | None = None
    head: Scheme | None = None
    takes: tuple[Scheme, ...] = ()
    rounds_to: Scheme | None = None
    option: Literal["--quantization", "--activations", ""] = "--quantization"
    kv_cache: Literal["", "int16", "int8"] = ""
    note: str = ""

    @property
    def quantizes(self) -> bool:
        """Whether weights are kept in anything other than the model's dtype."""
        return self.bytes_per_weight is not None

    @property
    def keeps_stored(self) -> bool:
        """Whether stored matrices may be used as they are stored."""
        return self.codes is not None or self.blocks

    @property
    def is_a_table(self) -> bool:
        """Whether a packed weight has rows that an embedding can look up: as they were."""
        return self.codes is None and self.on_cpu

    def itemsize(self, dtype_bytes: int) -> float:
        return float(dtype_bytes) if self.bytes_per_weight is None else self.bytes_per_weight

    def reason_against(self, needs: FormatNeeds) -> str:
        """Why linear layers of this format cannot run there; "" when they can."""
        if needs.device == "cpu":
            return "" if self.on_cpu else f"{self.name} runs on GPUs; a CPU has int8"
        if self.gpu is None:
            others = " and ".join(names_on_gpus())
            return f"{self.name} linear layers run on CPU, not on {needs.device}; {others} do"
        if needs.has_experts and not self.gpu.experts:
            return f"the experts of a mixture have no {self.name} kernel on {needs.device}"
        if needs.cuda_capability < self.gpu.capability:
            return (
                f"{self.name} needs compute capability {_dotted(self.gpu.capability)} or later, "
                f"this GPU has {_dotted(needs.cuda_capability)}"
            )
        if self.gpu.dtype and needs.dtype != self.gpu.dtype:
            return (
                f"the {self.name} kernel of {needs.device} computes in {self.gpu.dtype}, not in {needs.dtype}; "
                f"give --dtype {self.gpu.dtype}"
            )
        return ""


_BYTES = Rounding(8, KERNEL_GROUP)

_FORMATS: tuple[FormatFacts, ...] = (
    FormatFacts("none", gpu=GpuKernel(experts=True)),
    FormatFacts("bfloat16", bytes_per_weight=2.0, error=0.003, option="--activations"),
    FormatFacts("gguf", blocks=True, kv_cache="int16", note="a GGUF file in its own bits"),
    FormatFacts(
        "int16",
        codes=Codes(16, "int16", 0, scale_per_row=True, max_norm=MAX_WORDS_NORM),
        activations=Rounding(16, WIDE_GROUP),
        bytes_per_weight=2.0,
        error=0.0005,
        kv_cache="int16",
        note="closer to the float weights than bfloat16",
    ),
    FormatFacts(
        "int8",
        codes=Codes(8, "uint8", 128),
        activations=_BYTES,
        bytes_per_weight=34 / 32,
        error=0.008,
        takes=("int8",),
        rounds_to="int8-rotated",
        kv_cache="int8",
    ),
    FormatFacts(
        "int8-rotated",
        codes=Codes(8, "uint8", 128, rotated=True),
        activations=Rounding(8, KERNEL_GROUP, rotated=True),
        bytes_per_weight=34 / 32,
        error=0.008,
        option="",
    ),
    FormatFacts(
        "int8-fast",
        codes=Codes(8, "uint8", 128, scale_per_row=True, rotated=True),
        activations=Rounding(8, WIDE_GROUP, rotated=True),
        bytes_per_weight=1.0,
        error=0.012,
        kv_cache="int8",
        note="faster, less exact",
    ),
    FormatFacts(
        "int4",
        codes=Codes(4, "uint8", 8, minimums=True),
        activations=_BYTES,
        bytes_per_weight=20 / 32,
        error=0.1,
        gpu=GpuKernel(dtype="bfloat16"),
        # The output projection chooses every token, so it keeps 8 bits.
        head="int8",
        takes=("int4", "int8"),
        kv_cache="int8",
    ),
    FormatFacts(
        "fp8",
        bytes_per_weight=1.0,
        error=0.04,
        on_cpu=False,
        gpu=GpuKernel(capability=(8, 9)),
    ),
)

FORMATS: dict[Scheme, FormatFacts] = {facts.name: facts for facts in _FORMATS}  # every weight format by its name


def codes_of(scheme: Scheme) -> Codes:
    codes = FORMATS[scheme].codes
    if codes is None:
        raise ValueError(f"{scheme} weights are floats, they have no codes")
    return codes


def names_on_cpu() -> list[Scheme]:
    return [facts.name for facts in _FORMATS if facts.quantizes and facts.on_cpu and facts.option == "--quantization"]


def names_on_gpus() -> list[Scheme]:
    return sorted(facts.name for facts in _FORMATS if facts.quantizes and facts.gpu is not None)


def help_text() -> str:
    on_cpu = [f"{name} ({FORMATS[name].note})" if FORMATS[name].note else name for name in ("gguf", *names_on_cpu())]
    return f"On CPU: {', '.join(on_cpu[:-1])} or {on_cpu[-1]}; on a GPU: {' or '.join(names_on_gpus())}."


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


OWN_METHOD = "headrace"
GGUF_METHOD = "headrace-gguf"
"""`quant_method` of the config that a GGUF file is given; no folder has it."""


class StoredType(NamedTuple):
    """The tensors of one type in a GGUF file. runs_as: "gguf", their own bits; "floats"; or the format to which they are rounded. num_straddled: of
    them, those that are floats all the same, because ranks cut their rows within a block."""

    type: str
    num_tensors: int
    num_bytes: int
    runs_as: str
    num_straddled: int = 0

    def __str__(self) -> str:
        mib = f"{self.num_bytes / 2**20:.1f} MiB"
        cut = f", {self.num_straddled} of them as floats: ranks cut their blocks" if self.num_straddled else ""
        return f"{self.num_tensors} {self.type} ({mib}{'' if self.runs_as == 'gguf' else f', as {self.runs_as}'}{cut})"
