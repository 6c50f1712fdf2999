"""llama.cpp's server, as benchmarks/compare/setup built it."""

from peer_process import MODELS, PEERS_VENV, Precision, ServerCommand, num_cores, run_alone

FORMATS = {"16": "f16", "8": "q8_0", "4": "q4_0"}
_SLOTS = 32
_SLOT_TOKENS = 2304  # the longest request of the presets, 2,048 + 1, and some room


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
        needs=(binary, model),
    )  # fmt: skip


if __name__ == "__main__":
    run_alone(command_for)
