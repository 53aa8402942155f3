"""An agent of LlamaIndex that reads a note; $OPENAI_BASE_URL is the server's address."""

import asyncio
import os
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def read_note(path: str) -> str:
    """Read a note."""
    return Path(path).read_text()


async def main() -> None:
    """Ask once."""
    llm = OpenAILike(
        model="local",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key="none",
        context_window=262144,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(tools=[read_note], llm=llm, system_prompt="Be brief.")
    print(await agent.run("What does note.txt say?"))


asyncio.run(main())
