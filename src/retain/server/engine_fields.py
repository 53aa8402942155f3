"""Fields of completions and chat completions that other engines and gateways have, and OpenAI's API has not.

Their clients send them to every server, mostly at the values that they have anyway.
"""

from __future__ import annotations

from retain.server.request_model import Accepted, FieldTable, Refused, only

USE_RESPONSE_FORMAT = Refused("use response_format with a JSON schema")
NO_GRAMMAR = only("", why=USE_RESPONSE_FORMAT.why)
NO_IMAGES = Accepted("there are no images")
NO_TRACING = Accepted("the answer is the same")
ONE_MODEL = Accepted("there is one model and one provider")
PROMPT_STAYS = Accepted("a prompt is never shortened")

VLLM: FieldTable = {
    "skip_special_tokens": only(True),
    "spaces_between_special_tokens": only(True),
    "include_stop_str_in_output": only(False),
    "use_beam_search": only(False),
    "early_stopping": only(False),
    "length_penalty": only(1, why="it is for beam search"),
    "watermarking": only(False),
    "bad_words": only([], why="use logit_bias"),
    "allowed_token_ids": Refused("use response_format or logit_bias"),
    "logits_processors": only([], why="a request brings no code"),
    "logprob_token_ids": Refused("use top_logprobs"),
    "prompt_logprobs": Refused("use /v1/completions with echo and logprobs"),
    "truncate_prompt_tokens": Refused("a prompt is never shortened"),
    "truncation_side": PROMPT_STAYS,
    "thinking_token_budget": only(-1, why="half of max_tokens before a structured output, else max_tokens"),
    "repetition_detection": Refused("an answer ends by its tokens only"),
    "structured_outputs": USE_RESPONSE_FORMAT,
    "guided_json": USE_RESPONSE_FORMAT,
    "guided_regex": NO_GRAMMAR,
    "guided_choice": only([], why=USE_RESPONSE_FORMAT.why),
    "guided_grammar": NO_GRAMMAR,
    "guided_decoding_backend": Accepted("there is one"),
    "guided_whitespace_pattern": USE_RESPONSE_FORMAT,
    "return_tokens_as_token_ids": only(False),
    "return_token_offsets": only(False),
    "priority": only(0, why="requests of a key are served in the order of their arrival, and keys take turns"),
    "request_id": Accepted("answers have ids of the server"),
    "session_id": NO_TRACING,
    "stream_interval": Accepted("see --stream-interval"),
    "kv_transfer_params": Refused("caches are not sent between servers"),
    "ec_transfer_params": Refused("caches are not sent between servers"),
    "vllm_xargs": only({}, why="there are no extensions of the engine"),
    "prompt_embeds": Refused("prompts are texts or token ids"),
}
VLLM_CHAT: FieldTable = {
    "add_special_tokens": only(False, why="the chat template writes them"),
    "echo": only(False),
    "chat_template": Refused("the template is the server's"),
    "documents": only([], why="put them into a message, or into chat_template_kwargs"),
    "include_reasoning": only(True),
    "return_prompt_text": only(False),
    "mm_processor_kwargs": NO_IMAGES,
    "media_io_kwargs": NO_IMAGES,
}
SGLANG: FieldTable = {
    "no_stop_trim": only(False),
    "separate_reasoning": only(True, why="reasoning is in `reasoning_content`"),
    "stream_reasoning": only(True),
    "return_hidden_states": only(False),
    "return_routed_experts": only(False),
    "return_cached_tokens_details": NO_TRACING,
    "return_meta_info": only(False),
    "regex": NO_GRAMMAR,
    "ebnf": NO_GRAMMAR,
    "stop_regex": only("", [], why="use stop"),
    "custom_logit_processor": Refused("a request brings no code"),
    "custom_params": Refused("a request brings no code"),
    "lora_path": only("", why="there are no adapters"),
    "session_params": Refused("equal prefixes are always shared: send the whole conversation"),
    "rid": Accepted("answers have ids of the server"),
}
LLAMA_CPP: FieldTable = {
    "typical_p": only(1),
    "typ_p": only(1),
    "tfs_z": only(1),
    "top_n_sigma": only(-1, 0),
    "min_keep": only(0, 1),
    "dynatemp_range": only(0),
    "dynatemp_exponent": Accepted("it is read with dynatemp_range"),
    "xtc_probability": only(0),
    "xtc_threshold": Accepted("it is read with xtc_probability"),
    "mirostat": only(0),
    "mirostat_tau": Accepted("it is read with mirostat"),
    "mirostat_eta": Accepted("it is read with mirostat"),
    "dry_multiplier": only(0),
    "dry_base": Accepted("it is read with dry_multiplier"),
    "dry_allowed_length": Accepted("it is read with dry_multiplier"),
    "dry_penalty_last_n": Accepted("it is read with dry_multiplier"),
    "dry_sequence_breakers": Accepted("they are read with dry_multiplier"),
    "adaptive_target": only(-1),
    "adaptive_decay": Accepted("it is read with adaptive_target"),
    "repeat_last_n": Accepted("repeat_penalty counts the whole text; without it this changes nothing"),
    "penalize_nl": Accepted("repeat_penalty counts newlines too; without it this changes nothing"),
    "samplers": Refused("the order is temperature, top_k, top_p, min_p"),
    "grammar": NO_GRAMMAR,
    "json_schema": USE_RESPONSE_FORMAT,
    "n_probs": only(0, why="use logprobs"),
    "post_sampling_probs": only(False),
    "return_tokens": only(False, why="use return_token_ids"),
    "n_keep": PROMPT_STAYS,
    "n_discard": PROMPT_STAYS,
    "n_indent": only(0),
    "n_cache_reuse": Accepted("equal prefixes are always shared"),
    "cache_prompt": Accepted("equal prefixes are always shared"),
    "id_slot": Accepted("requests have no slots of their own"),
    "slot_id": Accepted("requests have no slots of their own"),
    "t_max_predict_ms": only(-1, 0, why="see --request-timeout"),
    "lora": only([], why="there are no adapters"),
    "reasoning_format": only("auto", "deepseek", why="reasoning is in `reasoning_content`"),
    "parse_tool_calls": only(True),
    "timings_per_token": NO_TRACING,
    "return_progress": NO_TRACING,
    "sse_ping_interval": NO_TRACING,
    "backend_sampling": NO_TRACING,
    "verbose": only(False),
}
OLLAMA: FieldTable = {
    "num_ctx": Accepted("see --max-model-len"),
    "keep_alive": Accepted("the model always stays in memory"),
    "options": only({}, why="put its fields into the request"),
}
OPENROUTER: FieldTable = {
    "provider": ONE_MODEL,
    "models": ONE_MODEL,
    "route": ONE_MODEL,
    "usage": Accepted("every answer has it; for streams see stream_options"),
    "transforms": only([], why="a prompt is never shortened"),
    "plugins": only([], why="there are none"),
    "top_a": only(0),
    "trace": NO_TRACING,
}
ENGINES: FieldTable = {**OPENROUTER, **OLLAMA, **LLAMA_CPP, **SGLANG, **VLLM}
