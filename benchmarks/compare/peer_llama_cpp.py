"""llama.cpp's server, as benchmarks/compare/setup built it."""

from greedy import by_llama_cpp
from peer_process import MODELS, PEERS_VENV, Precision, ServerCommand, num_cores, run_alone

FORMATS = {"16": "f16", "8": "q8_0", "4": "q4_0"}
_SLOTS = 32
_SLOT_TOKENS = 8192  # the model's context, and enough for the longest request of the presets, 8,001; 6 GB in all
_ACTIVATIONS = {"16": "f16", "8": "q8_0", "4": "q8_0"}  # vec_dot_type of these weights in ggml-cpu.c


def command_for(precision: Precision, port: int) -> ServerCommand:
    """Start llama-server. Slots with a KV cache of their own were faster here than a unified one."""
    binary = PEERS_VENV / "llama.cpp" / "build" / "bin" / "llama-server"
    model = MODELS / f"{FORMATS[precision]}.gguf"
    threads = str(num_cores())
    return ServerCommand(
        f"llama.cpp {FORMATS[precision]}",
        [
            str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads,
            "--alias", FORMATS[precision],
            "-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS), "--no-kv-unified", "-fa", "on", "-b", "2048", "-ub", "512",
            "--no-ui",
        ],
        by_llama_cpp,
        needs=(binary, model),
        ask_precision=lambda: {"activations": _ACTIVATIONS[precision], "kv_cache_dtype": "f16"},
    )  # fmt: skip


if __name__ == "__main__":
    run_alone(command_for)
