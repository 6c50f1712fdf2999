"""Search in local texts: embed the paragraphs of a folder's pages, find those nearest to a question, and order the best again with a reranker.

python examples/search.py "how do I stop a request" docs
python examples/search.py "how do I stop a request" docs --reranker path/to/a/cross-encoder

The embedding model is minilm (`headrace pull minilm` brings it once). A reranker reads the question and a paragraph together, which takes longer and
tells more: it gets the twenty best. Any cross-encoder will do (bge-reranker, ms-marco-MiniLM), or a model of the Qwen3-Reranker kind.
"""

import argparse
from pathlib import Path

import torch

from headrace import Engine

NUM_BEST = 20


def paragraphs(folder: Path) -> list[tuple[str, str]]:
    """(page, text) of each paragraph of at least 80 characters."""
    found = []
    for page in sorted(folder.rglob("*.md")):
        for block in page.read_text(encoding="utf-8").split("\n\n"):
            text = " ".join(block.split())
            if len(text) >= 80 and not text.startswith(("|", "```", "#")):
                found.append((page.name, text))
    return found


def main() -> None:
    """Embed, search, and rerank if there is a model for it."""
    parser = argparse.ArgumentParser(description="Search the paragraphs of Markdown pages.")
    parser.add_argument("question")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="minilm", help="the embedding model")
    parser.add_argument("--reranker", help="a model that scores a question and a text together")
    options = parser.parse_args()
    texts = paragraphs(options.folder)

    with Engine(model_path=options.model, max_batch_prompts=len(texts) + 1) as engine:
        answers = engine.encode([options.question, *(text for _, text in texts)], truncate_prompt_tokens=-1)
    vectors = torch.tensor([answer["embedding"] for answer in answers])
    cosines = torch.nn.functional.cosine_similarity(vectors[1:], vectors[:1])
    best = cosines.topk(min(NUM_BEST, len(texts)))
    print(f"{len(texts)} paragraphs; the nearest to {options.question!r}:")
    for score, index in zip(best.values[:5].tolist(), best.indices[:5].tolist(), strict=True):
        print(f"  {score:.3f} {texts[index][0]}: {texts[index][1][:100]}")
    if options.reranker is None:
        return

    candidates = [texts[index] for index in best.indices.tolist()]
    with Engine(model_path=options.reranker) as engine:
        ranked = engine.rerank(options.question, [text for _, text in candidates], top_n=5)
    print("after reranking:")
    for result in ranked:
        page, text = candidates[result["index"]]
        print(f"  {result['relevance_score']:.3f} {page}: {text[:100]}")


if __name__ == "__main__":
    main()
