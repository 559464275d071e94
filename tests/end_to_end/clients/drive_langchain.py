"""URL and model -> what langchain-openai makes of the API, as one JSON line. Runs in that package's own environment."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is 12 + 30? Show the work."


async def main(url: str, model: str) -> None:
    how: dict[str, Any] = {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "temperature": 0,
        "seed": 7,
    }
    chat = ChatOpenAI(model=model, max_tokens=32, **how)
    whole = chat.invoke(QUESTION)
    pieces = list(chat.stream(QUESTION, stream_usage=True))
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | chat
    batch = chain.batch([{"question": QUESTION}, {"question": "What is 2 + 2? Show the work."}])
    later = [
        piece.content async for piece in chat.astream([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    ]
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    plain = OpenAI(model=model, max_tokens=16, **how).invoke("def add(a, b):")
    try:
        ChatOpenAI(model="nobody", **how).invoke(QUESTION)
        refused = ""
    except openai.NotFoundError as error:
        refused = str(error.code)
    said = {
        "text": whole.content,
        "usage": dict(whole.usage_metadata or {}),
        "finish": whole.response_metadata["finish_reason"],
        "streamed": "".join(str(piece.content) for piece in pieces),
        "streamed_usage": [dict(piece.usage_metadata) for piece in pieces if piece.usage_metadata],
        "batch": [answer.content for answer in batch],
        "later": len(later),
        "scored": len(scored.response_metadata["logprobs"]["content"]),
        "plain": plain,
        "refused": refused,
    }
    print(json.dumps(said))


asyncio.run(main(*sys.argv[1:]))
