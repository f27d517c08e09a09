"""Answers of `/v1/score` and `/v1/rerank`: cosine similarities of embeddings."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stack_serve.http.slices import Each, Members, json_pieces
from stack_serve.openai.embeddings import Embeddings, IsGone
from stack_serve.openai.errors import bad_request
from stack_serve.openai.response import LargeJsonResponse
from stack_serve.openai.schemas import PromptFields, RerankBody, ScoreBody

__all__ = ["rerank", "score"]


async def score(embeddings: Embeddings, body: ScoreBody, request_id: str, is_gone: IsGone) -> LargeJsonResponse:
    """Returns the similarity of each pair of texts, as vLLM's `/score`.

    A single text on one side is compared with each text of the second side.

    Raises:
      ApiError: the numbers of texts differ and none of them is 1, or a text is invalid.
    """
    model = embeddings.check_model(body.model)
    left, right = (_texts(getattr(body, name), name) for name in ("text_1", "text_2"))
    if len(left) != len(right) and 1 not in (len(left), len(right)):
        raise bad_request(
            f"text_1 has {len(left)} texts, text_2 {len(right)}. Give equal numbers, or one text on a side.",
            param="text_1",
        )
    (first, second), tokens = await _vectors(embeddings, body, {"text_1": left, "text_2": right}, is_gone)
    scores = np.sum(first * second, axis=1)  # a single row is broadcast
    items = ({"index": place, "object": "score", "score": float(each)} for place, each in enumerate(scores))
    answer = {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": Each(items),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
    return LargeJsonResponse(json_pieces(Members(answer)))


async def rerank(embeddings: Embeddings, body: RerankBody, request_id: str, is_gone: IsGone) -> LargeJsonResponse:
    """Returns the documents most similar to the query first, as Jina's and Cohere's `/rerank`.

    Raises:
      ApiError: a document is no text, or a text is invalid.
    """
    model = embeddings.check_model(body.model)
    documents = [_document(each, f"documents.{place}") for place, each in enumerate(body.documents)]
    texts = {"query": [body.query], "documents": documents}
    (query, vectors), tokens = await _vectors(embeddings, body, texts, is_gone)
    scores = vectors @ query[0]
    # Stable, so equal documents keep their order.
    order = np.argsort(-scores, kind="stable")[: body.top_n]

    def result(place: int) -> dict[str, Any]:
        document = {"document": {"text": documents[place]}} if body.return_documents else {}
        return {"index": place, **document, "relevance_score": float(scores[place])}

    answer = {
        "id": f"rerank-{request_id}",
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": Each(result(int(place)) for place in order),
    }
    return LargeJsonResponse(json_pieces(Members(answer)))


async def _vectors(
    embeddings: Embeddings, body: PromptFields, texts: Mapping[str, Sequence[str]], is_gone: IsGone
) -> tuple[list[np.ndarray], int]:
    """Returns the vectors of each field's texts, and the number of tokens."""
    fields = [await embeddings.prompts(list(each), body, name) for name, each in texts.items()]
    prompts = [prompt for field in fields for prompt in field]
    vectors = await embeddings.vectors(prompts, is_gone)
    split = np.split(vectors, np.cumsum([len(field) for field in fields])[:-1])
    return split, sum(len(prompt.tokens) for prompt in prompts)


def _texts(field: Any, name: str) -> list[str]:
    texts = [field] if isinstance(field, str) else field
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise bad_request(f"{name} is neither a text nor a list of texts.", param=name)
    return texts


def _document(value: Any, where: str) -> str:
    text = value.get("text") if isinstance(value, dict) and value.keys() == {"text"} else value
    if not isinstance(text, str):
        raise bad_request(f'{where} is neither a text nor {{"text": ...}}.', param=where)
    return text
