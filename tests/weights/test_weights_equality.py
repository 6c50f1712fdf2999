"""After an update the engine answers as one that started from those weights, whatever way they came and however they are kept."""

import pytest
from weights_harness import engine_of, fresh, tensors_of, tokens

from headrace.checkpoint.weight_formats import names_on_cpu

KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "activations": "float32"},
    "bfloat16 activations": {"dtype": "bfloat16", "activations": "bfloat16"},
    # An update keeps the KV cache as it is, and a fresh engine measures which one its weights bear: it is named.
    **{
        name: {"dtype": "float32", "quantization": name, "kv_cache_dtype": "int16" if name == "int16" else "int8"}
        for name in names_on_cpu()
    },
    # One of them with an embedding in bfloat16.
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_updated_engine_answers_as_a_fresh_one(kind, tied, request):
    old, new = (request.getfixturevalue(f"{name}_tied" if tied else name) for name in ("old", "new"))
    want_old, want_new = fresh(old, **KINDS[kind]), fresh(new, **KINDS[kind])
    assert want_old != want_new
    with engine_of(old, **KINDS[kind]) as engine:
        assert tokens(engine) == want_old
        assert engine.update_weights_from_disk(new, weight_version="2")[0]
        assert tokens(engine) == want_new
        assert engine.update_weights_from_tensor(tensors_of(old).items())[0]
        assert tokens(engine) == want_old
        # One tensor at a time: most are parts of a stack whose other parts must stay as they are, to the bit.
        for name, tensor in tensors_of(new).items():
            assert engine.update_weights_from_tensor([(name, tensor)]) == (True, "updated tensors: 1")
        assert tokens(engine) == want_new
