"""Greedy completions that a server streams: prompts and answers are token ids, and answers have exact lengths."""

from collections.abc import Sequence

import orjson

from stack_serve.client.endpoint import RequestFailed

__all__ = ["body_of", "tokens_of"]


def body_of(model: str, prompt: Sequence[int], new_tokens: int) -> dict[str, object]:
    """The body of a request."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def tokens_of(data: bytes) -> list[int]:
    """The tokens that an event brings.

    Raises:
      RequestFailed: it is an error.
    """
    event = orjson.loads(data)
    if event.get("error"):
        raise RequestFailed(str(event["error"]), kind="error")
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
