"""Example bodies of the routes that take one: in /openapi.json, and what the API page puts into its editor.

Each is accepted as it is, but for names that only the user knows (an adapter's folder, a trainer's address). Pure; used once, when the
description is built.
"""

from collections.abc import Mapping
from typing import Any

from headrace.server.routes import Examples, without_v1

_QUESTION = "What is the capital of France?"
_ANSWER = "Paris is the capital of France."
_BEGINNING = "The capital of France is"
_WEIGHT = "model.embed_tokens.weight"
_NO_TENSORS = "AgAAAAAAAAB7fQ=="
"""A safetensors file that holds nothing, in base64."""

_CITY: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def request_examples(model: str) -> dict[str, Examples]:
    """Examples by the path of the route. model: name of the served model."""
    asked = [{"role": "user", "content": _QUESTION}]
    named: dict[str, Any] = {"model": model}
    chat = {**named, "messages": asked, "max_tokens": 64}
    text = {**named, "prompt": _BEGINNING, "max_tokens": 16}
    response = {**named, "input": _QUESTION, "max_output_tokens": 64}
    native = {"text": _BEGINNING, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    ollama = {**named, "options": {"num_predict": 64}}
    tokens: Examples = {"A text": {"prompt": "Hello"}, "A conversation": {"messages": asked}}
    ids: Examples = {"Token ids": {"tokens": [72, 105]}}
    schema = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": _CITY}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": _CITY}}
    found = [_ANSWER, "Berlin is the capital of Germany."]
    ranked: Examples = {"Two documents": {**named, "query": _QUESTION, "documents": found}}
    pairs = {**named, "text_1": _QUESTION, "text_2": found}
    labels = {
        **named,
        "query": _QUESTION,
        "items": [" Paris", " Berlin"],
        "label_token_ids": [3, 4],
        "apply_softmax": True,
    }
    classified: Examples = {"A text": {**named, "input": _BEGINNING}}
    cohere: Examples = {
        "Two texts": {**named, "texts": found, "input_type": "search_document", "embedding_types": ["float"]}
    }
    scored: Examples = {"Pairs of texts": pairs, "Probabilities of labels": labels}
    examples: dict[str, Examples] = {
        "/v1/chat/completions": {
            "A question": chat,
            "Streamed": {**chat, "stream": True, "stream_options": {"include_usage": True}},
            "A JSON schema": {**chat, "response_format": schema},
            "A tool": {**chat, "tools": [tool]},
            "Probabilities of tokens": {**chat, "max_tokens": 8, "logprobs": True, "top_logprobs": 3},
        },
        "/v1/completions": {"A text": text, "Streamed": {**text, "stream": True}},
        "/v1/embeddings": {
            "A text": {**named, "input": _QUESTION},
            "Two texts at once": {**named, "input": [_QUESTION, _BEGINNING], "encoding_format": "base64"},
        },
        "/embed": {"A text": {"inputs": _QUESTION}, "Two texts at once": {"inputs": [_QUESTION, _BEGINNING]}},
        **dict.fromkeys(("/v1/embed", "/v2/embed"), cohere),
        "/encode": {"A text": {"text": _QUESTION}, "Two texts at once": {"text": [_QUESTION, _BEGINNING]}},
        **dict.fromkeys(("/classify", "/v1/classify"), classified),
        **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), ranked),
        **dict.fromkeys(("/v1/score", "/score"), scored),
        "/v1/responses": {"A question": response, "Streamed": {**response, "stream": True}},
        "/v1/messages": {"A question": chat, "Streamed": {**chat, "stream": True}},
        "/v1/messages/count_tokens": {"A question": {**named, "messages": asked}},
        "/generate": {
            "A text": native,
            "Streamed": {**native, "stream": True},
            "Two texts at once": {**native, "text": [_BEGINNING, "The capital of Italy is"]},
        },
        "/infill": {
            "Code": {
                "input_prefix": "def is_even(n):\n    return ",
                "input_suffix": "\n\nprint(is_even(4))\n",
                "n_predict": 32,
            }
        },
        "/tokenize": tokens,
        "/v1/tokenize": tokens,
        "/detokenize": ids,
        "/v1/detokenize": ids,
        "/open_session": {"A name of your own": {"session_id": "s1"}},
        "/close_session": {"A name of your own": {"session_id": "s1"}},
        "/abort_request": {"One request": {"rid": "my-request"}, "All": {"abort_all": True}},
        "/api/chat": {
            "Streamed": {**ollama, "messages": asked},
            "A question": {**ollama, "messages": asked, "stream": False},
        },
        "/api/generate": {
            "Streamed": {**ollama, "prompt": _QUESTION},
            "A question": {**ollama, "prompt": _QUESTION, "stream": False},
        },
        "/api/embed": {"A text": {**named, "input": _QUESTION}, "Two texts": {**named, "input": found}},
        "/api/embeddings": {"A text": {**named, "prompt": _QUESTION}},
        "/api/show": {"The served model": named},
        "/api/pull": {"The served model": named},
        "/load_lora_adapter": {"A folder": {"lora_name": "my-adapter", "lora_path": "/path/to/adapter"}},
        "/unload_lora_adapter": {"By its name": {"lora_name": "my-adapter"}},
        "/configure_logging": {"A line for each request": {"log_requests": True, "log_requests_level": 1}},
        "/set_internal_state": {"A longer queue": {"server_args": {"max_queued_requests": 64}}},
        "/pause_generation": {"Requests stay where they are": {"mode": "in_place"}},
        "/continue_generation": {"Nothing to say": {}},
        "/update_weights_from_disk": {"A folder": {"model_path": "/path/to/checkpoint"}},
        "/update_weights_from_tensor": {"No tensors": {"serialized_named_tensors": [_NO_TENSORS]}},
        "/cancel_weight_update": {"Nothing to say": {}},
        "/init_weights_update_group": {
            "Two ranks": {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
        },
        "/update_weights_from_distributed": {
            "One tensor": {"names": [_WEIGHT], "dtypes": ["bfloat16"], "shapes": [[49152, 576]]}
        },
        "/destroy_weights_update_group": {"The usual group": {}},
        "/get_weights_by_name": {"The first two rows": {"name": _WEIGHT, "truncate_size": 2}},
        "/weights_checker": {"Checksums": {"action": "checksum"}, "Compare": {"action": "compare"}},
        "/post_process_weights": {"After an update": {"post_process_quantization": True}},
        "/update_weight_version": {"A name": {"new_version": "2"}},
        "/save_sharded_state": {"A new folder": {"path": "weights-1"}},
        "/release_memory_occupation": {"The KV cache": {"tags": ["kv_cache"]}},
        "/resume_memory_occupation": {"The KV cache": {"tags": ["kv_cache"]}},
    }
    return examples | {alias: bodies for path, bodies in examples.items() if (alias := without_v1(path)) is not None}
