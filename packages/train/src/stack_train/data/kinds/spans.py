"""`data.name: spans`: texts with missing spans to fill in, the pretraining of T5.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020
(arXiv:1910.10683), section 3.1.4.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Int32, Int64
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.examples import stacked
from stack_train.data.kinds.pairs import TextPair, check_source_model, pair_row, pair_shapes
from stack_train.data.kinds.text import check_vocabulary
from stack_train.data.process_rows import ShuffledRows
from stack_train.data.settings import BPE, TextSettings
from stack_train.data.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    from stack_train.data.pipeline import Pipeline
    from stack_train.data.rows import Batch

__all__ = ["SpanData", "SpanRows", "corrupt_spans"]


@config
class SpanData:
    """Span corruption: sentinels replace spans of the documents. The target has the spans, each after its sentinel.

        text    Thank you for inviting me to your party last week
        source  Thank you <extra_id_0> me to your party <extra_id_1>
        target  <extra_id_0> for inviting <extra_id_1> last week

    Documents are concatenated and cut into rows of `seq_tokens` tokens. The spans of a row are sampled anew in each
    epoch. Batches have the arrays of data of kind `pairs`, with as many tokens as a full row has after its corruption.

    Attributes:
      source: "scheme" or "scheme:address"; the scheme is a name in the registry `data_sources`.
      name: selects this kind of data.
      text_field: key of a record's text, for sources of records; None uses the source's default.
      tokenizer: directory of the tokenizer, or its `tokenizer.json`; None uses the tokenizer of `run.init_from`.
      sentinel: text of the sentinel tokens, with {} for their number.
      seq_tokens: tokens per row, before spans are replaced.
      noise_density: share of the tokens that are missing in the source.
      span_tokens: mean number of tokens of a span.
      batch_size: rows per batch, over all processes.
      validation_fraction: fraction of the documents held out for validation.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles them in the step's thread.
    """

    source: str
    name: Literal["spans"] = "spans"
    text_field: str | None = None
    tokenizer: str | None = None
    sentinel: str = "<extra_id_{}>"
    seq_tokens: Annotated[int, Field(ge=2)] = 512
    noise_density: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    span_tokens: Annotated[float, Field(ge=1.0)] = 3.0
    batch_size: PositiveInt = 8
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    prefetch_batches: NonNegativeInt = 2

    def spec(self, model: Any) -> Shapes:
        return pair_shapes(self.batch_size, *self.row_tokens())

    def work(self) -> tuple[str, int]:
        return "tokens", self.batch_size * sum(self.row_tokens())

    def check(self, model: Any) -> None:
        source_tokens, target_tokens = self.row_tokens()
        check_source_model(self.name, model, source_tokens=source_tokens, target_tokens=target_tokens)
        if self.sentinel.count("{}") != 1:
            raise ConfigError(f"data.sentinel is {self.sentinel!r}; expected one {{}}, as in '<extra_id_{{}}>'.")
        if self.tokenizer in (None, BPE):
            raise ConfigError(
                "Data of kind spans needs a tokenizer with sentinel tokens: set data.tokenizer to a directory with "
                "tokenizer.json, or start from a model that has one, by run.init_from."
            )

    def build(self, *, seed: int, model: Any) -> "SpanRows":
        """Reads, tokenizes and splits the source, reusing cached results.

        Raises:
          ConfigError: the tokenizer's vocabulary is larger than the model's.
          DataError: the tokenizer lacks sentinels or an end-of-text token, or the source cannot be read.
        """
        from stack_train.data.pipeline import build_pipeline  # imports Grain, which only a run needs

        same = ("source", "text_field", "tokenizer", "seq_tokens", "batch_size", "validation_fraction")
        settings = TextSettings(prefetch_batches=self.prefetch_batches, **{name: getattr(self, name) for name in same})
        pipeline = build_pipeline(settings, seed=seed)
        check_vocabulary(pipeline.tokenizer.vocab_size, model)
        sentinels = self._sentinels(pipeline.tokenizer)
        return SpanRows(self, pipeline, sentinels, seed=seed, start_token=model.start_token)

    def row_tokens(self) -> tuple[int, int]:
        """Returns the numbers of tokens of the source and of the target of a full row, with their end tokens."""
        noise, spans = self.counts(self.seq_tokens)
        return self.seq_tokens - noise + spans + 1, noise + spans + 1

    def counts(self, tokens: int) -> tuple[int, int]:
        """Returns the number of missing tokens of a text, and of spans."""
        if tokens < 2:
            return 0, 0
        noise = min(max(round(tokens * self.noise_density), 1), tokens - 1)
        return noise, min(max(round(noise / self.span_tokens), 1), noise, tokens - noise)

    def _sentinels(self, tokenizer: HuggingFaceTokenizer) -> list[int]:
        if tokenizer.eos_id is None:
            raise DataError("The tokenizer has no end-of-text token, which ends every target. Name its eos_token.")
        _, spans = self.counts(self.seq_tokens)
        found = [tokenizer.token_id(self.sentinel.format(number)) for number in range(spans)]
        if None in found:
            raise DataError(
                f"A row of data.seq_tokens={self.seq_tokens} has {spans} spans, and the tokenizer has no token "
                f"{self.sentinel.format(found.index(None))!r}. Lower data.seq_tokens or data.noise_density, raise "
                "data.span_tokens, or set data.sentinel to the tokenizer's own sentinels."
            )
        return [token for token in found if token is not None]


class SpanRows(ShuffledRows):
    """Batches of texts with missing spans; see `Batches`.

    Attributes:
      tokenizer: tokenizer of the documents.
      fingerprint: settings and digests that determine the order of batches; saved with each iterator state.
    """

    _config: SpanData

    def __init__(
        self, config: SpanData, pipeline: "Pipeline", sentinels: Sequence[int], *, seed: int, start_token: int
    ) -> None:
        self.tokenizer = pipeline.tokenizer
        self._config, self._pipeline, self._sentinels = config, pipeline, sentinels
        self._seed, self._start_token, self._end = seed, start_token, np.asarray(pipeline.tokenizer.eos_id, np.int32)
        own = {f"data.{name}": getattr(config, name) for name in ("noise_density", "span_tokens", "sentinel")}
        self.train_rows = pipeline.train_rows
        self.fingerprint = {**pipeline.fingerprint, **own, "model.start_token": start_token}

    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> "Batch":
        """Returns the arrays of training rows, whose spans depend on the seed and the row's id."""
        return self._with_spans(self._pipeline.train_batch(row_ids), row_ids)

    def validation_batches(self) -> "Iterator[Batch]":
        """Yields all held-out rows once, with the same spans at each call."""
        for batch in self._pipeline.validation_batches():
            yield {**self._with_spans(batch, batch["row_ids"]), "row_ids": batch["row_ids"]}

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        """Names the documents of each row, with the lines that the row contains."""
        return self._pipeline.describe_rows(row_ids)

    def write(self, directory: Path) -> None:
        self._pipeline.write(directory)

    def _with_spans(self, batch: "Batch", row_ids: Int64[np.ndarray, " rows"]) -> "Batch":
        texts = (tokens[segments > 0] for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True))
        return stacked([self._row(text, row_id) for text, row_id in zip(texts, row_ids.tolist(), strict=True)])

    def _row(self, text: Int32[np.ndarray, " tokens"], row_id: int) -> dict[str, np.ndarray]:
        config, sizes = self._config, self._config.row_tokens()
        if not len(text):  # padding of the last validation batch
            return pair_row([], *sizes, start_token=self._start_token)
        # Two words, because seeds are not negative, and validation rows have negative ids.
        rng = np.random.default_rng([self._seed, abs(row_id), int(row_id < 0)])
        source, target = corrupt_spans(text, *config.counts(len(text)), self._sentinels, rng)
        pair = TextPair("", np.append(source, self._end), np.append(target, self._end))
        return pair_row([pair], *sizes, start_token=self._start_token)


def corrupt_spans(
    tokens: Int32[np.ndarray, " tokens"], noise: int, spans: int, sentinels: Sequence[int], rng: np.random.Generator
) -> tuple[Int32[np.ndarray, " source"], Int32[np.ndarray, " target"]]:
    """Replaces random spans by sentinels.

    Args:
      tokens: the text.
      noise: number of tokens in spans.
      spans: number of spans; the tokens between two spans are at least one.
      sentinels: token of each span.
      rng: generator of the spans.

    Returns:
      The text with sentinels in place of spans, and the spans, each after its sentinel.
    """
    source, target, begin = list[Any](), list[Any](), 0
    lengths = zip(_parts(len(tokens) - noise, spans, rng), _parts(noise, spans, rng), strict=True)
    for sentinel, (kept, missing) in zip(sentinels, lengths, strict=False):
        source += [tokens[begin : begin + kept], [sentinel]]
        target += [[sentinel], tokens[begin + kept : begin + kept + missing]]
        begin += kept + missing
    source.append(tokens[begin:])
    # An empty array first, because a text of one token has no span.
    return np.concatenate([[], *source]).astype(np.int32), np.concatenate([[], *target]).astype(np.int32)


def _parts(tokens: int, parts: int, rng: np.random.Generator) -> Int64[np.ndarray, " parts"]:
    """Divides a number of tokens into nonempty parts at random."""
    if not parts:
        return np.zeros(0, np.int64)
    cuts = np.sort(rng.choice(tokens - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [tokens]]))
