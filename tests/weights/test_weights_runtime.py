"""The same methods over HTTP, on a server process."""

import numpy as np
import pytest
from weights_harness import GREEDY, PROMPTS, fresh, tensors_of

from headrace.api.runtime import Runtime
from headrace.errors import RequestError


def test_a_runtime_has_the_methods_of_an_engine(old, new):
    want_old, want_new = fresh(old), fresh(new)
    options = {
        "num_threads": 1,
        "max_total_tokens": 2048,
        "dtype": "float32",
        "admin_api_key": "secret",
        "skip_server_warmup": True,
    }
    with Runtime(model_path=old, log_level="warning", **options) as server:

        def tokens():
            return [output["output_ids"] for output in server.generate(input_ids=PROMPTS, sampling_params=GREEDY)]

        assert tokens() == want_old
        assert server.update_weights_from_disk(new, weight_version="2") == (True, "loaded layers: 15")
        assert tokens() == want_new
        arrays = [(name, tensor.numpy()) for name, tensor in tensors_of(old).items()]
        assert server.update_weights_from_tensor(arrays, weight_version="3")[0]
        assert tokens() == want_old
        success, message = server.update_weights_from_tensor([("model.norm.weight", np.ones(3, np.float32))])
        assert not success
        assert "[3], not [64]" in message
        norm = tensors_of(old)["model.norm.weight"]
        assert server.get_weights_by_name("model.norm.weight", 5) == norm[:5].tolist()
        with pytest.raises(RequestError, match="no weight"):
            server.get_weights_by_name("nothing")
        with pytest.raises(RequestError, match="rank_offset"):
            server.init_weights_update_group("127.0.0.1", 1, 0, 2)
        assert not server.init_weights_update_group("127.0.0.1", 1, 1, 2, timeout_s=0.5)[0]
        assert not server.update_weights_from_distributed(["a"], ["float32"], [[1]])[0]
        assert server.pause_generation("retract")[0]
        assert server.release_memory_occupation(["weights"])[0]
        assert server.resume_memory_occupation()[0]
        assert server.update_weight_version("4")[0]
        assert server.continue_generation()[0]
        output = server.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert output["output_ids"] == want_old[0]
        assert output["meta_info"]["weight_version"] == "4"
