"""OpenVINO GenAI's continuous batching behind the small server in openvino_completions.py."""

from peer_process import HERE, MODELS, PEERS_VENV, Precision, ServerCommand, run_alone

FORMATS = {"16": "fp16", "8": "int8", "4": "int4"}


def command_for(precision: Precision, port: int) -> ServerCommand:
    """Start the continuous batching pipeline of OpenVINO GenAI."""
    python = PEERS_VENV / "bin" / "python"
    model = MODELS / f"openvino-{FORMATS[precision]}"
    return ServerCommand(
        f"OpenVINO {FORMATS[precision]}",
        [str(python), str(HERE / "openvino_completions.py"), str(model), "--port", str(port)],
        needs=(python, model / "openvino_model.xml"),
    )


if __name__ == "__main__":
    run_alone(command_for)
