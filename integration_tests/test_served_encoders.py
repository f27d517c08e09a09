"""An encoder's directory, served and in Python: vectors of its own settings, as a run as well."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import openai
import pytest

from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.abi.model_formats import open_for_generation
from stack_core.cli import main
from stack_serve import LLM
from stack_train.generation.embedding_settings import EMBEDDING_FILES

from .encoders import WORDS, write_encoder
from .served import Served

TEXTS = ["The SEA is greener.", "red", "e e e e e e e e e e e"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("encoder") / "hf"
    write_encoder(found, pooling="cls", normalize=True, max_tokens=17)
    return found


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    served = Served(f"hf:{directory}", "--model-name", "tiny")
    yield served
    assert "Traceback" not in served.stop()


def expected_of(directory: Path, *texts: list[str]) -> np.ndarray:
    """Vectors of words, each text on its own, by the model's own call."""
    checkpoint = open_for_generation(f"hf:{directory}", encoders=True)
    model = checkpoint.model(checkpoint.load_params())
    vectors = []
    for text in texts:
        tokens = jnp.array([[WORDS.index(word) for word in text]])
        vectors.append(np.asarray(model(tokens, jnp.arange(len(text))[None]).hidden[0, 0]))
    return np.stack([vector / np.linalg.norm(vector) for vector in vectors])


def test_vectors_are_those_of_the_model_and_a_run_keeps_the_settings(directory: Path, served: Served) -> None:
    pieces = [["[CLS]", "the", "sea", "is", "green", "##er", ".", "[SEP]"], ["[CLS]", "red", "[SEP]"]]
    pieces.append(["[CLS]", *["e"] * 11, "[SEP]"])
    expected = expected_of(directory, *pieces)
    main(["convert", f"hf:{directory}", str(directory.parent / "run")])
    main(["convert", str(directory.parent / "run"), f"hf:{directory.parent / 'back'}"])
    for name in EMBEDDING_FILES[:2]:
        assert (directory.parent / "back" / name).read_bytes() == (directory / name).read_bytes()
    answer = served.openai.embeddings.create(model="tiny", input=TEXTS)
    found = [item.embedding for item in answer.data]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert answer.usage.prompt_tokens == sum(map(len, pieces))
    with LLM(directory.parent / "run") as llm:
        np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)


def test_the_server_generates_nothing_and_cuts_long_texts_on_request(directory: Path, served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="is an encoder: it embeds texts and generates none"):
        served.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "red"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 17 tokens"):
        served.openai.embeddings.create(model="tiny", input="e " * 20)
    options = {"extra_body": {"truncate_prompt_tokens": -1}}
    (item,) = served.openai.embeddings.create(model="tiny", input="e " * 20, **options).data
    np.testing.assert_allclose(item.embedding, expected_of(directory, ["[CLS]", *["e"] * 15, "[SEP]"])[0], atol=1e-5)


def test_what_generates_text_refuses_an_encoder(directory: Path) -> None:
    with pytest.raises(GenerationError, match="hf is an encoder: it embeds texts and generates none"):
        open_for_generation(f"hf:{directory}")
    with pytest.raises(ConfigError, match="pages: 'hf' is an encoder"):
        LLM(directory, pages=4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "modules.json",
            '[{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1"}]',
            "former, Dense",
        ),
        ("modules.json", '{"type": 1}', "not a list of modules"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}', "cls and max"),
        ("1_Pooling/config.json", '{"pooling_mode": "weightedmean"}', "weightedmean"),
        ("1_Pooling/config.json", "[1]", "list, not an object"),
        ("sentence_bert_config.json", "{", "cannot be read"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    directory: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    shutil.copytree(directory, tmp_path / "hf")
    (tmp_path / "hf" / name).write_text(content)
    with pytest.raises(GenerationError, match=message):
        open_for_generation(f"hf:{tmp_path}/hf", encoders=True)


def test_a_default_prompt_is_named_and_lower_case_is_applied(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "hf")
    (tmp_path / "hf" / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    content = '{"prompts": {"query": "query: "}, "default_prompt_name": "query"}'
    (tmp_path / "hf" / "config_sentence_transformers.json").write_text(content)
    tokenizer = (tmp_path / "hf" / "tokenizer.json").read_text().replace('"lowercase": true', '"lowercase": false')
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizer)
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"model_max_length": 9}')
    with pytest.warns(UserWarning, match="default_prompt_name 'query', which is not added to texts"):
        checkpoint = open_for_generation(f"hf:{tmp_path}/hf", encoders=True)
    assert checkpoint.max_positions == 9
    assert checkpoint.tokenizer is not None
    assert [WORDS[token] for token in checkpoint.tokenizer.encode("RED")] == ["[CLS]", "red", "[SEP]"]
