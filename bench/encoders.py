"""Encoders: tokens a second from token ids to normalised vectors, all-MiniLM-L6-v2, beside onnxruntime and OpenVINO.

    PYTHONPATH=.venv/peers:.venv/nncf .venv/bin/python -m bench.encoders [--turns 15] [--shapes 1x16,32x128] [--ours] [--output FILE]

bench/contest.py says how, and what the peers need; the model is there after `headrace pull minilm`. The peers get whole batches of texts of one
length, so they pad nothing. In fp32, too, bfloat16 and int16 of ours take part where they are as near to float32 as the class demands.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bench.contest import (
    Call,
    Contestant,
    contest,
    contest_parser,
    export,
    openvino_peers,
    quantise_dynamically,
    use_threads,
)
from bench.program import words
from headrace import kernels
from headrace.checkpoint.names import resolve_model
from headrace.kernels import EncoderLayerSpec, EncoderSpec, FusedEncoder
from headrace.layers.quantization import integer_format

NUM_LAYERS, HIDDEN, HEADS, EPS = 6, 384, 12, 1e-12
KINDS = {"fp32": "fp32", "16 bit": "fp32", "int8": "int8"}
OURS = {
    "headrace float32": ("fp32", "float32"),
    "headrace bfloat16": ("fp32", "bfloat16"),
    "headrace int16": ("fp32", "int16"),
    "headrace int8": ("int8", "int8-rotated"),
    "headrace int8-fast": ("int8", "int8-fast"),
}
"""Class and scheme of the weights. A call: ids int64[texts, tokens] -> vectors float32[texts, hidden_size] of length 1."""


def texts(folder: Path, num_texts: int, num_tokens: int) -> torch.Tensor:
    """ids int64[num_texts, num_tokens]: pieces of Python's help pages."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = tokenizer.encode(" ".join(topics[key] for key in sorted(topics)), add_special_tokens=False).ids
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    size = num_tokens - 2
    return torch.tensor([[first, *ids[i * size : (i + 1) * size], last] for i in range(num_texts)])


def headrace(folder: Path, scheme: Any) -> Call:
    """The encoder of this project over weights of `scheme`."""
    tensors = load_file(folder / "model.safetensors")

    def norm(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors[f"{name}.LayerNorm.weight"], tensors[f"{name}.LayerNorm.bias"]

    def pack(*names: str) -> kernels.PackedLinear:
        weight = torch.cat([tensors[f"{name}.weight"] for name in names])
        bias = torch.cat([tensors[f"{name}.bias"] for name in names])
        if scheme in ("float32", "bfloat16"):
            return kernels.pack_linear(weight, bias, rounded=scheme == "bfloat16")
        return kernels.pack_linear(integer_format(scheme).quantize(weight), bias)

    layers = tuple(
        EncoderLayerSpec(
            qkv=pack(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
            out=pack(f"{at}.attention.output.dense"),
            up=pack(f"{at}.intermediate.dense"),
            down=pack(f"{at}.output.dense"),
            attention_norm=norm(f"{at}.attention.output"),
            mlp_norm=norm(f"{at}.output"),
        )
        for at in (f"encoder.layer.{index}" for index in range(NUM_LAYERS))
    )
    head_dim = HIDDEN // HEADS
    encoder = FusedEncoder(EncoderSpec(layers, False, None, EPS, HEADS, head_dim, head_dim**-0.5, "gelu", False))
    words = tensors["embeddings.word_embeddings.weight"]
    places = tensors["embeddings.position_embeddings.weight"] + tensors["embeddings.token_type_embeddings.weight"][0]
    weight, bias = norm("embeddings")

    def embed(ids: torch.Tensor) -> torch.Tensor:
        num_texts, num_tokens = ids.shape
        positions = torch.arange(num_tokens, dtype=torch.int32).repeat(num_texts)
        row_starts = torch.arange(0, ids.numel() + 1, num_tokens, dtype=torch.int32)
        hidden = kernels.embedding(ids.flatten(), words)
        hidden = kernels.layer_norm(hidden, weight, bias, EPS, kernels.embedding(positions, places))
        hidden = encoder(hidden, positions, row_starts)
        return torch.nn.functional.normalize(hidden.view(num_texts, num_tokens, HIDDEN).mean(1))

    return embed


class Pooled(torch.nn.Module):
    """A model of transformers with the pooling of sentence-transformers behind it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Normalised mean of the hidden states where `mask` is 1."""
        hidden = self.model(ids, mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))


def reference(folder: Path) -> Pooled:
    """The same model in torch, float32."""
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    return Pooled(model.float()).eval()


def onnxruntime_peer(model: Path, threads: int) -> Call:
    """onnxruntime with every optimisation of the graph."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: torch.from_numpy(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])


def peers(folder: Path, threads: int) -> dict[str, Contestant]:
    """By name."""
    with tempfile.TemporaryDirectory() as made:
        f32, ids = Path(made) / "f32.onnx", torch.randint(1000, 2000, (2, 16))
        export(reference(folder), {"ids": ids, "mask": torch.ones_like(ids)}, {0: "texts", 1: "tokens"}, f32)
        int8 = quantise_dynamically(f32, Path(made) / "int8.onnx")
        samples = [[each.numpy(), torch.ones_like(each).numpy()] for each in texts(folder, 128, 96).split(1)]
        found = {
            "onnxruntime fp32": Contestant("fp32", onnxruntime_peer(f32, threads)),
            "onnxruntime int8": Contestant("int8", onnxruntime_peer(int8, threads), "dynamic, per channel"),
            **openvino_peers(f32, int8, samples, threads),
        }
    return {name: replace(each, call=partial(_unmasked, each.call)) for name, each in found.items()}


def _unmasked(call: Call, ids: torch.Tensor) -> torch.Tensor:
    return call(ids, torch.ones_like(ids))


def main() -> None:
    """See the module docstring."""
    parser = contest_parser(__doc__, turns=15)
    parser.add_argument("--shapes", type=words, default="1x16,1x128,32x32,32x128,8x512", help="texts x tokens")
    args = parser.parse_args()
    use_threads(args.threads)
    folder = resolve_model("minilm")
    made = {name: Contestant(kind, headrace(folder, scheme)) for name, (kind, scheme) in OURS.items()}
    if not args.ours:
        made |= peers(folder, args.threads)
    checked = texts(folder, 32, 64)
    with torch.no_grad():
        want = reference(folder)(checked, torch.ones_like(checked))
    sizes = {}
    for shape in args.shapes:
        ids = texts(folder, *map(int, shape.split("x")))
        sizes[shape] = ids.numel(), ids
    contest("all-MiniLM-L6-v2", made, (checked, want), sizes, "tokens", KINDS, args)


if __name__ == "__main__":
    main()
