"""The weight formats: what is known of each without torch, one row a format.

Owns the names and every fact that the command line, the choice of options, readers of checkpoints and kernels ask for. Does not own
the arithmetic (`layers.quantization`, one class a format) nor the kernels. Pure; used in any process. A new format: docs/adding/weight-format.md.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Scheme = Literal["none", "int16", "int8", "int8-fast", "int4", "fp8"]
"""The name of a weight format, as `--quantization` takes it."""

StoredScheme = Literal["int8", "int4"]
"""The name of a format that `headrace quantize` writes."""

STORED: tuple[StoredScheme, ...] = get_args(StoredScheme)
"""The formats that it writes."""

FINEST_STORED: StoredScheme = "int8"
"""The finest of them. Parts of a product that were stored in different formats meet in it."""

KERNEL_GROUP = 32
"""Elements that share a scale in the kernels; a checkpoint's groups are multiples of it."""

WIDE_GROUP = 128
"""Elements of a row of activations that share a scale where weights have one scale a row."""

MAX_WORDS_NORM = 23170
"""Of 128 weights as 16-bit integers: sqrt(sum of squares). Sums of their products with activations fit 32 bits."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The integers that stand for weights: weight = scale * (code - zero), or scale * code - minimum.

    bits: of a code. dtype: of a tensor of codes, one an element. zero: the code of weight 0 where there are no minimums.
    scale_per_row: one scale a row; otherwise one every KERNEL_GROUP elements of it, or a multiple. minimums: there may be some.
    max_norm: sqrt(sum of squares) of the codes in every WIDE_GROUP elements of a row, at most; None = any.
    """

    bits: int
    dtype: Literal["uint8", "int16"]
    zero: int
    scale_per_row: bool = False
    minimums: bool = False
    max_norm: int | None = None


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a linear layer rounds its input on CPU: to integers of `bits`, with a scale every `group` elements of a row."""

    bits: Literal[8, 16]
    group: int


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """What a format needs of a GPU. dtype: of the model; "" = any. capability: the least compute capability. experts: mixtures are served."""

    dtype: str = ""
    capability: tuple[int, int] = (0, 0)
    experts: bool = False


@dataclass(frozen=True, slots=True)
class FormatNeeds:
    """What a format is asked to serve. has_experts: the model is a mixture of experts."""

    device: str
    dtype: str
    cuda_capability: tuple[int, int]
    has_experts: bool


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """One weight format: how linear layers keep their weights, and what they do to their input.

    codes: None where weights stay floats. activations: None where the input is not rounded to integers first.
    bytes_per_weight: packed, with its share of the scales; None = those of the model's dtype.
    error: of rounding normally distributed weights, relative to their norm, at most.
    on_cpu: it is served there. gpu: what it needs of one; None = no GPU serves it.
    head: format of the output projection on CPU, where that is another. On a GPU the output projection stays in float.
    takes: formats of stored matrices that are used as they are stored, where this one is asked for.
    note: for the help text, in brackets behind the name.
    """

    name: Scheme
    codes: Codes | None = None
    activations: Rounding | None = None
    bytes_per_weight: float | None = None
    error: float = 0.0
    on_cpu: bool = True
    gpu: GpuKernel | None = None
    head: Scheme | None = None
    takes: tuple[Scheme, ...] = ()
    note: str = ""

    @property
    def quantizes(self) -> bool:
        """Whether weights are rounded to something else than the model's dtype."""
        return self.bytes_per_weight is not None

    def itemsize(self, dtype_bytes: int) -> float:
        """Bytes that one weight takes, packed; dtype_bytes: bytes of one in the model's dtype."""
        return float(dtype_bytes) if self.bytes_per_weight is None else self.bytes_per_weight

    def reason_against(self, needs: FormatNeeds) -> str:
        """Why linear layers cannot compute so there; "" when they can."""
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
    FormatFacts(
        "int16",
        codes=Codes(16, "int16", 0, scale_per_row=True, max_norm=MAX_WORDS_NORM),
        activations=Rounding(16, WIDE_GROUP),
        bytes_per_weight=2.0,
        error=0.0005,
        note="closer to the float weights than bfloat16",
    ),
    FormatFacts(
        "int8",
        codes=Codes(8, "uint8", 128),
        activations=_BYTES,
        bytes_per_weight=34 / 32,
        error=0.008,
        takes=("int8",),
    ),
    FormatFacts(
        "int8-fast",
        codes=Codes(8, "uint8", 128, scale_per_row=True),
        activations=Rounding(8, WIDE_GROUP),
        bytes_per_weight=1.0,
        error=0.012,
        note="faster, less exact",
    ),
    FormatFacts(
        "int4",
        codes=Codes(4, "uint8", 8, minimums=True),
        activations=_BYTES,
        bytes_per_weight=20 / 32,
        error=0.1,
        gpu=GpuKernel(dtype="bfloat16"),
        # Every token is chosen by the output projection: it keeps 8 bits.
        head="int8",
        takes=("int4", "int8"),
    ),
    FormatFacts(
        "fp8",
        bytes_per_weight=1.0,
        error=0.04,
        on_cpu=False,
        gpu=GpuKernel(capability=(8, 9)),
    ),
)

FORMATS: dict[Scheme, FormatFacts] = {facts.name: facts for facts in _FORMATS}
"""Every weight format by its name."""


def codes_of(scheme: Scheme) -> Codes:
    """The codes of a format. ValueError for one whose weights are floats."""
    codes = FORMATS[scheme].codes
    if codes is None:
        raise ValueError(f"{scheme} weights are floats, they have no codes")
    return codes


def names_on_cpu() -> list[Scheme]:
    """The formats that quantise and that a CPU serves, in the order of the table."""
    return [facts.name for facts in _FORMATS if facts.quantizes and facts.on_cpu]


def names_on_gpus() -> list[Scheme]:
    """The formats that quantise and that a GPU serves, by name."""
    return sorted(facts.name for facts in _FORMATS if facts.quantizes and facts.gpu is not None)


def help_text() -> str:
    """The formats that quantise, for the help of `--quantization`."""
    on_cpu = [f"{name} ({FORMATS[name].note})" if FORMATS[name].note else name for name in names_on_cpu()]
    return f"On CPU: {', '.join(on_cpu[:-1])} or {on_cpu[-1]}; on a GPU: {' or '.join(names_on_gpus())}."


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
