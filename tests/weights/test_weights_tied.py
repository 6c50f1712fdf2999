"""Models whose config ties the output projection to the embedding: what is loaded, updated, read and saved is the same matrix."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from weights_harness import PROMPTS, engine_of, fresh, save, tensors_of, tokens

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_head(folder: Path, seed: int, factor: float) -> str:
    """A tied model whose file has a head that is not its embedding."""
    path = save(folder, seed, tied=True)
    tensors = tensors_of(path)
    tensors[HEAD] = tensors[EMBEDDING].flip(0) * factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_head(tmp_path_factory.mktemp("own") / "first", 1, 1.25)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_head(tmp_path_factory.mktemp("own") / "second", 2, 0.75)


def greedy_of_transformers(path: str) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    count = 12
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in PROMPTS]


def test_a_head_of_its_own_is_loaded_updated_and_read(first, second):
    old, new = tensors_of(first), tensors_of(second)
    want_old, want_new = greedy_of_transformers(first), greedy_of_transformers(second)
    with engine_of(first) as engine:
        assert tokens(engine) == want_old
        assert engine.get_weights_by_name(HEAD, 3) == old[HEAD][:3].tolist()
        assert engine.get_weights_by_name(EMBEDDING, 3) == old[EMBEDDING][:3].tolist()
        assert engine.update_weights_from_disk(second)[0]
        assert tokens(engine) == want_new
        assert engine.get_weights_by_name(HEAD, 3) == new[HEAD][:3].tolist()
        assert engine.update_weights_from_tensor(list(old.items()))[0]
        assert tokens(engine) == want_old
        # Each by itself: the other stays as it is.
        assert engine.update_weights_from_tensor([(EMBEDDING, new[EMBEDDING])])[0]
        assert engine.get_weights_by_name(HEAD, 3) == old[HEAD][:3].tolist()


def test_a_tied_head_is_read_as_the_embedding_and_none_of_its_own_replaces_it(old_tied, first):
    embedding = tensors_of(old_tied)[EMBEDDING]
    with engine_of(old_tied) as engine:
        want = tokens(engine)
        assert engine.get_weights_by_name(HEAD, 3) == embedding[:3].tolist()
        success, message = engine.update_weights_from_disk(first)
        assert not success
        assert "tie_word_embeddings is False, not True" in message
        assert tokens(engine) == want


def test_what_is_saved_has_the_head(first, tmp_path):
    with engine_of(first, save_dir=str(tmp_path)) as engine:
        want = tokens(engine)
        assert engine.save_sharded_state("saved")[0]

    assert fresh(str(tmp_path / "saved"), tokenizer_path=first) == want


def test_ranks_have_their_parts_of_the_head(first):
    want = greedy_of_transformers(first)
    with engine_of(first, single_process=False, tp_size=2) as engine:
        assert tokens(engine) == want
        assert engine.get_weights_by_name(HEAD, 3) == tensors_of(first)[HEAD][:3].tolist()
