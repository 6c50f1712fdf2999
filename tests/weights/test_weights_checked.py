"""What SGLang's trainers ask to see whether an update has replaced every weight: snapshot, random values, update, compare."""

import hashlib

import pytest
from weights_harness import engine_of, fresh, tensors_of, tokens

from headrace.errors import RequestError

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folders(old, new, old_tied):
    return old, new, old_tied


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_a_comparison_finds_what_an_update_has_left_out(folders, options):
    old, new, _ = folders
    tensors = tensors_of(old)
    with engine_of(old, **options) as engine:
        before = tokens(engine)
        found = engine.check_weights("compare")
        assert (found["success"], "no snapshot" in found["message"]) == (False, True)
        assert engine.check_weights("snapshot") == {
            "success": True,
            "message": f"weights in the snapshot: {len(tensors)}",
        }
        as_before = {"success": True, "message": f"weights as in the snapshot: {len(tensors)}"}
        assert engine.check_weights("compare") == as_before
        assert engine.check_weights("reset_tensors")["success"]
        assert tokens(engine) != before
        found = engine.check_weights("compare")
        assert not found["success"]
        assert found["message"].startswith(f"{len(tensors)} of {len(tensors)} weights are not those of the snapshot")
        assert engine.update_weights_from_tensor([(name, one) for name, one in tensors.items() if name != NORM])[0]
        found = engine.check_weights("compare")
        assert not found["success"]
        assert found["message"].endswith(f"weights are not those of the snapshot: {NORM}")
        assert engine.check_weights("compare", skip_tensor_list=["model.norm"])["success"]
        assert engine.update_weights_from_tensor([(NORM, tensors[NORM])])[0]
        assert engine.check_weights("compare") == as_before
        assert tokens(engine) == before
        assert engine.update_weights_from_disk(new)[0]
        assert not engine.check_weights("compare")["success"]


def test_checksums_are_of_the_weights_and_of_nothing_else(folders):
    found = []
    for folder in (*folders[:2], folders[0]):
        with engine_of(folder) as engine:
            found.append(engine.check_weights())
    assert found[0] == found[2]
    (first,), (second,) = found[0]["ranks"], found[1]["ranks"]
    assert set(first["checksums"]) == set(tensors_of(folders[0]))
    assert not set(first["checksums"].values()) & set(second["checksums"].values())
    norm = tensors_of(folders[0])[NORM]
    want = hashlib.sha256(f"torch.float32 [{len(norm)}] ".encode() + norm.numpy().tobytes()).hexdigest()
    assert first["checksums"][NORM] == want
    assert first["per_gpu_checksum"] == found[0]["per_engine_checksum"] != found[1]["per_engine_checksum"]


def test_tied_weights_and_what_is_left_out_when_all_get_random_values(folders):
    with engine_of(folders[2]) as engine:
        engine.check_weights("snapshot")
        assert engine.check_weights("reset_tensors", skip_tensor_list=["layers"])["success"]
        assert engine.check_weights("compare", skip_tensor_list=["embed", "norm.weight"])["success"]
        assert not engine.check_weights("compare", skip_tensor_list=["layers"])["success"]
        assert engine.update_weights_from_disk(folders[2])[0]
        assert engine.check_weights("compare")["success"]
        assert tokens(engine) == fresh(folders[2])
        assert engine.release_memory_occupation(["weights"])[0]
        assert not engine.check_weights()["success"]
        assert engine.resume_memory_occupation()[0]
        with pytest.raises(RequestError, match="checksum, snapshot, compare or reset_tensors"):
            engine.check_weights("reset")
        assert engine.post_process_weights(post_process_quantization=True)[0]
