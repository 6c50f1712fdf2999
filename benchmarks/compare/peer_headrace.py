"""Headrace's own server, from the checkout's .venv, with no option but the class of its weights."""

from greedy import by_generate
from peer_process import ROOT, Precision, ServerCommand, run_alone

QUANTIZATIONS: dict[Precision, tuple[str, ...]] = {
    "16": ("default", "int16"),
    "8": ("int8", "int8-fast"),
    "4": ("int4",),
}
"""Weights of each class, the ones to begin with first. default: without --quantization, what is fastest here in 16 bits."""


def quantized_command(quantization: str, port: int) -> ServerCommand:
    """Start Headrace with the smollm2 model and one of QUANTIZATIONS."""
    headrace = ROOT / ".venv" / "bin" / "headrace"
    option = [] if quantization == "default" else ["--quantization", quantization]
    return ServerCommand(
        f"Headrace {quantization}",
        [str(headrace), "serve", "smollm2", "--port", str(port), *option],
        by_generate,
        needs=(headrace,),
    )


def command_for(precision: Precision, port: int) -> ServerCommand:
    """Start Headrace with the smollm2 model."""
    return quantized_command(QUANTIZATIONS[precision][0], port)


if __name__ == "__main__":
    run_alone(command_for)
