"""What a grammar costs: time per output token with a JSON schema over the time without, with the rows of a batch in turns.

    .venv/bin/python -m bench.constrained [MODEL] [--rows 1 32] [--tokens 128] [--repeat 5] [--serve "OPTIONS"] [--output FILE]
    .venv/bin/python -m bench.constrained --large-vocabulary --rows 1 8

Starts an engine and lets `--rows` requests at a time stream `--tokens` tokens each: without a grammar, then each with a schema of its own (long
lists of objects with different properties, so that no output ends early). Everything is warm: schemas compiled, prompts cached. Time per token
is from a stream's first token to its last, the mean over the rows; the runs alternate, and medians and the spread of their ratios are reported.

--large-vocabulary: random weights in the shape of Gemma 3 270M, with a vocabulary of 262,144: SmolLM2's and further tokens of several of its words.
Prints JSON.
"""

import shlex
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers

from bench.program import parser_of, words, write_report
from headrace.api.engine import Engine
from headrace.checkpoint.names import resolve_model
from headrace.config.cli import parse
from headrace.text.tokenizers import load_tokenizer

GEMMA = Path(__file__).parent / "configs" / "gemma3-270m" / "config.json"
GEMMA_VOCABULARY = 262_144

WORDS = words(
    "name, title, city, street, country, code, price, amount, total, count, status, kind, "
    "color, size, weight, note, author, year"
)
KINDS: list[dict[str, object]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "string", "enum": ["small", "medium", "large"]},
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    {"type": "string", "format": "date"},
    {"type": "string", "maxLength": 20},
]


def schema_of(number: int) -> dict[str, object]:
    """One of many different schemas: a list of at least 1,000 objects with six properties."""
    names = [f"{WORDS[(number * 5 + i * 7) % len(WORDS)]}_{i}" for i in range(6)]
    properties = {name: KINDS[(number + 3 * i) % len(KINDS)] for i, name in enumerate(names)}
    item = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 1000}


def large_vocabulary_model(folder: Path) -> None:
    """A folder with Gemma's config and a tokenizer of GEMMA_VOCABULARY tokens; no weights."""
    load_tokenizer(resolve_model("smollm2")).save(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [word for word, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1]) if word.isalpha()]
    missing = GEMMA_VOCABULARY - backend.get_vocab_size()
    pairs = (
        first + second for step in range(1, len(words)) for first, second in zip(words, words[step:], strict=False)
    )
    known = set(backend.get_vocab())
    new: dict[str, None] = {}
    while len(new) < missing:
        pair = next(pairs)
        if pair not in known:
            new[pair] = None
    backend.add_tokens(list(new))
    backend.save(str(folder / "tokenizer.json"))
    shutil.copy(GEMMA, folder)


def time_per_token_s(engine: Engine, num_rows: int, num_tokens: int, constrained: bool) -> float:
    """Mean over the rows of the seconds from the first token to the last, divided by the tokens between."""
    common: dict[str, Any] = {"max_new_tokens": num_tokens, "temperature": 0.8, "ignore_eos": True}
    params: Any = [
        common | {"seed": row} | ({"json_schema": schema_of(row)} if constrained else {}) for row in range(num_rows)
    ]
    prompts = [f"List number {row} as JSON:" for row in range(num_rows)]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    counts: dict[int, int] = {}
    for answer in engine.generate(prompts, params, stream=True):
        row = answer.get("index", 0)
        last[row] = time.perf_counter()
        first.setdefault(row, last[row])
        counts[row] = answer["meta_info"]["completion_tokens"]
    assert set(counts.values()) == {num_tokens}, f"an output ended early: {counts}"
    return statistics.mean((last[row] - first[row]) / (num_tokens - 1) for row in counts)


def measure(engine: Engine, num_rows: int, num_tokens: int, repeat: int) -> dict[str, object]:
    """Both kinds in turns. Times in milliseconds."""
    for constrained in (False, True):
        time_per_token_s(engine, num_rows, num_tokens, constrained)
    plain: list[float] = []
    with_grammar: list[float] = []
    for _ in range(repeat):
        plain.append(time_per_token_s(engine, num_rows, num_tokens, constrained=False))
        with_grammar.append(time_per_token_s(engine, num_rows, num_tokens, constrained=True))
    ratios = [b / a for a, b in zip(plain, with_grammar, strict=True)]
    state = engine.internal_state()
    return {
        "rows": num_rows,
        "tokens": num_tokens,
        "unconstrained_ms": round(statistics.median(plain) * 1e3, 3),
        "constrained_ms": round(statistics.median(with_grammar) * 1e3, 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "rows_sat_out_so_far": state.num_sat_out,
        "mask_seconds_so_far": round(state.masks_s, 3),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--serve", default="--quantization int8", help="options of the engine")
    parser.add_argument("--large-vocabulary", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, serve = options.model, shlex.split(options.serve)
        if options.large_vocabulary:
            large_vocabulary_model(Path(folder))
            model, serve = folder, [*serve, "--load-format", "dummy"]
        args = parse(["--model-path", model, "--max-total-tokens", "65536", *serve])
        with Engine(**asdict(args)) as engine:
            results = [measure(engine, rows, options.tokens, options.repeat) for rows in options.rows]
    found = {"vocabulary": GEMMA_VOCABULARY if options.large_vocabulary else None, "results": results}
    write_report(found, options.output)


if __name__ == "__main__":
    main()
