"""What OpenVINO computes a model in on this processor, as JSON: openvino_precision.py MODEL_DIR. Runs in bench/compare/.venv.

In a process of its own: the model is compiled for nothing else.
"""

import json
import sys
from pathlib import Path

import openvino


def main() -> None:
    """Compile, ask, print."""
    compiled = openvino.Core().compile_model(Path(sys.argv[1]) / "openvino_model.xml", "CPU")
    said = {
        "activations": compiled.get_property("INFERENCE_PRECISION_HINT").to_string(),
        "kv_cache_dtype": compiled.get_property("KV_CACHE_PRECISION").to_string(),
        "dynamic_quantization_group_size": str(compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
