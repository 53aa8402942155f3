"""The OpenAI API: protocol, serving, streaming, tool calls. Does not depend on: how requests are scheduled."""
