"""What a family of models says of itself: `Family`, which each module of `headrace.families` makes. Imports neither torch nor transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headrace.checkpoint.config_keys import ConfigKeys, MediaKeys
from headrace.checkpoint.layer_config import EncoderConfig, SlidingRule
from headrace.checkpoint.media_config import AudioConfig, MediaConfig
from headrace.checkpoint.media_tokens import KindTokens, Tokens, Vocabulary
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.checkpoint.projector import Projector

if TYPE_CHECKING:
    from headrace.checkpoint.gguf import GgufFile  # numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """Differences between decoders of the blocks of `models/decoder.py`.

    qkv_bias, out_bias: biases of attention's projections; None = as `attention_bias` of the config says. qk_norm: q and k are normalised per head
    before the rotation. sandwich_norms: attention's and the feed-forward layer's outputs are normalised too, before they join the residual
    (Gemma). norm_offset: 1.0 where norms are stored minus one. scales_embeddings: token embeddings are multiplied by the root of their size.
    experts: layers with a mixture of experts: none, those that the config says, or all. mlp_name: the feed-forward layer's Hugging Face name.
    expert_names: (ours, theirs) of the matrices of an expert, where they differ. layer_norms: norms are LayerNorms without a bias. parallel:
    attention and the feed-forward layer both read what one norm gives, and both are added (Cohere). interleaved: pairs that are rotated are
    neighbours, not of the two halves of a head. rotates: whether layers without a sliding window rotate, too.
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    scales_embeddings: bool = False
    experts: Literal["none", "some", "all"] = "none"
    mlp_name: str = "mlp"
    expert_names: tuple[tuple[str, str], ...] = ()
    layer_norms: bool = False
    parallel: bool = False
    interleaved: bool = False
    rotates: Literal["all", "sliding"] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One model type of a text model.

    defaults: of the keys that its config.json may leave out, as transformers has them. common_names: the names that other families have for its
    keys. options: None = transformers' code runs it.
    name: of those that share an implementation, for logs. sliding: see `SlidingRule`.
    refused: reasons, by the key of the config that is set. is_inner: whether it is only found within multimodal models.
    """

    defaults: Mapping[str, Any]
    common_names: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    options: DecoderOptions | None = None
    sliding: SlidingRule = "all"
    refused: Mapping[str, str] = field(default_factory=dict)
    is_inner: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """Differences between encoders of the blocks of `models/encoder.py`.

    layers: prefix of the layers' tensors, before the number. qkv: names of the projections, or of the one that stacks them. out, attention_norm,
    up, down, mlp_norm: names of the other parts. final_norm: of the whole model; "" = none.
    pre_norm: norms are before attention and the feed-forward layer, and the first layer has none before attention; else they are after
    each, once the residual is added.
    gated: `up` stacks what is activated, and the factor on it.
    """

    layers: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    final_norm: str = ""
    pre_norm: bool = False
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """Names of the tables and of their norm. positions, types: "" = the family has none."""

    words: str
    norm: str
    positions: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """One model type of an encoder, of the BERT family.

    name: of those that share an implementation, for logs. prefix: that its tensors may have in a checkpoint. defaults: as of `Decoder`.
    common_names: the names that other families have for its keys. head: names of the two layers of a classifier. head_activation: between them;
    "" = as `classifier_activation` of the config says. head_norm: name of a norm between them, "" = none. unused: parts of names of tensors that
    a model without these heads does not need. norm_eps: of the norms; None = as the config says. after_padding: the first token has the position
    after that of padding, `pad_token_id` + 1 (fairseq). read: reads a config whose keys are not those of BERT.
    """

    name: str
    prefix: str
    defaults: Mapping[str, Any]
    common_names: Mapping[str, str] = field(default_factory=dict)
    embeddings: EmbeddingOptions
    blocks: EncoderOptions
    head: tuple[str, str]
    head_activation: str = ""
    head_norm: str = ""
    unused: tuple[str, ...] = ()
    norm_eps: float | None = None
    after_padding: bool = False
    read: Callable[[ConfigKeys, int], EncoderConfig] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """An architecture of GGUF files.

    model_type, architecture: the Hugging Face names. layer_names: names of a layer's parts, where they are not those of all decoders.
    config: keys of config.json beside those of all decoders, which it is given. interleaved: q and k have the halves of each head interleaved.
    norms_plus_one: norms are stored plus one. name: gives the Hugging Face name of a tensor; of an encoder, all of whose keys `config` gives.
    """

    model_type: str
    architecture: str
    layer_names: Mapping[str, str] = field(default_factory=dict)
    config: "Callable[[GgufFile, dict[str, Any]], dict[str, Any]]" = lambda file, config: {}
    interleaved: bool = False
    norms_plus_one: bool = False
    name: "Callable[[GgufFile, str], str] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """A model type around a text model and an encoder of images, which `encoder` in the `vision.py` of the family makes.

    read: reads the whole config.json and its vision_config; raises NotServedError with the reason why its images are not served, and ModelError for
    invalid values. tokens: what stands for an image: gives a `KindTokens` of the config, the processor's settings, the
    `Tokens` and config.json, or raises ModelError. image_processor: of transformers, where the checkpoint names none; see `preprocessor_config.py`.
    settings: the processor's, as the family has them. video_processor, video_tokens: the same of videos, if it takes them; the latter is given the
    vocabulary. tied: what it says of the output projection if its config does not; None = the text model says it. flat_text: the type of the text
    model in older configs, which have its keys beside their own. text_prefix: of the text model's tensors. joins_line_ends: what stands for an
    image begins and ends with line ends, which join those of the text. several_are_squares: of several images in a prompt, each is one square.
    """

    read: Callable[[MediaKeys, MediaKeys], MediaConfig]
    tokens: Callable[[MediaConfig, ImageSettings, Tokens, dict[str, Any]], KindTokens]
    image_processor: str
    settings: Callable[[MediaConfig, ImageSettings], ImageSettings] | None = None
    video_processor: str = ""
    video_tokens: Callable[[MediaConfig, ImageSettings, Vocabulary, dict[str, Any]], KindTokens] | None = None
    tied: bool | None = None
    flat_text: str = ""
    text_prefix: str = "model.language_model."
    joins_line_ends: bool = False
    several_are_squares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """A model type around a text model and an encoder of sounds, which `encoder` in the `audio.py` of the family makes. read: as of `Vision`, with
    the audio_config. tokens: what stands for a sound: gives a `KindTokens` of the config and the `Tokens`."""

    read: Callable[[MediaKeys, MediaKeys], AudioConfig]
    tokens: Callable[[AudioConfig, Tokens], KindTokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family, by the model types in config.json. decoders, encoders: of texts. vision, audio: models around a decoder. gguf: by architecture.
    projectors: by the `clip.projector_type` of GGUF files with a vision encoder."""

    decoders: Mapping[str, Decoder] = field(default_factory=dict)
    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    vision: Mapping[str, Vision] = field(default_factory=dict)
    audio: Mapping[str, Audio] = field(default_factory=dict)
    gguf: Mapping[str, Gguf] = field(default_factory=dict)
    projectors: Mapping[str, Projector] = field(default_factory=dict)
