"""An agent of the OpenAI Agents SDK that reads a note; $OPENAI_BASE_URL is the server's address."""

from pathlib import Path

from agents import Agent, Runner, function_tool


@function_tool
def read_note(path: str) -> str:
    """Read a note."""
    return Path(path).read_text()


agent = Agent(name="reader", instructions="Be brief.", model="local", tools=[read_note])
print(Runner.run_sync(agent, "What does note.txt say?").final_output)
