"""Ask for an answer in JSON that follows a schema.

retain serve --model smollm2 &
python examples/schema.py
"""

import json

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["de", "en", "fr", "it"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Describe Marie, who is 34 and speaks French and Italian, as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    max_completion_tokens=120,
    temperature=0,
)
print(json.loads(answer.choices[0].message.content))
