"""An agent of LangChain that reads a note; $OPENAI_BASE_URL is the server's address."""

from pathlib import Path

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def read_note(path: str) -> str:
    """Read a note."""
    return Path(path).read_text()


agent = create_agent(ChatOpenAI(model="local"), tools=[read_note], system_prompt="Be brief.")
question = {"messages": [{"role": "user", "content": "What does note.txt say?"}]}
print(agent.invoke(question)["messages"][-1].content)
