"""Headrace's own server, from the checkout's .venv."""

from peer_process import ROOT, Precision, ServerCommand, run_alone

QUANTIZATION = {"16": "none", "8": "int8", "4": "int4"}
OTHER_QUANTIZATION = {"16": "int16", "8": "int8-fast"}
"""Of classes that we have two kinds of weights for."""
KV_CACHE = {"16": "bf16", "8": "int8", "4": "int8"}
"""Of as many bits as OpenVINO's own choice: KV_CACHE_PRECISION is f16 for its fp16 models, u8 for its int8 and int4 ones."""


def command_for(precision: Precision, port: int) -> ServerCommand:
    """Start Headrace with the smollm2 model."""
    return _command(QUANTIZATION[precision], KV_CACHE[precision], port)


def other_command_for(precision: Precision, port: int) -> ServerCommand:
    """Start Headrace with the other kind of weights of the class, one of OTHER_QUANTIZATION."""
    return _command(OTHER_QUANTIZATION[precision], KV_CACHE[precision], port)


def _command(quantization: str, kv_cache: str, port: int) -> ServerCommand:
    headrace = ROOT / ".venv" / "bin" / "headrace"
    return ServerCommand(
        f"Headrace {'bf16' if quantization == 'none' else quantization}",
        [
            str(headrace),
            "serve",
            "smollm2",
            "--port",
            str(port),
            "--quantization",
            quantization,
            "--kv-cache-dtype",
            kv_cache,
        ],
        needs=(headrace,),
    )


if __name__ == "__main__":
    run_alone(command_for)
