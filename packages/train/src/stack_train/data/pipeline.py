"""The text pipeline: resumable training batches and validation batches from a `TextSettings`."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from stack_core.abi.data import DataSource
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.user_cache import user_cache_dir
from stack_train.data.best_fit import BestFitPacking
from stack_train.data.bpe import BPE_VOCAB_SIZE, trained_bpe
from stack_train.data.corpus import Corpus, tokenize
from stack_train.data.mixture import MixedBatches
from stack_train.data.packing import Packing, Piece
from stack_train.data.prepared.source import PreparedSource
from stack_train.data.process_rows import ShuffledRows
from stack_train.data.rows import Batch, filled
from stack_train.data.settings import MixedSource, TextSettings
from stack_train.data.source import ChainedSource, open_source
from stack_train.data.split import split_documents
from stack_train.data.tokenizer import HuggingFaceTokenizer, write_tokenizer

__all__ = ["Pipeline", "build_mixture", "build_pipeline", "make_tokenizer"]


_PACKINGS = {"windows": Packing, "best_fit": BestFitPacking}


def build_pipeline(
    config: TextSettings,
    *,
    seed: int,
    cache_dir: Path | None = None,
    packing: str = "windows",
    max_tokens: int = BPE_VOCAB_SIZE,
) -> "Pipeline":
    """Reads, tokenizes and splits the documents of a config, reusing cached results.

    Args:
      config: source, tokenizer, row length and split.
      seed: seed of the order of documents and rows.
      cache_dir: directory of cached tokenizers and tokenized corpora; by default `$XDG_CACHE_HOME/stack`.
      packing: "windows" or "best_fit".
      max_tokens: maximum vocabulary size of a BPE if `config.vocab_size` is None. The BPE is smaller if the documents
        have too few words.

    Raises:
      ConfigError: settings contradict each other or the tokenizer.
      DataError: the source or the tokenizer cannot be read, or there is nothing to train on.
      UnknownName: no plugin registers the source's scheme.
    """
    source = open_source(config)
    cache_dir = user_cache_dir() if cache_dir is None else cache_dir
    tokenizer = make_tokenizer(config, [source], cache_dir, max_tokens)
    return Pipeline(config, tokenizer, _corpus_of(source, tokenizer, cache_dir), seed=seed, packing=packing)


def build_mixture(
    config: TextSettings,
    mix: Mapping[str, MixedSource],
    *,
    seed: int,
    cache_dir: Path | None = None,
    packing: str = "windows",
    max_tokens: int = BPE_VOCAB_SIZE,
) -> MixedBatches:
    """Builds the pipeline of each source with a common tokenizer; see `build_pipeline`.

    A new BPE is trained on the documents of all sources together, independent of the weights.
    """
    cache_dir = user_cache_dir() if cache_dir is None else cache_dir
    configs = {
        name: dataclasses.replace(config, source=each.source, text_field=each.text_field) for name, each in mix.items()
    }
    sources = {name: open_source(each) for name, each in configs.items()}
    tokenizer = make_tokenizer(config, list(sources.values()), cache_dir, max_tokens)
    pipelines = {
        name: Pipeline(configs[name], tokenizer, _corpus_of(source, tokenizer, cache_dir), seed=seed, packing=packing)
        for name, source in sources.items()
    }
    return MixedBatches(
        pipelines,
        {name: each.weight for name, each in mix.items()},
        seed=seed,
        batch_size=config.batch_size,
        prefetch_batches=config.prefetch_batches,
    )


class Pipeline(ShuffledRows):
    """Training and validation batches of one corpus.

    A batch is a dict of NumPy arrays: tokens, targets (-100 in padding), positions (from 0 in each document) and
    segment_ids (0 is padding), each int32[batch_size, seq_tokens], and row_ids, int64[batch_size], for `describe_rows`.

    Attributes:
      tokenizer: tokenizer of the documents.
      train_rows, train_targets: number of rows and of targets in one epoch.
      validation_batch_count, validation_targets: number of batches and of targets in one call of `validation_batches`;
        0 without validation documents.
      fingerprint: settings and digests that determine the order of batches; saved with each iterator state.
    """

    def __init__(
        self,
        config: TextSettings,
        tokenizer: HuggingFaceTokenizer,
        corpus: Corpus,
        *,
        seed: int,
        packing: str = "windows",
    ) -> None:
        training, validation = split_documents(corpus.digests, config.validation_fraction)
        pack = functools.partial(_PACKINGS[packing], corpus.tokens, corpus.offsets, seq_tokens=config.seq_tokens)
        self.tokenizer = tokenizer
        self._config = config
        self._seed = seed
        self._corpus = corpus
        self._training = pack(training, seed=seed)
        self._validation = pack(validation, seed=None)
        # Documents of a single token yield no targets, so a corpus with documents may still be without rows.
        if not self._training.rows:
            raise DataError("The training documents yield no tokens. Check data.source and data.tokenizer.")
        self.train_rows, self.train_targets = self._training.rows, self._training.targets
        self.validation_batch_count = -(-self._validation.rows // config.batch_size)
        self.validation_targets = self._validation.targets
        self.fingerprint = {
            "seed": seed,
            "data.seq_tokens": config.seq_tokens,
            "data.packing": packing,
            "data.batch_size": config.batch_size,
            "data.validation_fraction": config.validation_fraction,
            "the tokenizer (digest)": tokenizer.digest,
            "the documents (digest)": corpus.content_digest,
        }

    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> Batch:
        """Returns the arrays of training rows."""
        return self._training.batch(row_ids)

    def validation_batches(self) -> Iterator[Batch]:
        """Yields all validation rows once, in a fixed order; the last batch is filled with rows of padding.

        The row id of validation row r is -1 - r, which distinguishes it from training rows.
        """
        size = self._config.batch_size
        for first in range(0, self._validation.rows, size):
            rows = np.arange(first, min(first + size, self._validation.rows))
            batch = self._validation.batch(rows) | {"row_ids": -1 - rows}
            yield {name: filled(values, size, name) for name, values in batch.items()}

    def write(self, directory: Path) -> None:
        """Writes the tokenizer under `tokenizer/` unless that exists."""
        write_tokenizer(self.tokenizer, directory)

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        """Names the documents of each row, with the lines that the row contains."""
        descriptions = []
        for row_id in map(int, row_ids):
            packing, row = (self._training, row_id) if row_id >= 0 else (self._validation, -1 - row_id)
            descriptions.append("; ".join(map(self._describe, packing.pieces(row))))
        return descriptions

    def _describe(self, piece: Piece) -> str:
        first_token = int(self._corpus.offsets[piece.document])
        # Lines are counted in text, which has to be decoded from the document's beginning.
        tokens = self._corpus.tokens[first_token : first_token + piece.end_token].tolist()
        first = 1 + self.tokenizer.decode(tokens[: piece.start_token]).count("\n")
        last = first + self.tokenizer.decode(tokens[piece.start_token :]).count("\n")
        return f"{self._corpus.name(piece.document)} (lines {first}-{last})"


def _corpus_of(source: DataSource, tokenizer: HuggingFaceTokenizer, cache_dir: Path) -> Corpus:
    if isinstance(source, PreparedSource):
        return source.corpus(tokenizer)
    return tokenize(source, tokenizer, cache_dir)


def make_tokenizer(
    config: TextSettings, sources: Sequence[DataSource], cache_dir: Path, max_tokens: int
) -> HuggingFaceTokenizer:
    """Loads the tokenizer of a config or of a prepared set, or trains a BPE on all sources together.

    Args:
      config: settings of the tokenizer.
      sources: opened sources.
      cache_dir: directory of cached tokenizers.
      max_tokens: maximum vocabulary size of a BPE if `config.vocab_size` is None.

    Raises:
      ConfigError: the tokenizer does not have the configured size, or a new one was requested for a prepared set.
      DataError: the tokenizer or a document cannot be read.
    """
    prepared = [source for source in sources if isinstance(source, PreparedSource)]
    if prepared and config.trains_tokenizer:
        if config.tokenizer is not None:
            raise ConfigError(
                f"data.tokenizer is {config.tokenizer!r}, but {str(prepared[0].directory)!r} was tokenized before. "
                "Remove data.tokenizer, or read the documents that the set was prepared from."
            )
        return _with_size(config, prepared[0].tokenizer, str(prepared[0].directory))
    if config.trains_tokenizer:
        return trained_bpe(
            sources[0] if len(sources) == 1 else ChainedSource(tuple(sources)),
            vocab_size=config.vocab_size or max_tokens,
            # A size that was set must be reached, while the model's size is a maximum.
            fewer=config.vocab_size is None,
            sample_bytes=config.tokenizer_bytes,
            validation_fraction=config.validation_fraction,
            cache_dir=cache_dir,
        )
    return _with_size(config, HuggingFaceTokenizer.load(str(config.tokenizer)), str(config.tokenizer))


def _with_size(config: TextSettings, tokenizer: HuggingFaceTokenizer, origin: str) -> HuggingFaceTokenizer:
    if config.vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"data.vocab_size is {config.vocab_size}, but tokenizer {origin!r} has {tokenizer.vocab_size}. "
            "Remove data.vocab_size, or choose another tokenizer."
        )
    return tokenizer
