"""`POST /v1/embeddings`."""

import base64
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .conftest import Served
from .fake_engine import BOS, MAX_TOKENS, FakeEngine

PATH = "/v1/embeddings"


def unit(*values: float) -> np.ndarray:
    return np.array(values, np.float32) / np.float32(np.linalg.norm(values))


def embed(server: Served, **body: Any) -> Any:
    answer = server.post(PATH, **{"input": "hello", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_answer_has_a_vector_for_each_text_in_order(server: Served) -> None:
    answer = embed(server, input=["ab", "hello", "abcd"], model="tiny")
    assert (answer["object"], answer["model"]) == ("list", "tiny") and answer["id"].startswith("embd-")
    assert [(item["object"], item["index"]) for item in answer["data"]] == [("embedding", place) for place in range(3)]
    for item, (length, token) in zip(answer["data"], [(3, 98), (2, 261), (5, 100)], strict=True):
        np.testing.assert_allclose(item["embedding"], unit(3, length, token / 7, 0), rtol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10, "completion_tokens": 0}


@pytest.mark.parametrize(
    ("field", "prompts"),
    [
        ("ab", [(BOS, 97, 98)]),
        ([97, 98], [(97, 98)]),
        ([[97, 98], [99]], [(99,), (97, 98)]),
    ],
)
def test_inputs_are_texts_or_tokens(server: Served, field: Any, prompts: list[tuple[int, ...]]) -> None:
    embed(server, input=field)
    assert server.engine.embedded[-1] == prompts


def test_encodings_dimensions_and_lengths(server: Served) -> None:
    (item,) = embed(server, encoding_format="base64")["data"]
    (same,) = embed(server)["data"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(item["embedding"]), "<f4"), np.array(same["embedding"], np.float32)
    )
    (short,) = embed(server, dimensions=2)["data"]
    np.testing.assert_allclose(short["embedding"], unit(3, 2), rtol=1e-6)
    (raw,) = embed(server, normalize=False)["data"]
    np.testing.assert_allclose(raw["embedding"], [3, 2, 261 / 7, 0], rtol=1e-6)
    embed(server, input="abcd", truncate_prompt_tokens=2, add_special_tokens=False)
    assert server.engine.embedded[-1] == [(99, 100)]
    embed(server, input="a" * 400, truncate_prompt_tokens=-1)
    assert server.engine.embedded[-1] == [(97,) * MAX_TOKENS]


def test_many_texts_are_computed_in_batches(server: Served) -> None:
    server.engine.embedded.clear()
    lengths = [1 + place % 7 for place in range(70)]
    answer = embed(server, input=[[97] * length for length in lengths], normalize=False)
    assert [item["embedding"][1] for item in answer["data"]] == lengths
    assert [len(batch) for batch in server.engine.embedded] == [32, 32, 6]


def test_the_pooling_is_an_option_of_the_server(serve: Callable[..., Served]) -> None:
    (item,) = embed(serve(pooling="mean"), normalize=False)["data"]
    assert item["embedding"][3] == 1


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "neither a text"),
        ({"input": ["a", 3]}, "input", "neither a text"),
        ({"input": ["a", ""], "add_special_tokens": False}, "input.1", "input.1 has no tokens"),
        ({"input": [999]}, "input", "Token 999"),
        ({"input": "a" * 400}, "input", "maximum context length is 256 tokens. However, input has 401"),
        ({"input": ["a"] * 1025}, "input", "1025 prompts"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 5}, "dimensions", "the model's embeddings have 4"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "temperature": 1}, "temperature", "Unrecognized request argument"),
    ],
)
def test_bad_bodies_are_refused(server: Served, body: dict[str, Any], param: str, message: str) -> None:
    error = server.refused(PATH, **body)
    assert error["param"] == param and message in error["message"]


def test_an_adapter_computes_none_and_an_engine_may_not(serve: Callable[..., Served]) -> None:
    class Plain(FakeEngine):
        adapters = ("mine",)

        def embed(self, prompts: Any, *, pooling: Any = "last") -> np.ndarray:
            return super(FakeEngine, self).embed(prompts, pooling=pooling)

    server = serve(Plain())
    assert "'mine' is an adapter" in server.refused(PATH, model="mine", input="a")["message"]
    assert "computes no embeddings" in server.refused(PATH, input="a")["message"]
    assert server.refused(PATH, 404, model="other", input="a")["code"] == "model_not_found"


def test_too_many_waiting_texts_are_refused_and_time_is_limited(serve: Callable[..., Served]) -> None:
    server = serve(max_choices=3, timeout_s=0.5)
    server.engine.running.clear()
    thread = threading.Thread(target=lambda: server.refused(PATH, 504, input=["a", "b"]))
    thread.start()
    server.wait_until(lambda: bool(server.engine.embedded))
    error = server.refused(PATH, 429, input=["a", "b"])
    assert "2 texts wait" in error["message"]
    thread.join()
    server.engine.running.set()
    assert embed(server, input=["a", "b", "c"])["data"]
