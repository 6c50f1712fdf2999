"""What models write, as tables: one for each format, by kin in json_calls.py, tag_calls.py and own_notations.py."""

from headrace.parsers.formats.json_calls import DEEPSEEK_V3, DEEPSEEK_V31, HERMES, KIMI_K2, LLAMA3, MISTRAL
from headrace.parsers.formats.own_notations import FUNCTION_GEMMA, GEMMA4, HARMONY, LFM2, PYTHONIC
from headrace.parsers.formats.tag_calls import DEEPSEEK_V32, GLM45, GLM47, MINIMAX_M2, QWEN3_CODER
from headrace.parsers.table import ReasoningTable, Table

TABLES: tuple[Table, ...] = (
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MINIMAX_M2,
    QWEN3_CODER,
    GLM47,
    GLM45,
    GEMMA4,
    FUNCTION_GEMMA,
    LFM2,
    PYTHONIC,
    MISTRAL,
    HERMES,
    LLAMA3,
)
"""The tool formats. Of several whose fingerprints a template has, the first counts."""

REASONING_TABLES: tuple[ReasoningTable, ...] = (
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
"""Reasoning between tags."""
