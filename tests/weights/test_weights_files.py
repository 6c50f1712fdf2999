"""What serves does not depend on the files that it was read from, and takes no more memory than the old weights did."""

import shutil
from pathlib import Path

import pytest
from weights_harness import engine_of, fresh, tokens

from headrace.execution import update_weights


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("way", ["start", "update"])
def test_a_checkpoint_that_is_written_over_does_not_change_the_weights_that_serve(way, native, old, new, tmp_path):
    """In place, and of the same size: as a trainer does that saves to one folder again and again."""
    folder = Path(shutil.copytree(old, tmp_path / "copy"))
    options = {"disable_native_kernels": not native, "disable_weight_cache": True}
    with engine_of(str(folder) if way == "start" else new, **options) as engine:
        if way == "update":
            assert engine.update_weights_from_disk(str(folder))[0]
        want = tokens(engine)
        engine.flush_cache()
        with (folder / "model.safetensors").open("r+b") as file:
            file.write((Path(new) / "model.safetensors").read_bytes())
        assert tokens(engine) == want
    if native:
        assert want == fresh(old)


def test_memory_is_given_back_after_an_update_whether_it_succeeds_or_not(old, new, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(update_weights, "give_back_free_memory", lambda: calls.append(1))
    with engine_of(old) as engine:
        assert engine.update_weights_from_disk(new)[0]
        assert len(calls) == 1
        assert not engine.update_weights_from_disk(str(tmp_path))[0]
        assert len(calls) == 2
