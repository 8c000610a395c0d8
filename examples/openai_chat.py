"""Chat over the official OpenAI client: a whole answer, then a streamed one."""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("FLASHMOE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("FLASHMOE_API_KEY", "none"),
    timeout=600,  # a long prompt takes a while to read from disk
)
model = client.models.list().data[0].id
question = "Name a city, and say one thing about it."

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=64,
    temperature=0,
    stop=["\n\n"],
)
print(answer.choices[0].message.content)
print(f"({answer.usage.completion_tokens} tokens, {answer.choices[0].finish_reason})")

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n({chunk.usage.completion_tokens} tokens)")
