"""The vision encoder beside a GGUF text model: finds and opens its file, gives it a config and a processor, and its tensors Hugging Face's names.

What is a family's own is in its `Projector`. Runs where configs are read and models are loaded. No torch.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoint.families import all_families
from headrace.checkpoint.files import best_mmprojs, first_part, is_mmproj
from headrace.checkpoint.gguf import GgufFile, opened
from headrace.checkpoint.gguf_checkpoint import GgufCheckpoint, config_of
from headrace.checkpoint.gguf_names import hf_config
from headrace.checkpoint.gguf_tensors import EncoderSource, check_pairs
from headrace.checkpoint.hub_cache import COMMIT
from headrace.checkpoint.model_config import ModelConfig, parse_hf_config, read_media
from headrace.checkpoint.preprocessor_config import image_settings
from headrace.checkpoint.projector import MediaFiles, Projector, VisionKeys
from headrace.errors import ModelError

AUTO, NONE = "auto", "none"
_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_NUMBER = re.compile(r"\.(\d+)\.")


class Mmproj:
    """A vision encoder's file beside that of a text model.

    described: with the text model. has_tokens: see `VisionKeys`. sources: of its tensors, by Hugging Face's names.
    """

    def __init__(self, path: Path, text: GgufFile, text_config: dict[str, Any]) -> None:
        """text_config: the config.json of the text model. Raises ModelError if the file is no vision encoder of a known type, or of another model."""
        self.file = file = GgufFile(path)
        own = _projector(file, text)
        keys = VisionKeys(file, text)
        name, axis = own.output
        given, taken = _matrix_shape(file, name)[axis], text_config["hidden_size"]
        if given != taken:
            raise ModelError(
                f"{path.name} is of another model than {text.path.name}: it gives {given} elements for each token, and the text model takes {taken}"
            )
        tied = {"tie_word_embeddings": text_config["tie_word_embeddings"]}
        self.described = MediaFiles(own.config(keys) | tied | {"text_config": text_config}, own.processor(keys))
        self.has_tokens = keys.has_tokens
        media, reason = read_media(self.described.config, origin=path.name)
        if media is None:
            raise ModelError(f"{path.name}: {reason}")
        try:
            image_settings(self.described.processor)
        except ModelError as error:
            raise ModelError(f"{path.name}: {error.message}") from None
        self.sources = _sources(file, own, keys)

    @property
    def types(self) -> str:
        """Which types its tensors have, in words."""
        counts = Counter(tensor.type for tensor in self.file.tensors.values())
        return ", ".join(
            f"{count} {kind.name}{'' if kind.block_values == 1 else ', dequantised'}" for kind, count in counts.items()
        )


class GgufPair(GgufCheckpoint):
    """A GGUF file with a vision encoder in another one."""

    def __init__(self, path: Path, encoder: Mmproj) -> None:
        super().__init__(path)
        self.config = _config(self.config, encoder)
        self.notes += (f"vision encoder: {encoder.file.path.name} ({encoder.types})",)
        self._files.append(encoder.file)
        self._sources |= encoder.sources


def open_gguf(path: Path, mmproj: str) -> GgufCheckpoint:
    """A GGUF file with its vision encoder, if it has one: see `find_mmproj`."""
    encoder, reason = find_mmproj(path, mmproj)
    if encoder is not None:
        return GgufPair(path, encoder)
    checkpoint = GgufCheckpoint(path)
    if reason:
        checkpoint.config = msgspec.structs.replace(checkpoint.config, vision_unsupported_reason=reason)
        checkpoint.notes += (f"vision encoder: none, {reason}",)
    return checkpoint


def gguf_config(path: Path, mmproj: str) -> ModelConfig:
    """The config of `open_gguf`."""
    config, (encoder, reason) = config_of(opened(path)), find_mmproj(path, mmproj)
    if encoder is not None:
        return _config(config, encoder)
    return msgspec.structs.replace(config, vision_unsupported_reason=reason)


def _config(text: ModelConfig, encoder: Mmproj) -> ModelConfig:
    whole = parse_hf_config(encoder.described.config, origin=encoder.file.path.name)
    return msgspec.structs.replace(whole, sampling_defaults=text.sampling_defaults, quantization=text.quantization)


def media_files(path: Path, mmproj: str) -> MediaFiles | None:
    """Of a GGUF file with a vision encoder in another one; else None."""
    encoder, _ = find_mmproj(path, mmproj)
    return None if encoder is None else encoder.described


def find_mmproj(model: Path, wanted: str) -> tuple[Mmproj | None, str]:
    """The vision encoder of a GGUF text model, or why there is none although there is a file.

    wanted: a file, `none`, or `auto`: the one beside the model that fits it; of several precisions of one model F16, else BF16, else F32. Raises
    ModelError for a file that is named and cannot be used, and if those of several models fit.
    """
    if wanted == NONE:
        return None, ""
    found = beside(model) if wanted == AUTO else [Path(wanted).expanduser()]
    if not found:
        return None, ""
    text = opened(model)
    text_config = hf_config(text)
    makes_text = text_config["model_type"] not in all_families().encoders
    if wanted != AUTO:
        if not found[0].exists():
            raise ModelError(f"--mmproj {wanted}: there is no such file")
        if not makes_text:
            raise ModelError(f"--mmproj {wanted}: {model.name} is no model that generates text")
        return Mmproj(found[0], text, text_config), ""
    fitting: dict[str, Mmproj] = {}
    reasons: list[str] = []
    for path in found if makes_text else []:
        try:
            encoder = Mmproj(path, text, text_config)
            if not encoder.has_tokens and _has_others(model):
                raise ModelError(f"{path.name} may be of another model of its folder; name it as --mmproj {path.name}")
            fitting[path.name] = encoder
        except ModelError as error:
            reasons.append(error.message)
    best = best_mmprojs(fitting)
    if len(best) > 1:
        raise ModelError(
            f"{len(best)} vision encoders beside {model.name} fit it; name one as --mmproj FILE, or serve text alone with --mmproj none: "
            f"{', '.join(best)}"
        )
    return (fitting[best[0]], "") if best else (None, "; ".join(reasons))


def _has_others(model: Path) -> bool:
    """Whether the folder of a model has other models."""
    files = {first_part(file.name) for file in model.parent.glob("*.gguf") if not is_mmproj(file.name)}
    return len(files | {model.name}) > 1


def beside(model: Path) -> list[Path]:
    """The vision encoders in the folder of a model; without one, of the Hugging Face cache those in the snapshot's own folder."""
    folders = [model.parent]
    folders += [folder for folder in model.parents if COMMIT.fullmatch(folder.name)][:1]
    for folder in folders:
        found = sorted(file for file in folder.glob("*.gguf") if is_mmproj(file.name) and file != model)
        if found:
            return found
    return []


def _projector(file: GgufFile, text: GgufFile) -> Projector:
    architecture = file.get("general.architecture")
    if architecture != "clip":
        raise ModelError(f"{file.path.name} is no vision encoder: its architecture is {architecture!r:.80}, not 'clip'")
    kind = file.get("clip.projector_type", file.get("clip.vision.projector_type", "mlp"))
    own = all_families().projectors.get(kind) if isinstance(kind, str) else None
    if own is None:
        raise ModelError(
            f"{file.path.name}: projector type {kind!r:.80} is not supported; known: {', '.join(all_families().projectors)}"
        )
    theirs = text.get("general.architecture")
    if own.architectures and theirs not in own.architectures:
        raise ModelError(
            f"{file.path.name}: projector type {kind} goes with text models of architecture {', '.join(own.architectures)}, "
            f"and {text.path.name} is of {theirs!r:.80}"
        )
    return own


def _matrix_shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ModelError(f"{file.path.name}: tensor {name} is missing")
    shape = file.tensors[name].shape
    if len(shape) != 2:
        raise ModelError(f"{file.path.name}: tensor {name} has {len(shape)} dimensions, not 2")
    return shape


def _sources(file: GgufFile, own: Projector, keys: VisionKeys) -> dict[str, EncoderSource]:
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if keys.swaps_halves else {}
    heads = keys.count("attention.head_count")
    places = _places(file, own)
    sources: dict[str, EncoderSource] = {}
    for tensor in file.tensors.values():
        if tensor.name in own.unused:
            continue
        layer = _LAYER.fullmatch(tensor.name)
        order = None
        if layer is not None:
            number, part, kind = layer.groups()
            part = swapped.get(part, part)
            ours = own.layer.get(f"{part}.{kind}") or (f"{own.layer[part]}.{kind}" if part in own.layer else None)
            name = None if ours is None else own.layers.format(number) + ours
            order = heads if own.interleaved and part in ("attn_q", "attn_k") else None
        else:
            name = _other_name(tensor.name, own, places)
        if name is None:
            raise ModelError(f"{file.path.name}: tensor {tensor.name} is not known in a vision encoder of its type")
        check_pairs(file, tensor, order)
        source = sources.setdefault(
            name,
            EncoderSource(file, [], order, tensor.name in own.norms_plus_one, tensor.name in own.three_dimensions),
        )
        source.parts.append(tensor)
    for source in sources.values():
        _check_parts(file, source)
    return sources


def _check_parts(file: GgufFile, source: EncoderSource) -> None:
    """Puts q, k and v in this order, and frames in theirs. Raises ModelError unless they are of one size."""
    source.parts.sort(key=lambda part: ("qkv".find(part.name.partition("attn_")[2][:1] or " "), part.name))
    if len({part.shape for part in source.parts}) > 1:
        names = ", ".join(part.name for part in source.parts)
        raise ModelError(f"{file.path.name}: tensors {names}, which are parts of one, differ in shape")


def _places(file: GgufFile, own: Projector) -> dict[str, int]:
    """Of the layers that have tensors of their own elsewhere, by number: which of them each is."""
    numbers = {
        int(found[1])
        for name in file.tensors
        if not name.startswith("v.blk.") and (found := _NUMBER.search(name)) and _pattern(_module(name)) in own.names
    }
    return {str(number): place for place, number in enumerate(sorted(numbers))}


def _pattern(module: str) -> str:
    """The name of a module, with {} for its number."""
    return _NUMBER.sub(".{}.", module, count=1)


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _other_name(name: str, own: Projector, places: dict[str, int]) -> str | None:
    module = _module(name)
    ending = name.removeprefix(module)
    if name in own.names:
        return own.names[name]
    if module in own.names:
        return own.names[module] + ending
    number, ours = _NUMBER.search(name), own.names.get(_pattern(module))
    if number is None or ours is None or number[1] not in places:
        return None
    return ours.format(places[number[1]]) + ending
