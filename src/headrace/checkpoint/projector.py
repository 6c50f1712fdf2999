"""What a family says of its vision encoder in a GGUF file of its own (`mmproj-*.gguf`): a `Projector` for each `clip.projector_type`.

Format: the keys `clip.*` and the tensors `v.*` and `mm.*` of https://github.com/ggml-org/llama.cpp (tools/mtmd, gguf-py). Imports neither numpy nor
torch; files are opened by `gguf_mmproj.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headrace.errors import ModelError

if TYPE_CHECKING:
    from headrace.checkpoint.gguf import GgufFile

_PLACEHOLDERS = ("unknown_token_id", "padding_token_id")

CLIP_LAYER: Mapping[str, str] = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Parts of a layer of CLIP and SigLIP."""


def clip_names(prefix: str) -> dict[str, str]:
    """Tensors around the layers of CLIP and SigLIP."""
    return {
        "v.class_embd": f"{prefix}embeddings.class_embedding",
        "v.patch_embd": f"{prefix}embeddings.patch_embedding",
        "v.position_embd": f"{prefix}embeddings.position_embedding",
        "v.pre_ln": f"{prefix}pre_layrnorm",
        "v.post_ln": f"{prefix}post_layernorm",
    }


class MediaFiles(NamedTuple):
    """Of a model with images whose checkpoint is no folder: what its config.json and its preprocessor_config.json would be."""

    config: dict[str, Any]
    processor: dict[str, Any]


class VisionKeys:
    """The metadata `clip.vision.*` of an encoder's file, its tensors, and the tokens of the text model. Methods raise ModelError.

    has_tokens: of those that were asked for, the text model has one at least, so it was trained with images.
    """

    def __init__(self, file: "GgufFile", text: "GgufFile") -> None:
        self.file, self._text = file, text
        self.has_tokens = False

    def count(self, key: str, default: int | None = None) -> int:
        return self.file.count(f"clip.vision.{key}", default)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.file.tensors

    def rows(self, name: str) -> int:
        return self.file.rows(name)

    @property
    def activation(self) -> Literal["gelu", "silu", "quick_gelu"]:
        if self.file.get("clip.use_gelu"):
            return "gelu"
        return "silu" if self.file.get("clip.use_silu") else "quick_gelu"

    @property
    def swaps_halves(self) -> bool:
        """Whether the two matrices of feed-forward layers have each other's names, as in files of older converters."""
        down = self.file.tensors.get("v.blk.0.ffn_down.weight")
        size = self.count("embedding_length")
        return down is not None and down.shape[-1] == size != down.shape[0]

    def tower(self) -> dict[str, Any]:
        """`vision_config` with the names that most have."""
        up = self.file.tensors.get(f"v.blk.0.ffn_{'down' if self.swaps_halves else 'up'}.weight")
        if up is None:
            raise ModelError(f"{self.file.path.name}: tensor v.blk.0.ffn_up.weight is missing")
        return {
            "hidden_size": self.count("embedding_length"),
            "intermediate_size": up.shape[0],
            "num_hidden_layers": self.count("block_count"),
            "num_attention_heads": self.count("attention.head_count"),
            "image_size": self.count("image_size"),
            "patch_size": self.count("patch_size"),
            "layer_norm_eps": self.file.decimal("clip.vision.attention.layer_norm_epsilon"),
        }

    def statistics(self) -> dict[str, Any]:
        """Mean and deviation of pixels, of `preprocessor_config.json`."""
        return {name: self.file.decimals(f"clip.vision.{name}") for name in ("image_mean", "image_std")}

    def own_token(self, text: str) -> int:
        """The id of a token that the text model must have."""
        found = self._token(text)
        if found is None:
            raise ModelError(
                f"{self.file.path.name} is of another model than {self._text.path.name}, whose tokenizer has no {text}"
            )
        return found

    def row_token(self, text: str) -> int:
        """The token that stands for rows of an image. llama.cpp needs none, so vocabularies may lack it: then it is one that no text has."""
        found = self._token(text)
        for token in (found, *(self._text.get(f"tokenizer.ggml.{key}") for key in _PLACEHOLDERS)):
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                return token
        raise ModelError(
            f"{self._text.path.name}: its tokenizer has no {text}, and no token that could stand for images"
        )

    def _token(self, text: str) -> int | None:
        found = (
            self._text.strings("tokenizer.ggml.tokens").find(text) if "tokenizer.ggml.tokens" in self._text else None
        )
        self.has_tokens |= found is not None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """The vision encoder of one `clip.projector_type`.

    architectures: of the text models' files that it goes with; empty = of all. output: the tensor that has the text model's hidden_size, last of its
    kind, and the dimension in which. config: the keys of config.json around those of the text model; processor: preprocessor_config.json.
    layer: names of a layer's parts (`v.blk.N.*`), layers: the prefix that they get with `{}` for N. names: those of all others, with or without
    `.weight` and `.bias`, and with `{}` for the place of a layer among those that have such a tensor. Several of the same name are its rows one
    after the other, or, of a convolution over frames, its frames. unused: tensors that are not needed.
    interleaved: q and k have the halves of each head interleaved. norms_plus_one: norms that are stored plus one. three_dimensions: tensors that
    Hugging Face has with leading dimensions of one.
    """

    architectures: tuple[str, ...]
    output: tuple[str, int]
    config: Callable[[VisionKeys], dict[str, Any]]
    processor: Callable[[VisionKeys], dict[str, Any]]
    layers: str
    layer: Mapping[str, str]
    names: Mapping[str, str]
    unused: frozenset[str] = frozenset()
    interleaved: bool = False
    norms_plus_one: frozenset[str] = field(default_factory=frozenset)
    three_dimensions: frozenset[str] = field(default_factory=frozenset)
