"""Tables of the fields that clients send and the server does not honour, for each object of a request.

A field is accepted where it changes no answer, and refused where it would. tools/reference.py writes these tables into
docs/reference/http.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from retain.server.engine_fields import ENGINES, NO_TRACING, VLLM_CHAT
from retain.server.request_model import Accepted, FieldTable, Refused, only

NO_ACCOUNTS = Accepted("nothing is counted or stored by user")
HINT = Accepted("a hint to hosted models")
SHARED = Accepted("equal prefixes are always shared")

SAMPLING: FieldTable = {
    "user": NO_ACCOUNTS,
    "safety_identifier": NO_ACCOUNTS,
    "metadata": NO_ACCOUNTS,
    "store": Accepted("nothing is stored: use /v1/responses"),
    "service_tier": Accepted("there is one tier"),
    "prompt_cache_key": SHARED,
    "prompt_cache_retention": Accepted("use pin"),
    "prompt_cache_options": SHARED,
    **ENGINES,
}
COMPLETION: FieldTable = {
    **SAMPLING,
    "continue_final_message": only(False),
    "add_special_tokens": only(True),
}
POOLED: FieldTable = {
    "user": NO_ACCOUNTS,
    "metadata": NO_ACCOUNTS,
    "request_id": NO_TRACING,
    "priority": only(0),
    "truncate_prompt_tokens": Refused("a text that is too long is an error"),
    "add_special_tokens": only(True),
}
CHAT: FieldTable = {
    **SAMPLING,
    **VLLM_CHAT,
    "parallel_tool_calls": Accepted("the model decides how many tools it calls"),
    "verbosity": HINT,
    "prediction": Accepted("a hint that changes the speed only: see speculate"),
    "modalities": only(["text"], why="the model writes text"),
    "audio": Refused("the model writes text"),
    "web_search_options": Refused("the server searches nothing"),
    "moderation": Refused("nothing is moderated"),
    "functions": only([], why="deprecated: use tools"),
    "function_call": only("none", "auto", why="deprecated: use tool_choice"),
    "best_of": only(1),
}
CHAT_REASONING: FieldTable = {
    "max_tokens": HINT,
    "exclude": only(False),
    "summary": Accepted("the answer has the reasoning itself"),
}
CACHE_CONTROL = Accepted("every prompt is cached: to keep one, use pin")
CHAT_MESSAGE: FieldTable = {
    "cache_control": CACHE_CONTROL,
    "id": NO_TRACING,
    "metadata": NO_ACCOUNTS,
}
CHAT_INPUT_MESSAGE: FieldTable = {
    **CHAT_MESSAGE,
    "tool_calls": only([]),
}
CHAT_ASSISTANT_MESSAGE: FieldTable = {  # clients send the answers back as they came
    **CHAT_MESSAGE,
    "annotations": Accepted("the model sees the text only"),
    "images": only([], why="the model reads text"),
    "audio": Refused("the model reads text"),
    "function_call": Refused("deprecated: use tool_calls"),
    "reasoning_details": Accepted("the text is in `reasoning`"),
    "thinking_blocks": Accepted("the text is in `reasoning_content`"),
    "provider_specific_fields": Accepted("they are of another server"),
    "tool_call_id": Accepted("it belongs to messages of tools"),
    "prefix": only(False),
    "partial": only(False),
    "parsed": Accepted("the text is in `content`"),
}
CHAT_FUNCTION_CALL: FieldTable = {"parsed_arguments": Accepted("the text is in `arguments`")}
CHAT_TEXT_PART: FieldTable = {
    "cache_control": CACHE_CONTROL,
    "annotations": Accepted("the model sees the text only"),
    "index": NO_TRACING,
}
CHAT_TOOL: FieldTable = {"cache_control": CACHE_CONTROL, "defer_loading": HINT, "strict": HINT}
CHAT_TOOL_CALL: FieldTable = {
    "index": Accepted("calls are in the order of the list"),
    "provider_specific_fields": Accepted("they are of another server"),
}
STREAM_OPTIONS: FieldTable = {"include_obfuscation": Accepted("the stream has no padding")}

MODEL_SEES_TEXT = Accepted("the model sees the text only")
RESPONSES: FieldTable = {
    "client_metadata": NO_ACCOUNTS,
    "prompt_cache_key": Accepted("equal prefixes are always shared"),
    "prompt_cache_retention": Accepted("prefixes stay as long as there is room"),
    "service_tier": Accepted("there is one tier"),
    "truncation": only("disabled", "auto", why="a conversation is never shortened: one that is too long is an error"),
    "context_management": Accepted("a conversation is never shortened: one that is too long is an error"),
    "background": only(False),
    "background_options": Accepted("nothing runs in the background"),
    "max_tool_calls": Accepted("it limits hosted tools"),
    "access_programs": HINT,
    "conversation": Refused("use previous_response_id"),
    "moderation": Refused("there is no moderation"),
    "prompt": Refused("there are no stored prompts"),
}
RESPONSES_STREAM_OPTIONS: FieldTable = {
    **STREAM_OPTIONS,
    "include_usage": Accepted("the last event always has the usage"),
    "reasoning_summary_delivery": Accepted("reasoning is never summarized"),
}
RESPONSES_PROMPT_CACHE: FieldTable = {
    "mode": Accepted("equal prefixes are always shared"),
    "ttl": Accepted("prefixes stay as long as there is room; `pin` keeps them"),
}
RESPONSES_REASONING_OPTIONS: FieldTable = {
    "summary": Accepted("reasoning is returned whole"),
    "generate_summary": Accepted("reasoning is returned whole"),
    "context": Accepted("the chat template decides which reasoning it shows"),
    "mode": HINT,
}
RESPONSES_TEXT: FieldTable = {"verbosity": only("low", "medium", "high", why="a hint to hosted models")}
RESPONSES_TOOL: FieldTable = {
    "async": HINT,
    "allowed_callers": HINT,
    "defer_loading": Accepted("the model sees every tool from the beginning"),
    "output_schema": HINT,
}
RESPONSES_ENVIRONMENT: FieldTable = {
    "skills": Accepted("what the model should know belongs to the instructions", ([],)),
}
RESPONSES_ITEM: FieldTable = {
    "phase": MODEL_SEES_TEXT,
    "async": HINT,
    "caller": HINT,
    "created_by": NO_ACCOUNTS,
    "metadata": NO_ACCOUNTS,
    "internal_chat_message_metadata_passthrough": NO_ACCOUNTS,
}
RESPONSES_INPUT_TEXT: FieldTable = {
    "annotations": MODEL_SEES_TEXT,
    "logprobs": MODEL_SEES_TEXT,
    "prompt_cache_breakpoint": Accepted("equal prefixes are always shared"),
}
RESPONSES_OUTPUT_TEXT: FieldTable = {
    "annotations": MODEL_SEES_TEXT,
    "logprobs": MODEL_SEES_TEXT,
}
RESPONSES_REASONING: FieldTable = {
    **RESPONSES_ITEM,
    "summary": Accepted("the model sees the reasoning itself"),
    "format": Accepted("a mark of other servers"),
    "signature": Accepted("a mark of other servers"),
}
RESPONSES_OUTPUT_ITEM: FieldTable = {
    **RESPONSES_ITEM,
    "name": Accepted("the call has it"),
    "namespace": Accepted("the call has it"),
    "max_output_length": Accepted("outputs are not shortened"),
}
RESPONSES_SHELL_CALL: FieldTable = {**RESPONSES_ITEM, "environment": Accepted("the client's own shell runs it")}
RESPONSES_COMMAND_OUTPUT: FieldTable = {"created_by": NO_ACCOUNTS}
RESPONSES_TOOLS_ITEM: FieldTable = {
    **RESPONSES_ITEM,
    "role": Accepted("tools are shown at the beginning"),
    "execution": Accepted("tools are shown at the beginning"),
}

ONE_MODEL = Accepted("there is one model")
READ_BY_HOSTS = Accepted("hosted tools are left out")
MESSAGES: FieldTable = {
    "metadata": NO_ACCOUNTS,
    "user_profile_id": NO_ACCOUNTS,
    "workspace_id": NO_ACCOUNTS,
    "billing_policy": NO_ACCOUNTS,
    "betas": Accepted("every field is known without"),
    "anthropic_beta": Accepted("every field is known without"),
    "anthropic_version": Accepted("there is one version"),
    "fallbacks": ONE_MODEL,
    "fallback_credit_token": ONE_MODEL,
    "context_management": Accepted("the conversation is never shortened"),
    "compaction": Refused("the conversation is never shortened: ask for a summary in words"),
    "thread": Refused("send the whole conversation"),
    "service_tier": Accepted("there is one tier", ("auto", "standard_only")),
    "inference_geo": HINT,
    "speed": Accepted("there is one speed", ("standard", "fast")),
    "container": READ_BY_HOSTS,
}
NOT_GENERATED = Accepted("nothing is generated")
COUNT_TOKENS: FieldTable = {
    **MESSAGES,
    **dict.fromkeys(("max_tokens", "stream", "temperature", "top_p", "stop_sequences", "diagnostics"), NOT_GENERATED),
}
MESSAGES_CACHE_CONTROL: FieldTable = {"scope": Accepted("prefixes are shared by requests of one key and salt")}
MESSAGES_CITED_BLOCK: FieldTable = {"citations": Accepted("the model sees the text only")}
MESSAGES_TEXT_SOURCE: FieldTable = {"media_type": only("text/plain")}
MESSAGES_TOOL_USE: FieldTable = {"caller": READ_BY_HOSTS, "toolset_name": READ_BY_HOSTS}
MESSAGES_TOOL_RESULT: FieldTable = {"toolset_name": READ_BY_HOSTS}
MESSAGES_COMPACTION: FieldTable = {
    "encrypted_content": Accepted("the model sees the summary"),
    "signature": Accepted("nothing is checked"),
    "tool_changes": Accepted("all tools are in the prompt"),
}
MESSAGES_SYSTEM_MESSAGE: FieldTable = {"output_config": HINT}
MESSAGES_TOOL: FieldTable = {
    "strict": HINT,
    "allowed_callers": HINT,
    "defer_loading": Accepted("all tools are in the prompt"),
    "eager_input_streaming": HINT,
    "input_examples": HINT,
}
MESSAGES_TOOL_CHOICE: FieldTable = {
    "disable_parallel_tool_use": Accepted("the model decides how many tools it calls"),
}
MESSAGES_THINKING: FieldTable = {
    "budget_tokens": HINT,
    "block_binding": Accepted("signatures are not checked"),
    "display": Accepted("reasoning is always shown", ("summarized", "omitted", "updates")),
}
MESSAGES_OUTPUT: FieldTable = {
    "effort": Accepted("a hint to hosted models", ("low", "medium", "high", "xhigh", "max")),
    "task_budget": HINT,
}
# Types of blocks, and of the sources of documents.
MESSAGES_REFUSED_TYPES: Mapping[str, Refused] = {
    "image": Refused("the model reads text only"),
    "container_upload": Refused("there are no hosted tools"),
    "tool_addition": Refused("tools do not change inside of a conversation: send them in `tools`"),
    "tool_removal": Refused("tools do not change inside of a conversation: leave them out of `tools`"),
    "base64": Refused("send a document as text"),
    "url": Refused("send a document as text"),
    "file": Refused("send a document as text"),
}
TOKENIZE: FieldTable = {"return_token_strs": only(False)}
TOKENIZE_CHAT: FieldTable = {**TOKENIZE, "add_special_tokens": only(False)}
