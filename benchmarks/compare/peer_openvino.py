"""OpenVINO GenAI's continuous batching behind the small server in openvino_completions.py."""

import json
import subprocess
from pathlib import Path

from greedy import by_generate
from peer_process import HERE, MODELS, PEERS_VENV, Precision, ServerCommand, run_alone

from headrace.errors import ConfigError

FORMATS = {"16": "fp16", "8": "int8", "4": "int4"}


def command_for(precision: Precision, port: int) -> ServerCommand:
    """Start the continuous batching pipeline of OpenVINO GenAI."""
    python = PEERS_VENV / "bin" / "python"
    model = MODELS / f"openvino-{FORMATS[precision]}"
    return ServerCommand(
        f"OpenVINO {FORMATS[precision]}",
        [str(python), str(HERE / "openvino_completions.py"), str(model), "--port", str(port)],
        by_generate,
        needs=(python, model / "openvino_model.xml"),
        ask_precision=lambda: _ask_precision(python, model),
    )


def _ask_precision(python: Path, model: Path) -> dict[str, str]:
    command = [str(python), str(HERE / "openvino_precision.py"), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"OpenVINO does not say what it computes in:\n{done.stderr[-2000:]}")
    said: dict[str, str] = json.loads(done.stdout)
    return said


if __name__ == "__main__":
    run_alone(command_for)
