"""Two turns with LiteLLM in OpenAI's and in Anthropic's API; $OPENAI_BASE_URL is the server's address."""

import json
import os
from pathlib import Path
from typing import Any

from litellm import completion

TOOL = {
    "name": "read_note",
    "description": "Read a note.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}


def ask(**options: Any) -> str:
    """Answer calls until the model says something."""
    messages: list[Any] = [{"role": "user", "content": "What does note.txt say?"}]
    while True:
        tools = [{"type": "function", "function": TOOL}]
        message = completion(messages=messages, tools=tools, api_key="none", **options).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            text = Path(json.loads(call.function.arguments)["path"]).read_text()
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


url = os.environ["OPENAI_BASE_URL"]
print(ask(model="openai/local", api_base=url))
print(ask(model="anthropic/local", api_base=url.removesuffix("/v1")))
