"""How near embeddings are to those of transformers in float32, in every precision, and whether their bits depend on their company.

    .venv/bin/python -m bench.embedding_agreement [--model minilm] [--num-texts 500] [--output FILE]

The texts are sentences of Python's own help pages. Each precision serves them all at once, then 64 of them one by one and 64 at a time. Prints JSON:
of each precision, the least and the mean cosine with transformers, whether the ten nearest texts of each text are the same and in the same order, and
how many vectors have other bits alone, or in a batch of 64, than among all.
"""

import re
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.progress import track

from bench.program import parser_of, write_report
from headrace import Engine
from headrace.checkpoint.names import resolve_model

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int16": {"quantization": "int16"},
    "int8": {"quantization": "int8"},
    "int8-fast": {"quantization": "int8-fast"},
}
NEAREST = 10
COMPANY = 64


def sentences(count: int) -> list[str]:
    """Different ones, of 20 to 400 characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    found = dict.fromkeys(" ".join(part.split()) for part in re.split(r"(?<=[.:])\s+", text))
    return [sentence for sentence in found if 20 <= len(sentence) <= 400][:count]


def by_transformers(folder: Path, texts: list[str]) -> torch.Tensor:
    """[texts, size], mean pooling, normalised: what the modules of minilm say. One text at a time, so without padding."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for text in track(texts, "transformers", transient=True):
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
            rows.append(torch.nn.functional.normalize(model(**inputs).last_hidden_state[0].mean(0), dim=0))
    return torch.stack(rows)


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """int64[texts, NEAREST]: the most similar other texts of each."""
    similar = vectors @ vectors.T
    return similar.fill_diagonal_(-2).topk(NEAREST, dim=1).indices


def measure(model: str, precision: str, texts: list[str], reference: torch.Tensor) -> dict[str, Any]:
    """Start an engine and compare. top1, top10: texts whose nearest, and whose ten nearest in order, are those of transformers."""
    with Engine(model_path=model, log_level="error", **PRECISIONS[precision]) as engine:

        def embed(part: list[str]) -> list[list[float]]:
            return [answer["embedding"] for answer in engine.encode(part, truncate_prompt_tokens=-1)]

        together = embed(texts)
        alone = [embed([text])[0] for text in texts[:COMPANY]]
        batches = [vector for at in range(0, len(texts), COMPANY) for vector in embed(texts[at : at + COMPANY])]
    vectors = torch.tensor(together)
    cosines = torch.nn.functional.cosine_similarity(vectors.double(), reference.double())
    ours, theirs = nearest(vectors), nearest(reference)
    return {
        "precision": precision,
        "texts": len(texts),
        "least_cosine": cosines.min().item(),
        "mean_cosine": cosines.mean().item(),
        "top1": int((ours[:, 0] == theirs[:, 0]).sum()),
        "top10": int((ours == theirs).all(dim=1).sum()),
        "other_bits_alone": sum(a != b for a, b in zip(alone, together, strict=False)),
        "other_bits_in_batches": sum(a != b for a, b in zip(batches, together, strict=True)),
    }


def main() -> None:
    """Measure every precision."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--num-texts", type=int, default=500)
    options = parser.parse_args()
    texts = sentences(options.num_texts)
    reference = by_transformers(resolve_model(options.model), texts)
    found = []
    for precision in PRECISIONS:
        found.append(measure(options.model, precision, texts, reference))
        print(found[-1], file=sys.stderr)
    write_report({"model": options.model, "found": found}, options.output)


if __name__ == "__main__":
    main()
