"""URL and model -> what litellm makes of the API, as one JSON line. Runs in that package's own environment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import openai

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # it reads its environment when it is imported

MESSAGES = [{"role": "user", "content": "What is 12 + 30? Show the work."}]


async def main(url: str, model: str) -> None:
    how: dict[str, Any] = {
        "model": f"hosted_vllm/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_tokens": 32,
        "temperature": 0,
        "seed": 7,
        "num_retries": 0,
    }
    whole = litellm.completion(messages=MESSAGES, **how)
    pieces = list(
        litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **how)
    )
    later = await litellm.acompletion(messages=MESSAGES, **how)
    several = litellm.completion(messages=MESSAGES, n=2, **{**how, "temperature": 0.9})
    plain = litellm.text_completion(prompt="def add(a, b):", **how)
    errors = []
    for wrong in ({"model": "hosted_vllm/nobody"}, {"temperature": 9}):
        try:
            litellm.completion(messages=MESSAGES, **{**how, **wrong})
        except openai.APIStatusError as error:  # of which litellm's own classes are children
            errors.append([type(error).__name__, error.status_code])
    said = {
        "text": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "finish": whole.choices[0].finish_reason,
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
        "streamed_usage": [
            piece.usage.completion_tokens for piece in pieces if getattr(piece, "usage", None)
        ],
        "later": later.choices[0].message.content,
        "several": [choice.message.content for choice in several.choices],
        "plain": plain.choices[0].text,
        "errors": errors,
    }
    print(json.dumps(said))


asyncio.run(main(*sys.argv[1:]))
