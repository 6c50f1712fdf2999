"""Reasoning between tags."""

from headrace.parsers.table import ReasoningTable

TABLES = (
    ReasoningTable(
        "think",
        opens=("<think>",),
        closes=("</think>",),
        aliases=(
            "deepseek-r1",
            "deepseek_r1",
            "deepseek-v3",
            "deepseek_v3",
            "qwen3",
            "qwen3-thinking",
            "glm45",
            "kimi_k2",
            "minimax",
            "minimax_m2",
            "minimax-append-think",
            "minimax_m2_append_think",
            "step3",
            "nemotron_3",
            "holo2",
            "hunyuan",
            "interns1",
        ),
        fingerprints=(("<think>",), ("</think>",)),
    ),
    ReasoningTable(
        "mistral", opens=("[THINK]",), closes=("[/THINK]",), aliases=("magistral",), fingerprints=(("[THINK]",),)
    ),
    ReasoningTable("kimi", opens=("◁think▷",), closes=("◁/think▷",), fingerprints=(("◁think▷",), ("◁/think▷",))),
    ReasoningTable(
        "seed_oss",
        opens=("<seed:think>",),
        closes=("</seed:think>",),
        aliases=("seed-oss",),
        fingerprints=(("<seed:think>",),),
    ),
    ReasoningTable(
        "gemma4",
        opens=("<|channel>thought\n", "<|channel>thought"),
        closes=("<channel|>",),
        fingerprints=(("<|channel>",), ("<channel|>",)),
    ),
)
