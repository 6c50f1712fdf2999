"""In which bits weights and activations are: those of --dtype, --quantization and --activations, or for auto of the checkpoint and the processor.

Pure: no torch, no files. Each choice that the user did not make is a sentence in `decisions`. Raises ConfigError for what cannot be.
"""

from typing import Literal

from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.quantized_formats import stored_format, stored_scheme
from headrace.checkpoint.weight_formats import FORMATS, FormatNeeds, Scheme
from headrace.config.machine import DeviceFacts
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

_ISAS_WITH_BF16 = ("amx", "avx512bf16")
_ISAS_WITH_WORDS = ("avx512vnni", "avxvnni", "avx2")
"""Instruction sets of the native kernels that multiply bfloat16, and 16-bit integers, faster than floats."""


def choose_dtype(args: ServerArgs, model: ModelConfig, device: str, facts: DeviceFacts, decisions: list[str]) -> str:
    if device == "cpu":
        if args.dtype == "float16":
            raise ConfigError("--dtype float16 is not supported on CPU; use bfloat16 or float32")
        if args.dtype != "auto":
            return args.dtype
        decisions.append("dtype bfloat16: for the weights and the KV cache")
        return "bfloat16"
    if args.dtype == "bfloat16" and not facts.cuda_bfloat16:
        raise ConfigError("--dtype bfloat16: this GPU does not support bfloat16; use float16")
    if args.dtype != "auto":
        return args.dtype
    dtype = model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"
    if dtype == "bfloat16" and not facts.cuda_bfloat16:
        dtype = "float16"
    decisions.append(f"dtype {dtype}: the checkpoint has {model.dtype or 'no dtype'}")
    return dtype


def choose_quantization(
    args: ServerArgs, model: ModelConfig, device: str, dtype: str, facts: DeviceFacts, decisions: list[str]
) -> Scheme:
    stored = stored_scheme(model.quantization)
    asked: Scheme | None = None
    if args.quantization != "auto" and args.quantization != "none":
        asked = args.quantization
    needs = FormatNeeds(device, dtype, facts.cuda_capability, model.moe is not None)
    quantised = stored_format(model.quantization)
    if FORMATS[stored].blocks and asked != stored:
        if device == "cpu" and args.quantization == "auto" and (quantised is not None or _runs_in_blocks(args, model)):
            asked = stored
        elif quantised is not None:
            stored = "int8"  # whose codes stand for the same weights
        else:
            stored = "none"
            decisions.append(f"quantization {asked or stored}: the GGUF file is dequantised")
    refusal = FORMATS[asked or stored].reason_against(needs)
    if asked is not None and FORMATS[asked].blocks and not refusal:
        refusal = _reason_against_blocks(args, facts, stored)
    if refusal and asked is not None and not (FORMATS[asked].blocks and asked == stored):
        raise ConfigError(f"--quantization {asked}: {refusal}")
    if refusal:
        decisions.append(f"quantization none: the checkpoint's {stored} weights are dequantised, because {refusal}")
        return "none"
    if quantised is not None:
        chosen: Scheme = "none" if args.quantization == "none" else asked or stored
        rounded = "dequantised" if chosen == "none" else "dequantised and rounded again"
        what = "kept" if FORMATS[chosen].blocks or stored in FORMATS[chosen].takes else rounded
        decisions.append(f"quantization {chosen}: the checkpoint's {quantised.described} are {what}")
        return chosen
    if stored != "none":
        decisions.append(f"quantization {stored}: that of the checkpoint")
    return asked or stored


def _reason_against_blocks(args: ServerArgs, facts: DeviceFacts, stored: Scheme) -> str:
    if not FORMATS[stored].blocks:
        return "the checkpoint is neither a GGUF file nor MXFP4; leave the option out"
    if not facts.native_kernels or args.disable_native_kernels:
        return "their products need the native kernels"
    return ""


def _runs_in_blocks(args: ServerArgs, model: ModelConfig) -> bool:
    """Whether a GGUF file runs in its own bits without being asked to: most of it can, and no option wants floats."""
    wants_floats = args.dtype != "auto" or args.activations != "auto" or args.save_dir is not None
    return bool(model.quantization and model.quantization.get("in_own_bits")) and not wants_floats


def choose_activations(
    args: ServerArgs, device: str, dtype: str, quantization: Scheme, native: DeviceFacts | None, decisions: list[str]
) -> tuple[Scheme, str]:
    """(quantization, activations) of the 16-bit class: the fastest that the processor has, unless the user chose.

    native: facts about the native kernels; None = they do not run the ops.
    """
    asked = args.activations
    if device != "cpu":
        if asked != "auto":
            raise ConfigError(
                f"--activations is a choice on CPU; on {device} activations are in the dtype of the weights"
            )
        return quantization, dtype
    if asked == "bfloat16" and quantization != "none":
        raise ConfigError(f"--activations bfloat16: {quantization} linear layers round their input in their own way")
    if asked == "bfloat16" and dtype != "bfloat16":
        raise ConfigError(f"--activations bfloat16 does not go with --dtype {dtype}; use --dtype bfloat16")
    if asked != "auto":
        return quantization, asked
    if native is None or quantization != "none" or dtype != "bfloat16":
        return quantization, "float32"
    fastest, reason = fastest_in_16_bits(native.cpu_isa)
    if fastest == "int16" and (args.save_dir is not None or args.dtype != "auto"):
        return quantization, "float32"
    decisions.append(f"{'quantization' if fastest == 'int16' else 'activations'} {fastest}: {reason}")
    return ("int16", "float32") if fastest == "int16" else (quantization, fastest)


def fastest_in_16_bits(isa: str) -> tuple[Literal["bfloat16", "int16", "float32"], str]:
    """What linear layers of 16-bit weights multiply fastest with these native kernels, and why."""
    reason = f"in linear layers and attention, the fastest in 16 bits here ({isa}); --activations float32"
    if isa in _ISAS_WITH_BF16:
        return "bfloat16", f"{reason} rounds nothing"
    if isa in _ISAS_WITH_WORDS:
        return "int16", f"{reason} keeps floats"
    return "float32", f"nothing in 16 bits is faster here ({isa or 'no native kernels'})"


def check_compile(args: ServerArgs, device: str, quantization: Scheme, deterministic: bool) -> None:
    if not args.enable_torch_compile:
        return
    if device == "cpu":
        raise ConfigError("--enable-torch-compile is for GPUs; on a CPU the native kernels already run whole layers")
    if FORMATS[quantization].quantizes:
        raise ConfigError(f"--enable-torch-compile does not go with quantised weights ({quantization})")
    if deterministic:
        raise ConfigError("--enable-torch-compile cannot be combined with --enable-deterministic-inference")
