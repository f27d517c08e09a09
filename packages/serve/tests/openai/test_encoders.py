"""A server of an encoder: embeddings as its directory says, and status 400 for everything else."""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_core.text.embeddings import EmbeddingSettings
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.service import Service

from .conftest import Served, starting
from .fake_engine import BOS, EOS, MAX_TOKENS, ByteTokenizer, checkpoint


class Ends(ByteTokenizer):
    """Texts end with a special token, too."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens = super().encode(text, add_special_tokens=add_special_tokens)
        return [*tokens, EOS] if add_special_tokens else tokens


def encoder(**settings: Any) -> SimpleNamespace:
    found = checkpoint()
    fields = dataclasses.asdict(found) if dataclasses.is_dataclass(found) else vars(found)
    embedding = EmbeddingSettings(**{"pooling": "mean", "normalize": False, **settings})
    return SimpleNamespace(**{**fields, "tokenizer": Ends(), "generates": False, "embedding": embedding})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with starting() as start:
        yield start(model=encoder())


def test_vectors_are_pooled_and_scaled_as_the_directory_says(served: Served) -> None:
    (item,) = served.post("/v1/embeddings", input="ab").json()["data"]
    np.testing.assert_allclose(item["embedding"], [3, 4, EOS / 7, 1], rtol=1e-6)
    (item,) = served.post("/v1/embeddings", input="ab", normalize=True).json()["data"]
    assert np.linalg.norm(item["embedding"]) == pytest.approx(1.0)
    (result,) = served.post("/v1/rerank", query="ab", documents=["ab"]).json()["results"]
    assert result["relevance_score"] == pytest.approx(1.0)  # cosines, whatever the directory says


def test_an_option_goes_before_the_directory(serve: Callable[..., Served]) -> None:
    (item,) = serve(model=encoder(), pooling="last").post("/v1/embeddings", input="ab").json()["data"]
    assert item["embedding"][3] == 0


def test_long_texts_are_cut_on_request_only(served: Served) -> None:
    error = served.refused("/v1/embeddings", input="a" * MAX_TOKENS)
    assert error["code"] == "context_length_exceeded" and "truncate_prompt_tokens" in error["message"]
    for count, tokens in ((-1, (BOS, *[97] * (MAX_TOKENS - 2), EOS)), (4, (BOS, 97, 97, EOS))):
        served.post("/v1/embeddings", input="a" * MAX_TOKENS, truncate_prompt_tokens=count)
        assert served.engine.embedded[-1] == [tokens]


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/responses", {"input": "hello"}),
        ("/tokenize", {"messages": MESSAGES}),
    ],
)
def test_generation_is_refused(served: Served, path: str, body: dict[str, Any]) -> None:
    error = served.refused(path, **body)
    assert "is an encoder: it embeds texts and generates none. Use /v1/embeddings" in error["message"]
    assert error["param"] == "model"


def test_messages_of_anthropic_are_refused(served: Served) -> None:
    for path, options in (("/v1/messages", {"max_tokens": 4}), ("/v1/messages/count_tokens", {})):
        answer = served.post(path, messages=MESSAGES, model=served.service.names[0], **options)
        assert answer.status_code == 400 and "is an encoder" in answer.text


def test_settings_of_generation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tool_parser, sleep_mode: .* is an encoder"):
        Service(encoder(), OpenAIConfig(tool_parser="hermes", sleep_mode=True))
