"""Anthropic's Messages API: conversations in its format, answered as chat completions are."""
