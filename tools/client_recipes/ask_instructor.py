"""Two turns with Instructor, which reads a note into an object; $OPENAI_BASE_URL is the server's address."""

from pathlib import Path

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Task(BaseModel):
    """A task of a note."""

    what: str
    priority: int


client = instructor.from_openai(OpenAI())
messages = [{"role": "user", "content": f"Which task is this? {Path('note.txt').read_text()}"}]
task = client.chat.completions.create(model="local", messages=messages, response_model=Task)
messages += [{"role": "assistant", "content": task.model_dump_json()}, {"role": "user", "content": "Are you sure?"}]
print(client.chat.completions.create(model="local", messages=messages, response_model=Task))
by_schema = instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
print(by_schema.chat.completions.create(model="local", messages=messages, response_model=Task))
