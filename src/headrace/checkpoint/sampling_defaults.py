"""The sampling values that a model brings along: from `generation_config.json`, the `general.sampling.*` keys of a GGUF file, or the cards of known
models. Whether they are used says `--sampling-defaults`. No torch; used in any process.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.errors import ModelError
from headrace.plain_types import plain_reason

_OFF: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of a model; None = not set, or off.

    origin: where they come from, for people; "" when the model brings none. not_followed: what the model's settings ask for besides, and
    does not happen here.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    origin: str = ""
    not_followed: tuple[str, ...] = ()

    def values(self) -> dict[str, float]:
        """What a request runs with that names none of them."""
        stated = {name: getattr(self, name) for name in _OFF}
        return {name: off if stated[name] is None else stated[name] for name, off in _OFF.items()}

    def summary(self) -> str:
        values = self.values().items()
        stated = [f"{name} {value:g}" for name, value in values if name == "temperature" or value != _OFF[name]]
        return f"{', '.join(stated)} ({self.origin or 'the model brings none'})"


BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0.0 <= value < math.inf, "at least 0"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "above 0 and at most 1"),
    "top_k": (lambda value: value == -1 or 1 <= value < 2**31, "0 or -1 (off), or at least 1"),
    "min_p": (lambda value: 0.0 <= value <= 1.0, "between 0 and 1"),
    "repetition_penalty": (lambda value: 0.0 < value <= 2.0, "above 0 and at most 2"),
}
"""What a request may have, see `sampling.params`."""

_NOT_FOLLOWED: dict[str, tuple[object, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "diversity_penalty": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "sequence_bias": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "stop_strings": (),
    "dola_layers": (),
    "watermarking_config": (),
}
"""Fields of a generation_config.json that change which tokens transformers gives, and the values with which they ask for nothing (beside
null and what is empty)."""

_GGUF_NOT_FOLLOWED: dict[str, tuple[object, ...]] = {"mirostat": (0,), "xtc_probability": (0,)}

_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""llama.cpp's converter takes them from the model's generation_config.json: https://github.com/ggml-org/llama.cpp/pull/17120."""

_QWEN2 = r"qwen2(\.5)?\b(?!.*\bmath\b)"
_CARDS: tuple[tuple[str, str, float, float | None, int | None, float | None], ...] = (
    # The example of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, the same for 360M and 1.7B.
    (r"smollm2\b", "SmolLM2's model card", 0.2, 0.9, None, None),
    # generation_config.json of https://huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B and the other distilled ones.
    (r"deepseek r1\b", "DeepSeek-R1's generation_config.json", 0.6, 0.95, None, None),
    # https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507 and Qwen3-Coder-30B-A3B-Instruct, generation_config.json.
    (r"qwen3 coder\b", "Qwen3-Coder's generation_config.json", 0.7, 0.8, 20, 1.05),
    (r"qwen3\b.*\binstruct\b.*", "Qwen3-Instruct's generation_config.json", 0.7, 0.8, 20, None),
    # https://huggingface.co/Qwen/Qwen3-0.6B and the other sizes, generation_config.json; the thinking models of 2507 likewise.
    (r"qwen3\b(?!.*\bbase\b)", "Qwen3's generation_config.json", 0.6, 0.95, 20, None),
    # generation_config.json of https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct, -1.5B- and -7B-Instruct; Qwen2's are the same.
    (_QWEN2 + r".*\b(0\.5|1\.5)b\b.*\binstruct\b", "Qwen2.5's generation_config.json", 0.7, 0.8, 20, 1.1),
    (_QWEN2 + r".*\binstruct\b", "Qwen2.5's generation_config.json", 0.7, 0.8, 20, 1.05),
    # generation_config.json of https://huggingface.co/google/gemma-3-1b-it; the pretrained ones' is the same.
    (r"gemma 3\b", "Gemma 3's generation_config.json", 1.0, 0.95, 64, None),
    # generation_config.json of https://huggingface.co/meta-llama/Llama-3.2-1B-Instruct, and of 3, 3.1 and 3.3.
    (r"llama 3(\.[1-3])?\b", "Llama 3's generation_config.json", 0.6, 0.9, None, None),
    # The example of https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0.
    (r"tinyllama\b.*\bchat\b", "TinyLlama's model card", 0.7, 0.95, 50, None),
    # "We recommend to use a temperature of 0.3": https://huggingface.co/mistralai/Mistral-Nemo-Instruct-2407.
    (r"mistral nemo\b", "Mistral-Nemo's model card", 0.3, None, None, None),
    # "a relatively low temperature, such as 0.15": https://huggingface.co/mistralai/Mistral-Small-24B-Instruct-2501 and later ones.
    (r"mistral small\b.*\b24b\b", "Mistral-Small's model card", 0.15, None, None, None),
)
"""Known models by the beginning of their name, in lower case with spaces for dashes, the first that fits: where the values come from, temperature,
top_p, top_k, repetition_penalty."""

_PUBLISHERS = r"(?:(?:meta|meta llama|qwen|google|mistralai|deepseek ai|huggingfacetb|unsloth) )?"

UNKNOWN_GGUF = SamplingDefaults(temperature=0.7, top_p=0.9, origin="usual values; the GGUF file names none")
"""For a GGUF file of which nothing is known. Drawing from the whole vocabulary at 1.0 shows every rounding of quantised weights as an odd
word; 0.7 and 0.9 lie between what the cards of Llama 3 (0.6, 0.9) and llama.cpp (0.8, 0.95) take."""


def from_generation_config(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Of a `generation_config.json`, {} when there is none. Raises ModelError for a value that no request could run with: better at load than at
    each request. transformers turns top-k off with 0."""
    return SamplingDefaults(
        **_checked(generation, {name: name for name in BOUNDS}, "generation_config.json"),
        origin="generation_config.json" if generation else "",
        not_followed=_not_followed(generation, _NOT_FOLLOWED),
    )


def from_gguf(metadata: Mapping[str, Any], file_name: str) -> SamplingDefaults:
    """Of a GGUF file: its own `general.sampling.*`, else those of a known model of that name, else `UNKNOWN_GGUF`. metadata: the keys that begin
    with `general.`. Raises ModelError naming the file and the key of a value that no request could run with."""
    # Numbers are stored as float32: 0.95 comes as 0.949999988.
    metadata = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in metadata.items()}
    stated = _checked(metadata, _GGUF_KEYS, file_name)
    asked = {name: metadata.get(f"general.sampling.{name}") for name in _GGUF_NOT_FOLLOWED}
    not_followed = _not_followed(asked, _GGUF_NOT_FOLLOWED)
    if stated:
        return SamplingDefaults(**stated, origin="the GGUF file's general.sampling", not_followed=not_followed)
    found = _card(metadata) or UNKNOWN_GGUF
    return msgspec.structs.replace(found, not_followed=not_followed)


def _card(metadata: Mapping[str, Any]) -> SamplingDefaults | None:
    parts = [metadata.get(f"general.{part}") for part in ("basename", "version", "size_label", "finetune")]
    for name in (" ".join(part for part in parts if isinstance(part, str)), metadata.get("general.name")):
        if not isinstance(name, str):
            continue
        plain = re.sub(r"[^a-z0-9.]+", " ", name.lower()).strip()
        for pattern, origin, temperature, top_p, top_k, penalty in _CARDS:
            if re.match(_PUBLISHERS + pattern, plain):
                return SamplingDefaults(
                    temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=penalty, origin=origin
                )
    return None


def _checked(stated: Mapping[str, Any], keys: Mapping[str, str], file_name: str) -> dict[str, Any]:
    fields = {field.name: field.type for field in msgspec.structs.fields(SamplingDefaults)}
    checked: dict[str, Any] = {}
    for name, (allowed, words) in BOUNDS.items():
        value = stated.get(keys[name])
        if value is None:
            continue
        try:
            number = msgspec.convert(value, fields[name])
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            why = plain_reason(error) if isinstance(error, msgspec.ValidationError) else "expected a number"
            raise ModelError(f"{file_name}: {keys[name]} is {value!r:.80}: {why}") from error
        if name == "top_k" and number == 0:
            continue
        if not allowed(number):
            raise ModelError(f"{file_name}: {keys[name]} is {value!r:.80}; it must be {words}")
        checked[name] = number
    return checked


def _not_followed(stated: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> tuple[str, ...]:
    """`name value` of each field that asks for something."""
    return tuple(
        f"{name} {_short(stated[name])}"
        for name, nothing in neutral.items()
        if stated.get(name) not in (None, "", [], {}, *(nothing or (False,)))
    )


def _short(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
