"""Two turns with the providers of goose, by its SDK; $OPENAI_BASE_URL is the server's address.

The SDK has what goose sends and reads. The loop of the agent is ours here.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from goose import (
    MessageContent,
    MessageRole,
    ProviderMessage,
    ProviderModelConfig,
    ProviderTool,
    declarative_provider_from_json,
)

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
PROVIDER = {  # a file in ~/.config/goose/custom_providers of goose itself
    "name": "retain",
    "engine": "openai",
    "display_name": "retain",
    "api_key_env": "",
    "requires_auth": False,
    "base_url": f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    "models": [{"name": "local", "context_limit": 262144}],
}
TOOL = ProviderTool(name="read_note", description="Read a note.", input_schema_json=json.dumps(SCHEMA))


async def main() -> None:
    """Answer calls until the model says something."""
    provider = declarative_provider_from_json(json.dumps(PROVIDER))
    model = ProviderModelConfig(model_name="local", context_limit=262144)
    question = MessageContent.TEXT("What does note.txt say?")
    messages = [ProviderMessage(role=MessageRole.USER, content=[question])]
    while True:
        done = await provider.complete(model, "Be brief.", messages, [TOOL])
        calls = [part for part in done.content if part.is_TOOL_REQUEST()]
        if not calls:
            print("".join(part.text for part in done.content if part.is_TEXT()))
            return
        messages.append(ProviderMessage(role=MessageRole.ASSISTANT, content=done.content))
        for call in calls:
            text = Path(json.loads(call.arguments_json)["path"]).read_text()
            content = json.dumps([{"type": "text", "text": text}])
            result = MessageContent.TOOL_RESULT(id=call.id, success=True, content_json=content)
            messages.append(ProviderMessage(role=MessageRole.USER, content=[result]))


asyncio.run(main())
sys.stdout.flush()
os._exit(0)  # version 0.1.0a13 sometimes aborts when Python ends
