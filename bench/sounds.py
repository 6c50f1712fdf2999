"""Encoders of sounds: how long one takes from log-mel frames to the rows that stand in a prompt, beside transformers; Whisper small's size, random
weights, Qwen2-Audio's parts.

    .venv/bin/python -m bench.sounds [--turns 9] [--seconds 3,10,30] [--output FILE]

Both run in this process on the same number of threads, in turns. transformers pads every sound to 30 s, which it computes and masks. Prints JSON;
medians over the turns, with their quartiles, and the mean cosine of each with transformers.
"""

import torch
from rich.progress import track
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from bench.contest import Call, contest_parser, in_turns, show, spread, torch_threads, use_threads
from bench.program import words, write_report
from headrace.checkpoint.model_config import read_audio
from headrace.families.qwen2_audio.audio import Qwen2AudioEncoder
from headrace.layers.weight import Placement
from headrace.models.media import MediaInput, encode

HIDDEN = 768
FRAMES = 3000
FRAMES_PER_S = 100
"""A call: frames float32[3000, 80], of which those that are not silence are the sound -> rows float32[positions / 2, 768]."""


def reference() -> Qwen2AudioForConditionalGeneration:
    """The model in torch, float32, with a small text model."""
    torch.manual_seed(0)
    audio = {
        "d_model": 768,
        "encoder_layers": 12,
        "encoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "num_mel_bins": 80,
        "model_type": "qwen2_audio_encoder",
    }
    text = {
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 64, "model_type": "qwen2",
    }  # fmt: skip
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=1)
    config._attn_implementation = "sdpa"
    return Qwen2AudioForConditionalGeneration(config).float().eval()


def positions_of(num_frames: int) -> int:
    """Positions after the second convolution."""
    return (num_frames - 1) // 2 + 1


def ours(model: Qwen2AudioForConditionalGeneration, num_frames: int, dtype: torch.dtype, quantization: str) -> Call:
    """Our encoder with the same weights."""
    audio, reason = read_audio(model.config.to_dict())
    assert audio is not None, reason
    encoder = Qwen2AudioEncoder(audio, HIDDEN, Placement(torch.device("cpu"), dtype, 1, quantization))  # type: ignore[arg-type]
    tensors = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    for weight in encoder.weights():
        weight.load(tensors[weight.name])
    assert not encoder.fuse()
    length = positions_of(num_frames)

    def run(frames: torch.Tensor) -> torch.Tensor:
        given = frames[: min(2 * length + 1, FRAMES)].contiguous()
        return encode(encoder, [MediaInput(given, (length, 1, 1))])[0]

    return run


def theirs(model: Qwen2AudioForConditionalGeneration, num_frames: int, dtype: torch.dtype, threads: int) -> Call:
    """transformers, whose threads sleep while others compute."""
    tower, projector = model.model.audio_tower.to(dtype), model.model.multi_modal_projector.to(dtype)
    length = positions_of(num_frames)
    mask = torch.zeros(1, 1, FRAMES // 2, FRAMES // 2, dtype=dtype)
    mask[..., length:] = torch.finfo(dtype).min

    def run(frames: torch.Tensor) -> torch.Tensor:
        with torch_threads(threads):
            hidden = tower(frames.T[None].to(dtype), attention_mask=mask).last_hidden_state
            return projector(hidden)[0, : length // 2].float()

    return run


def main() -> None:
    """See the module docstring."""
    parser = contest_parser(__doc__, turns=9)
    parser.add_argument("--seconds", type=words, default="3,10,30", help="lengths of the sound")
    args = parser.parse_args()
    use_threads(args.threads)
    results = []
    for seconds in track([float(each) for each in args.seconds], description="lengths"):
        num_frames = int(seconds * FRAMES_PER_S)
        encodes: dict[str, Call] = {
            "headrace float32": ours(reference(), num_frames, torch.float32, "none"),
            "headrace bfloat16": ours(reference(), num_frames, torch.bfloat16, "bfloat16"),
            "headrace int8": ours(reference(), num_frames, torch.bfloat16, "int8"),
            "transformers float32": theirs(reference(), num_frames, torch.float32, args.threads),
            "transformers bfloat16": theirs(reference(), num_frames, torch.bfloat16, args.threads),
        }
        frames = torch.full((FRAMES, 80), -0.5)
        frames[:num_frames] = torch.randn(num_frames, 80, generator=torch.Generator().manual_seed(1)) * 0.5
        want = encodes["transformers float32"](frames)
        taken = in_turns(encodes, frames, args.turns)
        cosines = {
            name: round(float(torch.cosine_similarity(run(frames).float(), want, dim=-1).mean()), 6)
            for name, run in encodes.items()
        }
        ms = {name: [1000 * each for each in found] for name, found in taken.items()}
        results.append({"seconds": seconds, "rows": len(want), "ms": spread(ms, 1), "cosine": cosines})
        show(results[-1])
    model = "Qwen2-Audio's encoder in the size of Whisper small (12 layers of 768), random weights"
    write_report({"model": model, "threads": args.threads, "turns": args.turns, "results": results}, args.output)


if __name__ == "__main__":
    main()
