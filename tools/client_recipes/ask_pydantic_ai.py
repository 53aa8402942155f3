"""An agent of Pydantic AI that reads a note; $OPENAI_BASE_URL is the server's address."""

from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("local"), instructions="Be brief.")


@agent.tool_plain
def read_note(path: str) -> str:
    """Read a note."""
    return Path(path).read_text()


print(agent.run_sync("What does note.txt say?").output)
