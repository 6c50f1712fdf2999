"""What belongs to one family of models is in one place, which is found by its name."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import headrace.families
from headrace.checkpoint import families
from headrace.checkpoint.model_config import parse_hf_config
from headrace.config.machine import least_weight_bytes
from headrace.config.resolve import refuse_early
from headrace.config.server_args import ServerArgs
from headrace.models.registry import model_class_for

SOURCE = Path(headrace.families.__file__).parents[1]
OTHER_NAMESPACES = (SOURCE / "parsers", SOURCE / "text" / "tokenizers")
"""Names of output formats and of tokenizers, some of which are those of families."""


def model_types() -> list[str]:
    """Each as often as a family has it."""
    tables = ("decoders", "encoders", "vision", "audio")
    return [name for family in families.families().values() for table in tables for name in getattr(family, table)]


def names() -> set[str]:
    """Model types, and architectures of Hugging Face and of GGUF files."""
    return {
        *model_types(),
        *families.all_families().gguf,
        *(own.architecture for own in families.all_families().gguf.values()),
    }


def literals(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_other_room_has_the_name_of_a_family():
    rooms = (SOURCE / "families", *OTHER_NAMESPACES)
    others = [path for path in SOURCE.rglob("*.py") if not any(room in path.parents for room in rooms)]
    found = {str(path.relative_to(SOURCE)): sorted(literals(path) & names()) for path in others}

    assert len(others) > 300
    assert {path: named for path, named in found.items() if named} == {}


def test_every_module_is_a_family_with_names_of_its_own():
    modules = {path.stem for path in (SOURCE / "families").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(families.families()) == modules - {"__init__", "__pycache__"}
    assert [name for name, count in Counter(model_types()).items() if count > 1] == []
    for family in families.families().values():
        assert family.decoders or family.encoders or family.vision or family.audio
        for own in family.gguf.values():
            assert own.model_type in family.decoders or own.model_type in family.encoders
        for own in family.vision.values():
            assert bool(own.video_processor) == (own.video_tokens is not None)


@pytest.mark.parametrize("model_type", [*families.all_families().vision, *families.all_families().audio])
def test_every_family_with_images_or_sounds_has_an_encoder(model_type: str):
    assert callable(
        families.code(model_type, "vision" if model_type in families.all_families().vision else "audio").encoder
    )


def test_what_families_say_of_themselves_needs_no_torch():
    program = (
        "import sys; from headrace.checkpoint.families import families\n"
        "print(len(families()), *{'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(families.families()))]


def test_a_new_file_is_a_family_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Under --model-impl headrace, with its memory checked: no list knows it but the folder."""
    (tmp_path / "brand_new.py").write_text(
        "from headrace.checkpoint.family import Decoder, DecoderOptions, Family\n"
        "FAMILY = Family(decoders={'brand_new': Decoder(name='brand_new', options=DecoderOptions(), defaults={})})\n"
    )
    cached = (families.families, families.all_families, families.native_types)
    monkeypatch.setattr(headrace.families, "__path__", [*headrace.families.__path__, str(tmp_path)])
    for one in cached:
        one.cache_clear()
    try:
        config = parse_hf_config({"model_type": "brand_new"})
        refuse_early(ServerArgs(model_path="x", model_impl="headrace"), config, False, 1 << 40)
        assert least_weight_bytes(config, 2.0) > 1 << 30
        assert model_class_for(config, "headrace").name == "brand_new"
    finally:
        sys.modules.pop("headrace.families.brand_new", None)
        vars(headrace.families).pop("brand_new", None)
        for one in cached:
            one.cache_clear()
