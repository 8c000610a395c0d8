"""Structured output over the official OpenAI client: a pydantic class in, an object of it out."""

from __future__ import annotations

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]
    on_the_sea: bool


client = OpenAI(
    base_url=os.environ.get("FLASHMOE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("FLASHMOE_API_KEY", "none"),
    timeout=600,
)
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Describe Paris."}],
    response_format=City,
    temperature=0,
    max_tokens=128,
)
city = answer.choices[0].message.parsed
assert city is not None
print(f"{city.name}: {city.size}, {'by' if city.on_the_sea else 'not by'} the sea")
