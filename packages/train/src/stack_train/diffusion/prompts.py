"""Prompts as a fixed number of token ids, and as conditions of a denoiser."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jaxtyping import Array, Int32

from stack_core.abi.errors import ConversionError
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion.components import StoredComponent
from stack_train.diffusion.denoiser import Condition
from stack_train.diffusion.ltx import TEXT_LENGTHS
from stack_train.diffusion.t5 import count_tokens

__all__ = ["PromptTokenizer", "TextEncoder", "TextEncoders", "load_prompt_tokenizer"]

_VOCABULARY, _MERGES, _CONFIG = "vocab.json", "merges.txt", "tokenizer_config.json"
_START, _END = "<|startoftext|>", "<|endoftext|>"
# CLIP's pattern: words without their spaces, and single digits.
_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@dataclass(frozen=True)
class PromptTokenizer:
    """Tokenizes prompts to a fixed number of tokens.

    Attributes:
      name: name of the encoder in messages.
      tokens: number of tokens of a prompt, including the first and last special tokens.
      pad_id: padding token of shorter prompts.
    """

    tokenizer: HuggingFaceTokenizer
    name: str
    tokens: int
    pad_id: int

    def __call__(self, prompts: Sequence[str]) -> Int32[np.ndarray, "prompts tokens"]:
        """Returns the ids of prompts; longer prompts are truncated, with a warning that quotes the cut text."""
        rows = np.full((len(prompts), self.tokens), self.pad_id, np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            ids = self.tokenizer.encode_for_encoder(prompt)
            if len(ids) > self.tokens:
                # Without the last token, which only ends the text.
                cut = self.tokenizer.decode(ids[self.tokens - 1 : -1]).strip()
                warnings.warn(
                    f"{self.name} reads {self.tokens} tokens, and the prompt {prompt[:40]!r} has {len(ids)}. Its end "
                    f"is cut off: {cut!r}. Shorten the prompt, or put first what matters.",
                    stacklevel=2,
                )
                # The last token ends the text, and CLIP pools its vector there.
                ids = [*ids[: self.tokens - 1], ids[-1]]
            row[: len(ids)] = ids
        return rows


def load_prompt_tokenizer(directory: Path, name: str, tokens: int) -> PromptTokenizer:
    """Reads the tokenizer of a text encoder: a `tokenizer.json`, or the vocabulary and merges of CLIP.

    Args:
      tokens: that the encoder reads at most.

    Raises:
      ConversionError: there is neither.
      DataError: a file is malformed.
    """
    if not (directory / "tokenizer.json").is_file() and not (directory / _VOCABULARY).is_file():
        raise ConversionError(
            f"{name} lacks its tokenizer: {directory} holds neither tokenizer.json nor {_VOCABULARY} and {_MERGES}. "
            "Download the whole directory."
        )
    tokenizer = (
        HuggingFaceTokenizer.load(directory) if (directory / "tokenizer.json").is_file() else _clip_tokenizer(directory)
    )
    pad = tokenizer.pad_id
    # CLIP pads with its end token.
    return PromptTokenizer(tokenizer, name, tokens, tokenizer.eos_id or 0 if pad is None else pad)


def _clip_tokenizer(directory: Path) -> HuggingFaceTokenizer:
    """CLIP's byte-pair tokenizer, whose words end in "</w>", from a vocabulary and merges."""
    try:
        vocabulary = json.loads((directory / _VOCABULARY).read_bytes())
        lines = (directory / _MERGES).read_text(encoding="utf-8").splitlines()
        merges = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
        model = tokenizers.models.BPE(
            vocab=vocabulary,
            merges=merges,  # pyrefly: ignore[bad-argument-type]
            end_of_word_suffix="</w>",
            unk_token=_END,
        )
    except (OSError, ValueError) as error:
        raise ConversionError(f"The tokenizer in {directory} cannot be read: {error}. Download it again.") from error
    built = tokenizers.Tokenizer(model)
    normalizers, pre_tokenizers = tokenizers.normalizers, tokenizers.pre_tokenizers
    built.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens([_START, _END])
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{_START} $A {_END}",
        special_tokens=[(each, built.token_to_id(each)) for each in (_START, _END)],
    )
    names = {"bos_token": _START, "eos_token": _END, "pad_token": _END}
    path = directory / _CONFIG
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    # Names in the file take precedence.
    files = {"tokenizer.json": built.to_str().encode(), _CONFIG: json.dumps({**names, **settings}).encode()}
    return HuggingFaceTokenizer(files, str(directory))


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder and its tokenizer.

    Attributes:
      source: the encoder, or its folder, whose tensors are read when the encoder is first used.
    """

    source: Any
    tokenizer: PromptTokenizer

    @cached_property
    def model(self) -> Any:
        return self.source.read() if isinstance(self.source, StoredComponent) else self.source

    @property
    def abstract(self) -> Any:
        """The encoder, without values if it has not been read."""
        return self.source.abstract if isinstance(self.source, StoredComponent) else self.source


@dataclass(frozen=True)
class TextEncoders:
    """The text encoders of a denoiser.

    Attributes:
      encoders: the encoders by their folder in a diffusers directory.
      condition: makes the condition of their outputs, in the same order.
      clean: rewrites prompts before they are tokenized.
      counts_tokens: adds the number of tokens of each prompt, without padding, for a single encoder.
    """

    encoders: Mapping[str, TextEncoder]
    condition: Callable[[Sequence[Any]], Condition]
    clean: Callable[[str], str] = str
    counts_tokens: bool = False

    def __call__(self, prompts: Sequence[str]) -> Condition:
        """Returns "text", [prompts, tokens, text_dim], in float32.

        Some also return "pooled", [prompts, pooled_dim], or "text_lengths", int32[prompts].
        """
        cleaned = [self.clean(prompt) for prompt in prompts]
        ids = [jnp.asarray(each.tokenizer(cleaned)) for each in self.encoders.values()]
        return self._encode([nnx.state(each.model) for each in self.encoders.values()], ids)

    @cached_property
    def _encode(self) -> Any:
        # The parameters are an argument, since XLA would otherwise compile them into the program as constants.
        graphs = [nnx.graphdef(each.abstract) for each in self.encoders.values()]

        @jax.jit
        def encode(states: Sequence[Any], ids: Sequence[Int32[Array, "prompts _"]]) -> Condition:
            merged = [nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True)]
            condition = self.condition([model(each) for model, each in zip(merged, ids, strict=True)])
            if not self.counts_tokens:
                return condition
            (encoder,) = self.encoders.values()
            return {**condition, TEXT_LENGTHS: count_tokens(ids[0], encoder.tokenizer.pad_id)}

        return encode

    def sizes(self) -> Mapping[str, int]:
        """Returns the condition's sizes by field of the denoiser's config; `pooled_dim` is 0 without pooled text."""
        states = [nnx.state(each.abstract) for each in self.encoders.values()]
        ids = [jax.ShapeDtypeStruct((1, each.tokenizer.tokens), jnp.int32) for each in self.encoders.values()]
        shapes = {name: array.shape for name, array in jax.eval_shape(self._encode, states, ids).items()}
        pooled_dim = shapes["pooled"][1] if "pooled" in shapes else 0
        return {"text_tokens": shapes["text"][1], "text_dim": shapes["text"][2], "pooled_dim": pooled_dim}
