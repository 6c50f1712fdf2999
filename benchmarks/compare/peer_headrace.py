"""Headrace's own server, from the checkout's .venv."""

from peer_process import ROOT, Precision, ServerCommand, run_alone

QUANTIZATION = {"16": "none", "8": "int8", "4": "int4"}
_LABELS = {"16": "bf16", "8": "int8", "4": "int4"}


def command_for(precision: Precision, port: int) -> ServerCommand:
    """Start Headrace with the smollm2 model."""
    headrace = ROOT / ".venv" / "bin" / "headrace"
    return ServerCommand(
        f"Headrace {_LABELS[precision]}",
        [str(headrace), "serve", "smollm2", "--port", str(port), "--quantization", QUANTIZATION[precision]],
        needs=(headrace,),
    )


if __name__ == "__main__":
    run_alone(command_for)
