"""How texts are cut before byte pairs are merged, by the name that a GGUF file has for it (`tokenizer.ggml.pre`).

The names, and who shares a pattern: `llm_tokenizer_bpe` and `llama_vocab::impl::load` in llama.cpp (src/llama-vocab.cpp, of llama-cpp-python 0.3.36).
`python -m bench.gguf_tokenizers` compares the ids of each name with llama.cpp's. Where llama.cpp reads the pattern of a model's own tokenizer.json
only nearly (its letters have no case), the pattern here is the model's own; its NFC is here, too, which llama.cpp leaves out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Splits:
    """Of one kind.

    patterns: each cuts its matches out of what those before have left whole. gpt2: then GPT-2's pattern, which the library has built in. digits:
    before it every digit alone. whole_words: a word that is a token is not merged from its bytes. begins: texts begin with bos unless the file says
    otherwise. nfc: texts are composed first (Unicode's NFC). characters: tokens are of characters with `▁` for a space, not of bytes.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    whole_words: bool = False
    begins: bool = False
    nfc: bool = False
    characters: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str = _UPPER, lower: str = _LOWER, contractions: str = f"{_CONTRACTIONS}?") -> str:
    """Words begin where a letter is upper case."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}[{upper}]*[{lower}]+{contractions}|{first}[{upper}]+[{lower}]*{contractions}"


_GPT4O = rf"{_cased()}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_NOT_HAN = r"&&[^\p{Han}]"
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CHINESE_OR_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SIGN_AND_WORD = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_UNSPACED = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# What follows cuts digits in threes from the right in time in proportion. `\G`: where the last match ended.
_FIRST_THREES = (
    r"(?:\A|(?<=\p{N}))\P{N}*+\p{N}++",
    r"\A\P{N}*+\p{N}{1,2}(?=(?:\p{N}{3})+\z)",
    r"\G\P{N}*+\p{N}{3}(?=\p{N})",
)
_OF: dict[Splits, str] = {
    Splits(
        gpt2=True
    ): "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion "
    "granite-docling jina-v1-en jina-v2-code roberta-bpe",
    Splits(gpt2=True, digits=True): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    Splits((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    Splits((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    Splits(
        (_LLAMA3,), whole_words=True, begins=True
    ): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    Splits((_LLAMA3,), whole_words=True): "glm4 glm5",
    Splits((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    Splits((_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _SPACES,)): "jais-2",
    Splits((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), whole_words=True): "minicpm5",
    Splits((_QWEN2,), nfc=True): "qwen2 deepseek-r1-qwen",
    Splits((_QWEN2,)): "stablelm2 kormo f2llmv2 megrez hunyuan solar-open grok-2",
    Splits((_QWEN35,), nfc=True): "qwen35",
    Splits((r"\n+", _QWEN2)): "laguna",
    Splits((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)): "ufakzeka",
    Splits((_QWEN2.replace(_SIGNS, r" ?[^\s\p{L}\p{N}\r\n]+"),)): "seed-coder",
    Splits(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)
    ): "bailingmoe bailingmoe2 llada-moe",
    Splits(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): "exaone-moe",
    Splits(
        (rf"{_cased(contractions='')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",), whole_words=True, begins=True
    ): "tekken",
    Splits((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    Splits((_GPT4O,), whole_words=True): "granite-embed-multi-97m",
    Splits((r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})+\z)", _GPT4O)): "tiny_aya cohere2moe",
    Splits(
        (
            r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
            rf"[\u3105-\u312f]+|{_CHINESE_OR_KANA}",
            _GPT4O.replace("{1,3}", ""),
        ),
        whole_words=True,
    ): "youtu",
    Splits((rf"\p{{Han}}+|{_cased(_UPPER + _NOT_HAN, _LOWER + _NOT_HAN)}|\p{{N}}{{1,3}}|{_SIGNS}|{_REST}",)): "kimi-k2",
    Splits(
        (r"\p{N}{1,3}", _CHINESE_OR_KANA, rf"{_SIGN_AND_WORD}[\r\n]*|{_REST}")
    ): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    Splits((r"\p{N}{1,3}", _CHINESE_OR_KANA, rf"{_SIGN_AND_WORD}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")): "spark2_5",
    Splits(
        (
            *_FIRST_THREES,
            r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff"
            r"\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
            rf"{_SIGN_AND_WORD}[\r\n]*|{_REST}",
        )
    ): "afmoe",
    Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True): "deepseek-coder",
    # Its first letters are those that have a case, but for some ranges.
    Splits(
        (
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\uab68\x{10570}-\x{105bc}\x{16e40}-\x{1e8ff}]]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s++$",
            _CJK,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    Splits((_UNSPACED,)): "poro-chat bloom gpt3-finnish",
    Splits((_UNSPACED, r"\p{N}")): "viking",
    Splits((r"\p{N}+", r"(?:\A|(?<=\D|\D\d|\D\d\d|\A\d|\A\d\d))(?=(?:\d{3})++(?!\d))", r"\G\d{3}(?=\d)")): "superbpe",
    Splits(
        (
            r"<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
        ),
        gpt2=True,
        begins=True,
    ): "chameleon",
    Splits(characters=True, begins=True): "gemma4 granite-embed-multi-311m",
    Splits(characters=True): "sarvam-moe",
}
SPLITS = {name: splits for splits, names in _OF.items() for name in names.split()}
"""By the value of `tokenizer.ggml.pre`."""
