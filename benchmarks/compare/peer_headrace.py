"""Headrace's own server, from the checkout's .venv."""

from peer_process import ROOT, Precision, ServerCommand, run_alone

QUANTIZATION = {"16": "none", "8": "int8", "4": "int4"}
KV_CACHE = {"16": "bf16", "8": "int8", "4": "int8"}
"""Of as many bits as OpenVINO's own choice: KV_CACHE_PRECISION is f16 for its fp16 models, u8 for its int8 and int4 ones."""


def command_for(precision: Precision, port: int) -> ServerCommand:
    """Start Headrace with the smollm2 model."""
    return _command(QUANTIZATION[precision], KV_CACHE[precision], port)


def fast_command_for(precision: Precision, port: int) -> ServerCommand:
    """Start Headrace with int8 weights of one scale a row, whatever the class."""
    return _command("int8-fast", KV_CACHE["8"], port)


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
