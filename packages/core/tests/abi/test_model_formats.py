import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stack_core.abi import model_formats
from stack_core.abi.errors import ConversionError, GenerationError
from stack_core.abi.installing import install_command
from stack_core.abi.model_formats import open_for_generation, open_model
from stack_core.text.embeddings import check_generates
from stack_core.text.sources import start_token_of


class Opened(SimpleNamespace):
    """Has the members of the protocols, so that it passes for either of the two."""

    model = sections = parameters = load_params = states = vocab_size = max_positions = tokenizer = end_tokens = ()
    chat_template = special_tokens = sampling_defaults = shardings = ()
    training_batches = validation_batches = metrics = save = ()


@dataclass
class Format:
    """Knows directories that hold a file of its name."""

    name: str

    def recognizes(self, directory: Path) -> bool:
        return (directory / self.name).exists()

    def open_model(self, directory: Path, *, data: str | None = None) -> Any:
        return Opened(name=self.name, directory=directory, data=data)

    def open_for_generation(self, directory: Path) -> Any:
        return Opened(name=self.name, directory=directory)


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    formats = {"bigrams": Format("bigrams"), "trigrams": Format("trigrams"), "converts": object()}
    monkeypatch.setattr(model_formats, "registries", SimpleNamespace(model_formats=formats))
    return formats


@pytest.fixture
def directory(tmp_path: Path, formats: dict[str, Any]) -> Path:
    (tmp_path / "bigrams").touch()
    return tmp_path


def test_the_format_is_found(directory: Path) -> None:
    assert open_model(str(directory), data="text:x") == Opened(name="bigrams", directory=directory, data="text:x")
    assert open_for_generation(str(directory)) == Opened(name="bigrams", directory=directory)


def test_a_format_that_is_named_need_not_know_the_directory(directory: Path) -> None:
    assert open_for_generation(f"trigrams:{directory}") == Opened(name="trigrams", directory=directory)


def test_an_encoder_decoder_is_opened_on_request_only(directory: Path, formats: dict[str, Any]) -> None:
    checkpoint = Opened(name="t5", start_token=0)
    formats["bigrams"].open_for_generation = lambda directory: checkpoint
    with pytest.raises(GenerationError, match="is an encoder-decoder: it generates a target from a source text"):
        open_for_generation(str(directory))
    assert open_for_generation(str(directory), sources=True) is checkpoint
    assert (start_token_of(checkpoint), start_token_of(SimpleNamespace())) == (0, None)
    with pytest.raises(GenerationError, match="t5 is an encoder-decoder"):
        check_generates(checkpoint)


def test_a_path_with_a_colon_names_no_format(formats: dict[str, Any], tmp_path: Path) -> None:
    directory = tmp_path / "12:30"
    directory.mkdir()
    (directory / "trigrams").touch()
    assert open_for_generation(str(directory)) == Opened(name="trigrams", directory=directory)


def test_a_directory_of_two_formats_is_asked_about(directory: Path) -> None:
    (directory / "trigrams").touch()
    with pytest.raises(ConversionError, match=rf"formats bigrams and trigrams. Say which, as in bigrams:{directory}"):
        open_model(str(directory))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("{}/nothing", r"nothing is not a directory. Formats: bigrams, trigrams\."),
        ("{}/empty", r"empty holds no model of a known format. Formats: bigrams, trigrams\."),
        ("bigram:{}", r"Unknown model format 'bigram'.* Did you mean 'bigrams'.*\? Known: bigrams, trigrams\."),
        ("converts:{}", r"Unknown model format 'converts'"),
    ],
)
def test_what_no_format_opens_is_refused(directory: Path, address: str, message: str) -> None:
    (directory / "empty").mkdir()
    with pytest.raises(ConversionError, match=message):
        open_for_generation(address.format(directory))


def test_without_a_format_the_package_that_has_some_is_named(formats: dict[str, Any], tmp_path: Path) -> None:
    formats.clear()
    with pytest.raises(ConversionError, match=re.escape(install_command("stack-train"))):
        open_model(str(tmp_path))
