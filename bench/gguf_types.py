"""GGUF files served beside llama.cpp, in turns: the same greedy text, and the speed of 1, 8 and 32 streams and of prompts of 700 and 2,048 tokens.

    .venv/bin/python -m bench.gguf_types --llama-cpp FOLDER --work FOLDER [--types Q4_K_M,MXFP4 | --files A.gguf,smollm2]
        [--streams 1,8,32] [--prompts 700,2048] [--output FILE]

For types that SmolLM2's sizes cannot have, a random Llama of 1,024 columns with its tokenizer is made in bfloat16, and quantised by llama.cpp's
`llama-quantize`. Where the texts part, the two likeliest tokens of the dequantised weights in float32 must be near, or ours the likeliest, else the
row says no. A row has the types inside, and fails if the one that is asked for is not that of most matrices. "headrace" drafts no tokens, as
llama.cpp's server drafts none; "defaults" is without options.
"""

import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np
from rich.progress import track

from bench.program import counts, parser_of, refusals, words, write_report
from bench.servers import ServerProcess, free_port, greedy, own_server, posted
from headrace import Engine
from headrace.benchmark.agreement import PROMPTS, common_length
from headrace.checkpoint.names import resolve_model

TYPES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "Q2_K", "Q3_K_M", "MXFP4")
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 1024, 2816, 8, 16, 4
NEAR = 0.1
"""Of two logits: either token is right."""
TOKENS = 64
SLOTS = 32
SLOT_TOKENS = 2304
STREAMS, PROMPT_TOKENS = (1, 8, SLOTS), (700, 2048)
Workload = tuple[str, int]
Prompt = str | list[int]
Ask = Callable[[str, Prompt, int], list[int]]
FLOAT32: dict[str, Any] = {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "float32"}


def save_random(path: Path) -> None:
    """A Llama in bfloat16 with random weights and SmolLM2's tokenizer."""
    source = gguf.GGUFReader(resolve_model("smollm2"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    of_layer = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }
    matrices = {"token_embd": (vocab, HIDDEN), "output": (vocab, HIDDEN)}
    matrices |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in of_layer.items()}
    for name, (rows, columns) in matrices.items():
        values = rng.standard_normal((rows, columns), dtype=np.float32) * (2.0 if name == "output" else 1.0)
        words16 = (values / columns**0.5).view(np.uint32) >> 16
        writer.add_tensor(
            f"{name}.weight", words16.astype(np.uint16).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
        )
    for name in ("output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(LAYERS) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(program: Path, source: Path, kind: str) -> Path:
    """llama.cpp's file of this type. MXFP4, which its mixtures alone get, is named for every matrix."""
    target = source.with_name(f"{kind}.gguf")
    if not target.exists():
        named = ["--tensor-type", r"blk.*\.weight=mxfp4", str(source), str(target), "Q8_0"]
        arguments = named if kind == "MXFP4" else [str(source), str(target), kind]
        subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return target


def types_of(path: Path) -> Counter[str]:
    """Matrices of the layers by their type."""
    tensors = gguf.GGUFReader(path).tensors
    return Counter(t.tensor_type.name for t in tensors if t.name.startswith("blk.") and len(t.shape) > 1)


def theirs(url: str, prompt: Prompt, tokens: int) -> list[int]:
    """llama.cpp's greedy ids."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return list(posted(f"{url}/completion", body | {"cache_prompt": False})["tokens"])


def ours(url: str, prompt: Prompt, tokens: int) -> list[int]:
    return list(greedy(url, prompt, tokens)["output_ids"])


def speed(ask: Ask, url: str, streams: int, turn: int) -> float:
    """Output tokens a second of so many streams."""
    prompts = [f"{turn} {stream} {PROMPTS[stream % len(PROMPTS)]}" for stream in range(streams)]
    with ThreadPoolExecutor(streams) as clients:
        begin = time.perf_counter()
        list(clients.map(lambda prompt: ask(url, prompt, TOKENS), prompts))
        return streams * TOKENS / (time.perf_counter() - begin)


def prompt_speed(ask: Ask, url: str, length: int, turn: int) -> float:
    """Prompt tokens a second of one prompt of so many tokens, until its first output."""
    ids = np.random.default_rng((length, turn)).integers(1000, 20000, length).tolist()
    begin = time.perf_counter()
    ask(url, ids, 1)
    return length / (time.perf_counter() - begin)


def judged(file: Path, partings: Sequence[tuple[str, list[int], int]]) -> list[dict[str, Any]]:
    """Where the texts part, by the dequantised weights in float32: the gap between the two likeliest logits, and whether ours is the likeliest.
    partings: (prompt, the ids before, our next id)."""
    if not partings:
        return []
    with Engine(model_path=str(file), max_total_tokens=4096, log_level="error", **FLOAT32) as engine:
        ids = [engine.tokenizer.encode(prompt) + before for prompt, before, _ in partings]
        outputs = engine.generate(
            input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0}, return_logprob=True, top_logprobs_num=2
        )  # fmt: skip
    tops = [output["meta_info"]["output_top_logprobs"][0] for output in outputs]
    return [
        {"gap": round(first[0] - second[0], 3), "ours_is_likeliest": first[1] == own}
        for (first, second), (_, _, own) in zip(tops, partings, strict=True)
    ]


def over_llama_cpp(rates: dict[str, list[float]]) -> dict[str, float]:
    """Medians."""
    peer = median(rates["llama-server"])
    return {name: round(median(rates[name]) / peer, 2) for name in ("headrace", "defaults")}


def compare(
    file: Path, llama_server: Path, work: Path, texts: int, turns: int, workloads: Sequence[Workload]
) -> dict[str, Any]:
    """A row of the report."""
    port = free_port()
    llama = f"{llama_server} -m {file} --host 127.0.0.1 --port {port} -np {SLOTS} -c {SLOTS * SLOT_TOKENS} --no-kv-unified -fa on --no-ui"
    own = ("--max-total-tokens", str(SLOTS * SLOT_TOKENS))
    with (
        ServerProcess("llama-server", llama.split(), port, work / "llama.log") as peer,
        own_server(str(file), (*own, "--speculative-algorithm", "off")) as server,
        own_server(str(file), own) as default,
    ):
        arms = {"llama-server": (peer, theirs), "headrace": (server, ours), "defaults": (default, ours)}
        peer.wait_until_ready()
        partings = []
        for prompt in PROMPTS[:texts]:
            a, b = theirs(peer.url, prompt, TOKENS), ours(server.url, prompt, TOKENS)
            if (at := common_length(a, b)) < TOKENS:
                partings.append((prompt, a[:at], b[at]))
        figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for turn in range(turns):
            for kind, size in workloads:
                measure = speed if kind == "streams" else prompt_speed
                for name, (one, ask) in arms.items():
                    figures[f"{kind} {size}"][name].append(round(measure(ask, one.url, size, turn), 1))
    found = judged(file, partings)
    return {
        "matrices": dict(types_of(file)),
        "texts": texts,
        "same_text": texts - len(partings),
        "where_they_part": found,
        "all_right": all(one["gap"] <= NEAR or one["ours_is_likeliest"] for one in found),
        "tok_s": figures,
        "over_llama_cpp": {workload: over_llama_cpp(by) for workload, by in figures.items()},
    }


def main() -> None:
    """Make the files that are missing, and compare each."""
    parser = parser_of(__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder with llama-quantize and llama-server")
    parser.add_argument("--work", type=Path, required=True, help="folder for the files, which are kept (about 2 GB)")
    parser.add_argument("--types", type=words, default=TYPES)
    parser.add_argument("--files", type=words, default=(), help="these instead of files of types")
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3, help="0: texts alone")
    parser.add_argument("--streams", type=counts, default=STREAMS)
    parser.add_argument("--prompts", type=counts, default=PROMPT_TOKENS, help="lengths in tokens; empty: none")
    options = parser.parse_args()
    workloads = [("streams", one) for one in options.streams] + [("prompt", one) for one in options.prompts]
    options.work.mkdir(parents=True, exist_ok=True)
    source = options.work / "bf16.gguf"
    if not source.exists() and not options.files:
        save_random(source)
    rows: list[dict[str, Any]] = []
    server, texts = options.llama_cpp / "llama-server", min(options.texts, len(PROMPTS))
    with refusals():
        for name in track(options.files or options.types, description="files"):
            if options.files:
                file, row = Path(resolve_model(name)), {"file": Path(name).name}
            else:
                file = quantise(options.llama_cpp / "llama-quantize", source, name)
                row = {"type": name, "is_that_type": types_of(file).most_common(1)[0][0] == name.removesuffix("_M")}
            rows.append(row | compare(file, server, options.work, texts, options.turns, workloads))
    write_report({"files": rows}, options.output)
    if not all(row.get("is_that_type", True) and row["all_right"] for row in rows):
        sys.exit("error: a text parts where one token is clearly the likeliest, or a file is not of its type")


if __name__ == "__main__":
    main()
