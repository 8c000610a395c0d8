"""A tool over the official OpenAI client: the model fills in its arguments, we run it, and the
result goes back.

Which tool is called is ours to say (`tool_choice`); the arguments always follow its schema.
"""

from __future__ import annotations

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("FLASHMOE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("FLASHMOE_API_KEY", "none"),
    timeout=600,
)
model = client.models.list().data[0].id


def add(first: int, second: int) -> int:
    return first + second


tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "first": {"type": "integer", "minimum": 0, "maximum": 999},
                "second": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["first", "second"],
        },
    },
}
messages = [{"role": "user", "content": "What is 17 plus 25?"}]
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[tool],
    tool_choice={"type": "function", "function": {"name": "add"}},
    temperature=0,
    max_tokens=128,
)
call = answer.choices[0].message.tool_calls[0]
arguments = json.loads(call.function.arguments)
result = add(**arguments)
print(f"{call.function.name}({arguments}) = {result}")

messages += [
    answer.choices[0].message,
    {"role": "tool", "tool_call_id": call.id, "content": str(result)},
]
final = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
print(final.choices[0].message.content)
