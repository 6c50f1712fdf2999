"""The request schemas of other servers, as far as they have defaults: every field with the value that its own API gives it.

Written down from the schemas of OpenAI (python client 2.54), SGLang 0.5.23, vLLM 0.33, llama.cpp's server (2026-11) and of what
sglang-router 0.3.2 adds to the requests that it passes on. Fields that say what is to be generated (prompts, messages) are left out.
"""

from typing import Any

Defaults = dict[str, Any]

OPENAI_CHAT: Defaults = {
    "audio": None, "frequency_penalty": 0, "function_call": "none", "functions": [], "logit_bias": None, "logprobs": False,
    "max_completion_tokens": None, "max_tokens": None, "metadata": None, "modalities": ["text"], "moderation": None, "n": 1,
    "parallel_tool_calls": True, "prediction": None, "presence_penalty": 0, "prompt_cache_key": None,
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}, "prompt_cache_retention": "in_memory", "reasoning_effort": "medium",
    "response_format": {"type": "text"}, "safety_identifier": None, "seed": None, "service_tier": "auto", "stop": None,
    "store": False, "stream": False, "stream_options": None, "temperature": 1, "tool_choice": "none", "tools": [],
    "top_logprobs": None, "top_p": 1, "user": "", "verbosity": "medium", "web_search_options": None,
}  # fmt: skip

OPENAI_COMPLETION: Defaults = {
    "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": None, "logprobs": None, "max_tokens": 16, "n": 1,
    "presence_penalty": 0, "seed": None, "stop": None, "stream": False, "stream_options": None, "suffix": None, "temperature": 1,
    "top_p": 1, "user": "",
}  # fmt: skip

_SGLANG_BOTH: Defaults = {
    "model": "default", "frequency_penalty": 0.0, "logit_bias": None, "n": 1, "presence_penalty": 0.0, "response_format": None,
    "seed": None, "stop": None, "stream": False, "stream_options": None, "user": None, "return_hidden_states": False,
    "return_routed_experts": False, "routed_experts_start_len": 0, "return_cached_tokens_details": False,
    "return_spec_tokens_details": False, "return_token_ids": False, "min_tokens": 0, "regex": None, "ebnf": None,
    "stop_token_ids": None, "stop_regex": None, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
    "lora_path": None, "session_id": None, "session_params": None, "custom_params": None, "custom_logit_processor": None,
    "watermark": None, "images_config": None, "mm_processor_kwargs": None, "data_parallel_rank": None, "rid": None,
    "extra_key": None, "cache_salt": None, "priority": None, "bootstrap_host": None, "bootstrap_port": None,
    "bootstrap_room": None, "routed_dp_rank": None, "disagg_prefill_dp_rank": None,
}  # fmt: skip

SGLANG_CHAT: Defaults = _SGLANG_BOTH | {
    "logprobs": False, "top_logprobs": None, "max_tokens": None, "max_completion_tokens": None, "temperature": None, "top_p": None,
    "tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "return_prompt_token_ids": False, "return_meta_info": False,
    "return_input_ids_in_sglext": False, "return_output_ids_in_sglext": False, "return_sampling_mask": False,
    "sampling_logprobs_mode": None, "return_flat_raw_output_top_logprobs": False, "return_flat_raw_top_logprobs_b64": True,
    "reasoning_effort": None, "thinking": None, "task": None, "top_k": None, "min_p": None, "repetition_penalty": None,
    "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True, "chat_template_kwargs": None,
    "max_dynamic_patch": None, "min_dynamic_patch": None, "use_audio_in_video": False, "video_config": None, "input_ids": None,
}  # fmt: skip

SGLANG_COMPLETION: Defaults = _SGLANG_BOTH | {
    "best_of": None, "echo": False, "logprobs": None, "max_tokens": 16, "suffix": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": -1, "min_p": 0.0, "json_schema": None, "repetition_penalty": 1.0, "custom_labels": None,
}  # fmt: skip

SGLANG_GENERATE: Defaults = {
    "rid": None, "session_id": None, "input_ids": None, "input_embeds": None, "image_data": [], "video_data": None,
    "audio_data": None, "mm_hashes": None, "mm_content_hashes": None, "use_audio_in_video": False, "video_config": None,
    "watermark": None, "return_logprob": None, "logprob_start_len": None, "top_logprobs_num": None, "token_ids_logprob": None,
    "return_sampling_mask": None, "sampling_logprobs_mode": None, "return_text_in_logprobs": False,
    "return_flat_raw_top_logprobs": False, "return_flat_raw_output_top_logprobs": False, "return_flat_raw_top_logprobs_b64": False,
    "stream": False, "log_metrics": True, "return_hidden_states": False, "return_routed_experts": False,
    "routed_experts_start_len": 0, "return_indexer_topk": False, "modalities": None, "session_params": {}, "lora_path": None,
    "lora_id": None, "custom_logit_processor": None, "positional_embed_overrides": None, "bootstrap_host": None,
    "bootstrap_port": None, "bootstrap_room": None, "bootstrap_pair_key": None, "decode_tp_size": None, "routed_dp_rank": None,
    "data_parallel_rank": None, "disagg_prefill_dp_rank": None, "routing_key": None, "conversation_id": None,
    "http_worker_ipc": None, "background": False, "require_reasoning": False, "max_thinking_tokens": None, "priority": None,
    "extra_key": None, "no_logs": False, "custom_labels": None, "return_bytes": False, "return_entropy": False,
    "return_prompt_token_ids": False, "external_trace_header": None, "received_time": None, "need_wait_for_mm_inputs": None,
    "num_items_assigned": None, "encoder_urls": None, "max_dynamic_patch": None, "min_dynamic_patch": None,
    "image_max_dynamic_patch": None, "video_max_dynamic_patch": None, "images_config": None, "mm_processor_kwargs": None,
    "multi_item_delimiter_indices": None, "token_indices_to_pool": None, "cache_salt": None, "kv_hints": None,
}  # fmt: skip

SGLANG_SAMPLING: Defaults = {
    "max_new_tokens": 128, "stop": None, "stop_token_ids": None, "stop_regex": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": 1 << 30, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0, "n": 1, "beam_width": None, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
    "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False,
    "stream_interval": None, "logit_bias": None, "sampling_seed": None, "custom_params": None, "watermark": None,
    "stop_strs": None, "stop_regex_strs": None, "stop_str_max_len": 0, "stop_regex_max_len": 0, "is_normalized": False,
    "ebnf_full_assistant": False,
}  # fmt: skip

_VLLM_BOTH: Defaults = {
    "model": None, "frequency_penalty": None, "logit_bias": None, "n": 1, "presence_penalty": None, "response_format": None,
    "seed": None, "stop": [], "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None,
    "use_beam_search": False, "top_k": None, "min_p": None, "repetition_penalty": None, "watermarking": None,
    "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None, "truncation_side": None,
    "allowed_token_ids": None, "prompt_logprobs": None, "logprob_token_ids": None, "bad_words": [], "echo": False,
    "structured_outputs": None, "priority": 0, "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "return_mm_kwargs": True, "cache_salt": None,
    "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None,
    "thinking_token_budget": None, "stream_interval": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
    "guided_grammar": None, "guided_decoding_backend": None, "guided_whitespace_pattern": None, "logits_processors": None,
}  # fmt: skip

VLLM_CHAT: Defaults = _VLLM_BOTH | {
    "logprobs": False, "top_logprobs": 0, "max_tokens": None, "max_completion_tokens": None, "tools": None, "tool_choice": "none",
    "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "documents": None, "chat_template": None,
    "chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None, "return_prompt_text": None,
}  # fmt: skip

VLLM_COMPLETION: Defaults = _VLLM_BOTH | {
    "logprobs": None, "max_tokens": 16, "suffix": None, "prompt_embeds": None, "add_special_tokens": True, "best_of": None,
}  # fmt: skip

LLAMA_CPP: Defaults = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "n_predict": -1, "max_tokens": -1, "n_indent": 0, "n_keep": 0,
    "n_discard": 0, "n_cmpl": 1, "n_cache_reuse": 0, "stream": False, "stop": [], "typical_p": 1.0, "repeat_penalty": 1.0,
    "repeat_last_n": 64, "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_allowed_length": 2, "dry_penalty_last_n": 64, "dry_sequence_breakers": ["\n", ":", '"', "*"], "xtc_probability": 0.0,
    "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "grammar": "", "json_schema": None, "seed": -1,
    "ignore_eos": False, "logit_bias": [], "n_probs": 0, "min_keep": 0, "t_max_predict_ms": 0, "id_slot": -1, "cache_prompt": True,
    "return_tokens": False, "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "timings_per_token": False, "return_progress": False, "sse_ping_interval": -1, "post_sampling_probs": False,
    "response_fields": [], "lora": [], "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
}  # fmt: skip

ROUTER_CHAT: Defaults = {
    "stream_reasoning": True, "separate_reasoning": True, "return_hidden_states": False, "no_stop_trim": False, "ignore_eos": False,
    "continue_final_message": False, "skip_special_tokens": True, "logprobs": False,
}  # fmt: skip

ROUTER_COMPLETION: Defaults = {"return_hidden_states": False, "echo": False}

ROUTER_GENERATE: Defaults = {
    "model": None, "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False,
}  # fmt: skip

ROUTER_RERANK: Defaults = {"return_documents": True, "rid": None, "user": None}

VLLM_TOKENIZE: Defaults = {
    "model": None, "add_special_tokens": True, "return_token_strs": False, "add_generation_prompt": True,
    "continue_final_message": False, "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None,
    "mm_processor_kwargs": None, "tools": None,
}  # fmt: skip

SGLANG_TOKENIZE: Defaults = {
    "model": "default", "tools": None, "tool_choice": None, "reasoning_effort": None, "continue_final_message": False,
    "chat_template_kwargs": None, "add_special_tokens": True, "add_generation_prompt": None,
}  # fmt: skip

LLAMA_CPP_TOKENIZE: Defaults = {"parse_special": True, "with_pieces": False}

CHAT = {
    "OpenAI": OPENAI_CHAT, "SGLang": SGLANG_CHAT, "vLLM": VLLM_CHAT, "llama.cpp": LLAMA_CPP, "sglang-router": ROUTER_CHAT,
}  # fmt: skip
COMPLETION = {
    "OpenAI": OPENAI_COMPLETION, "SGLang": SGLANG_COMPLETION, "vLLM": VLLM_COMPLETION, "llama.cpp": LLAMA_CPP,
    "sglang-router": ROUTER_COMPLETION,
}  # fmt: skip
GENERATE = {"SGLang": SGLANG_GENERATE, "sglang-router": ROUTER_GENERATE}
TOKENIZE = {"vLLM": VLLM_TOKENIZE, "SGLang": SGLANG_TOKENIZE, "llama.cpp": LLAMA_CPP_TOKENIZE}
DETOKENIZE = {"SGLang": {"model": "default", "skip_special_tokens": True}, "vLLM": {"model": None}}
ROUTER = {"chat": ROUTER_CHAT, "completions": ROUTER_COMPLETION, "generate": ROUTER_GENERATE, "rerank": ROUTER_RERANK}
