"""Tables of the fields that clients send and the server does not honour, for each object of a request.

A field is accepted where it changes no answer, and refused where it would. tools/reference.py writes these tables into
docs/reference/http.md.
"""

from __future__ import annotations

from retain.server.request_model import Accepted, FieldTable, Refused

NO_ACCOUNTS = Accepted("nothing is counted or stored by user")
HINT = Accepted("a hint to hosted models")
ONLY_DEFAULT = "another value would change the answer"


def only(*values: bool | int | float | str, why: str = ONLY_DEFAULT) -> Accepted:
    """Accept these values only: those that ask for what the server does anyway."""
    return Accepted(why, values)


EXTENSIONS: FieldTable = {}
SAMPLING: FieldTable = {
    **EXTENSIONS,
    # OpenAI
    "user": NO_ACCOUNTS,
    "safety_identifier": NO_ACCOUNTS,
    "metadata": NO_ACCOUNTS,
    "store": Accepted("nothing is stored"),
    # vLLM and SGLang; gateways add them to every request
    "no_stop_trim": only(False),
    "skip_special_tokens": only(True),
    "spaces_between_special_tokens": only(True),
    "include_stop_str_in_output": only(False),
    "continue_final_message": only(False),
    "separate_reasoning": only(True, why="reasoning is in `reasoning_content`"),
    "stream_reasoning": only(True),
    "include_reasoning": only(True),
    "return_hidden_states": only(False),
    "return_token_ids": only(False),
    "return_tokens_as_token_ids": only(False),
    "use_beam_search": only(False),
    "priority": only(0),
}
COMPLETION: FieldTable = {
    **SAMPLING,
    "suffix": Refused("the prompt has to say where the middle is, with the model's own tokens"),
}
CHAT: FieldTable = {
    **SAMPLING,
    "parallel_tool_calls": Accepted("the model decides how many tools it calls"),
}
STREAM_OPTIONS: FieldTable = {"include_obfuscation": Accepted("the stream has no padding")}

RESPONSES: FieldTable = {
    "prompt_cache_key": Accepted("equal prefixes are always shared"),
    "service_tier": Accepted("there is one tier", ("auto", "default")),
    "truncation": only("disabled"),
    "background": only(False),
    "context_management": Refused("the conversation is never shortened"),
    "conversation": Refused("use previous_response_id"),
    "max_tool_calls": Refused("it limits hosted tools"),
    "prompt": Refused("there are no stored prompts"),
    "reasoning": Refused("the model cannot be told how much to reason"),
}
RESPONSES_OUTPUT_TEXT: FieldTable = {
    "annotations": Accepted("the model sees the text only"),
    "logprobs": Accepted("the model sees the text only"),
}
RESPONSES_REASONING: FieldTable = {
    "summary": Accepted("the model sees the reasoning itself"),
    "encrypted_content": Refused("reasoning is text here"),
}
RESPONSES_TEXT: FieldTable = {"verbosity": only("medium")}

MESSAGES: FieldTable = {
    "metadata": NO_ACCOUNTS,
    "context_management": Accepted("the conversation is never shortened"),
    "service_tier": Accepted("there is one tier", ("auto", "standard_only")),
    "inference_geo": HINT,
    "speed": Accepted("there is one speed", ("standard", "fast")),
    "container": Refused("there are no server tools"),
    "mcp_servers": Accepted("the server calls no other servers", ([],)),
}
MESSAGES_TEXT_BLOCK: FieldTable = {"citations": HINT}
MESSAGES_TOOL_USE: FieldTable = {"caller": HINT}
MESSAGES_TOOL: FieldTable = {
    "strict": HINT,
    "allowed_callers": HINT,
    "defer_loading": HINT,
    "eager_input_streaming": HINT,
    "input_examples": HINT,
}
MESSAGES_TOOL_CHOICE: FieldTable = {
    "disable_parallel_tool_use": Accepted("the model decides how many tools it calls"),
}
MESSAGES_THINKING: FieldTable = {
    "budget_tokens": HINT,
    "display": Accepted("reasoning is always shown", ("summarized", "omitted")),
}
MESSAGES_OUTPUT: FieldTable = {"effort": Accepted("a hint to hosted models", ("low", "medium", "high", "xhigh", "max"))}
TOKENIZE: FieldTable = {"return_token_strs": only(False)}
TOKENIZE_CHAT: FieldTable = {**TOKENIZE, "add_special_tokens": only(False), "continue_final_message": only(False)}
