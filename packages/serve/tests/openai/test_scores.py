"""`POST /v1/score` and `/v1/rerank`."""

from typing import Any

import numpy as np
import pytest

from .conftest import Served


def unit(text: str) -> np.ndarray:
    """Vector of a text of letters, as the fake engine and the normalization have it."""
    vector = np.array([3, len(text) + 1, ord(text[-1]) / 7, 0], np.float64)
    return vector / np.linalg.norm(vector)


def answer(server: Served, path: str, **body: Any) -> Any:
    found = server.post(path, **body)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "bcd", [("a", "bcd")]),
        ("a", ["bcd", "e", "a"], [("a", "bcd"), ("a", "e"), ("a", "a")]),
        (["ab", "c"], "d", [("ab", "d"), ("c", "d")]),
        (["ab", "c"], ["d", "efghi"], [("ab", "d"), ("c", "efghi")]),
    ],
)
def test_scores_are_cosines(server: Served, first: Any, second: Any, pairs: list[tuple[str, str]]) -> None:
    found = answer(server, "/v1/score", text_1=first, text_2=second, model="tiny")
    assert (found["object"], found["model"]) == ("list", "tiny")
    assert [(item["index"], item["object"]) for item in found["data"]] == [(n, "score") for n in range(len(pairs))]
    expected = [unit(one) @ unit(other) for one, other in pairs]
    np.testing.assert_allclose([item["score"] for item in found["data"]], expected, rtol=1e-6)
    sides = [[side] if isinstance(side, str) else side for side in (first, second)]
    assert found["usage"]["prompt_tokens"] == sum(len(text) + 1 for side in sides for text in side)


def test_the_most_similar_documents_come_first(server: Served) -> None:
    documents = ["bcdefgh", {"text": "a"}, "bcd", "a"]
    found = answer(server, "/v1/rerank", query="a", documents=documents)
    assert [item["index"] for item in found["results"]] == [1, 3, 2, 0]
    assert [item["document"]["text"] for item in found["results"]] == ["a", "a", "bcd", "bcdefgh"]
    scores = [item["relevance_score"] for item in found["results"]]
    np.testing.assert_allclose(scores, [unit("a") @ unit(text) for text in ("a", "a", "bcd", "bcdefgh")], rtol=1e-6)
    assert found["usage"]["total_tokens"] == 2 + 8 + 2 + 4 + 2
    few = answer(server, "/rerank", query="a", documents=documents, top_n=2, return_documents=False)
    assert few["results"] == [{"index": 1, "relevance_score": scores[0]}, {"index": 3, "relevance_score": scores[1]}]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2", "is missing"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1", "neither a text"),
        ("/v1/score", {"text_1": [3], "text_2": "a"}, "text_1", "neither a text"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "2 texts, text_2 3"),
        ("/v1/score", {"text_1": "a" * 300, "text_2": "a"}, "text_1", "maximum context length"),
        ("/v1/rerank", {"documents": ["a"]}, "query", "is missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "at least 1 item"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"image": "b"}]}, "documents.1", "neither a text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "greater than or equal to 1"),
    ],
)
def test_bad_bodies_are_refused(server: Served, path: str, body: dict[str, Any], param: str, message: str) -> None:
    error = server.refused(path, **body)
    assert error["param"] == param and message in error["message"]
