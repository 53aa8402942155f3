"""OpenAI's Responses API: items to chat completions, and answers to items."""
