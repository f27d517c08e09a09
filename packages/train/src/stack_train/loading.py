"""A trained language model as an object: text generation and export, from any registered format."""

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.config import parse
from stack_core.abi.formats import Conversion, GenerativeCheckpoint, ImportsRuns
from stack_core.abi.model_formats import open_for_generation
from stack_train.conversion import convert, format_of
from stack_train.generation.generate import Generation, TextGenerator
from stack_train.generation.sampling import SamplingConfig

__all__ = ["LoadedModel", "load"]


def load(address: str | Path) -> "LoadedModel":
    """Opens a trained language model: `load("runs/mine")`, `load("hf:DIR")`, `load("gguf:FILE")`.

    The parameters are read when the model first generates.

    Raises:
      StackError: the address does not contain a model, or the model cannot generate text.
    """
    return LoadedModel(str(address), open_for_generation(str(address), sources=True))


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A trained language model, opened by `load`.

    Attributes:
      address: address of the model.
      checkpoint: the opened checkpoint, which engines also accept.
    """

    address: str
    checkpoint: GenerativeCheckpoint

    def generate(self, prompt: str, **sampling: Any) -> Generation:
        """Continues a prompt, as `stack generate` does; `str` of the result is the text.

        Args:
          prompt: text to continue; for an encoder-decoder, the source from which the text is generated.
          sampling: fields of `SamplingConfig`, such as `max_tokens=64`, `temperature=0.0` or `stop=("end",)`.

        Raises:
          GenerationError: the prompt is empty or too long, or the model lacks a tokenizer.
          ConfigError: a sampling setting is not valid.
        """
        return self._generator.generate(prompt, parse(SamplingConfig, sampling))

    def save_pretrained(self, directory: str | Path, *, format: str = "hf") -> Conversion:  # noqa: A002
        """Exports the model, as `stack convert` does. Transformers opens the default format.

        Args:
          directory: directory or file to write, which must not exist.
          format: model format to write, such as "hf" or "gguf".

        Raises:
          StackError: the format cannot represent the model, or `directory` exists.
        """
        destination = f"{format}:{directory}"
        if format_of(self.address, ImportsRuns)[0] is None:
            return convert(self.address, destination)
        # On the disk of the destination: temporary directories may be in memory.
        parent = Path(directory).absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".convert-") as folder:
            convert(self.address, f"{folder}/run")
            return convert(f"{folder}/run", destination)

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.checkpoint.parameters))

    @cached_property
    def _generator(self) -> TextGenerator:
        return TextGenerator(self.checkpoint)

    def __repr__(self) -> str:
        tokenizer = "a tokenizer" if self.checkpoint.tokenizer is not None else "no tokenizer"
        return (
            f"<model {self.address}: {self.parameter_count:,} parameters, {self.checkpoint.vocab_size:,} tokens in the "
            f"vocabulary, {self.checkpoint.max_positions:,} positions, {tokenizer}>"
        )
