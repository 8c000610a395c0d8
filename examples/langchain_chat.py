"""LangChain's OpenAI client: an answer, a streamed one, and one in a given shape."""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Answer(BaseModel):
    """An answer in one word."""

    word: str = Field(max_length=12)


llm = ChatOpenAI(
    base_url=os.environ.get("FLASHMOE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("FLASHMOE_API_KEY", "none"),
    model=os.environ.get("FLASHMOE_MODEL", ""),  # "": the server's first one
    temperature=0,
    max_tokens=64,
    timeout=600,
)
print(llm.invoke("What is the capital of England?").content)
print("".join(str(chunk.content) for chunk in llm.stream("Count to three.")))
shaped = llm.with_structured_output(Answer, method="json_schema")
print(shaped.invoke("What is the capital of England?"))
