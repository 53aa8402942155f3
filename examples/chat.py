"""Chat through OpenAI's client: a whole answer, then a stream.

retain serve --model smollm2 &
python examples/chat.py
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(model="smollm2", messages=messages, max_completion_tokens=32, temperature=0)
print(answer.choices[0].message.content)

messages += [answer.choices[0].message, {"role": "user", "content": "And of Italy?"}]
for chunk in client.chat.completions.create(
    model="smollm2", messages=messages, max_completion_tokens=32, temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
