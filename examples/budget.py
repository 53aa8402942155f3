"""Ask one question with the full KV cache and with smaller budgets, and print the memory of each answer.

retain serve --model smollm2 &
python examples/budget.py
"""

from openai import OpenAI

POLICIES = ("full", "reread:budget=50%,share=all,value=norm", "h2o:budget=25%")
STORY = "The lighthouse keeper of Skellig kept a diary of storms, gulls and the price of lamp oil. " * 60

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
for policy in POLICIES:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": f"{STORY}\n\nWhat did the keeper write about?"}],
        max_completion_tokens=40,
        temperature=0,
        extra_body={"kv_policy": policy},
    )
    kv = answer.retain[0]["kv"]
    share = kv["bytes_end"] / kv["bytes_if_full"]
    print(f"{policy:45} {kv['bytes_end'] / 2**20:5.1f} MiB at the end ({share:.0%} of full): ", end="")
    print(answer.choices[0].message.content)
