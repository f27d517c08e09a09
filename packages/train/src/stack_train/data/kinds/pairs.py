"""`data.name: pairs`: source texts and the target texts to generate from them, for encoder-decoders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jaxtyping import Int32, Int64
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import IGNORED_TARGET, Shapes
from stack_core.abi.errors import ConfigError, DataError, nearest
from stack_train.data.examples import TooLong
from stack_train.data.files import expand_glob
from stack_train.data.jsonl import jsonl_records
from stack_train.data.kinds.chat import load_tokenizer
from stack_train.data.kinds.text import check_vocabulary, language_model_shapes
from stack_train.data.planned_rows import PlannedRows
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["PairData", "PairRows", "TextPair", "check_source_model", "fitting_pairs", "pair_row", "pair_shapes"]

# Rows that may still take a pair. More fill rows better and take longer to search.
_MOST_OPEN = 32


@config
class PairData:
    """Pairs of texts in JSONL files, one record per line. The loss covers all tokens of the target.

    The encoder reads the source. The decoder reads the target shifted by one token, after `model.start_token`; the
    target ends with the tokenizer's end-of-text token. A batch has `tokens`, `targets`, `positions` and `segment_ids`,
    int32[batch, target_tokens], and `source_tokens` and `source_segment_ids`, int32[batch, source_tokens].

    Attributes:
      source: glob of JSONL files, such as "pairs/*.jsonl".
      name: selects this kind of data.
      source_field: field of a record with the source text.
      target_field: field of a record with the target text.
      prefix: text before each source, such as "translate English to German: "; prompts of generation must begin
        with it, too.
      tokenizer: directory of the tokenizer, or its `tokenizer.json`; None uses the tokenizer of `run.init_from`.
      source_tokens: tokens per row of sources.
      target_tokens: tokens per row of targets.
      packed: True packs several pairs into a row, as segments that do not attend to each other.
      too_long: policy for texts longer than a row: "error", "drop", or "cut", which keeps the beginning, and the
        end token of a source.
      batch_size: rows per batch, over all processes.
      validation_fraction: fraction of the pairs held out for validation.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles them in the step's thread.
    """

    source: str
    name: Literal["pairs"] = "pairs"
    source_field: str = "source"
    target_field: str = "target"
    prefix: str = ""
    tokenizer: str | None = None
    source_tokens: PositiveInt = 512
    target_tokens: PositiveInt = 128
    packed: bool = True
    too_long: TooLong = "error"
    batch_size: PositiveInt = 8
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    prefetch_batches: NonNegativeInt = 2

    def spec(self, model: Any) -> Shapes:
        return pair_shapes(self.batch_size, self.source_tokens, self.target_tokens)

    def work(self) -> tuple[str, int]:
        return "tokens", self.batch_size * (self.source_tokens + self.target_tokens)

    def check(self, model: Any) -> None:
        check_source_model(self.name, model, source_tokens=self.source_tokens, target_tokens=self.target_tokens)

    def build(self, *, seed: int, model: Any) -> "PairRows":
        """Reads and tokenizes every pair.

        Raises:
          ConfigError: no tokenizer is configured, or its vocabulary is larger than the model's.
          DataError: a record is malformed or too long, the tokenizer has no end-of-text token, or the training split is
            empty.
        """
        tokenizer = load_tokenizer(self.tokenizer, self.name, None)
        check_vocabulary(tokenizer.vocab_size, model)
        if tokenizer.eos_id is None:
            raise DataError("The tokenizer has no end-of-text token, which ends every target. Name its eos_token.")
        records = jsonl_records(expand_glob(self.source, self.name))
        pairs = [self._pair(tokenizer, name, record) for name, record in records]
        if not pairs:
            raise DataError(f"{self.source} holds no pair. Point data.source at files with some.")
        kept = fitting_pairs(pairs, self.source_tokens, self.target_tokens, self.too_long, end_token=tokenizer.eos_id)
        return PairRows(self, tokenizer, kept, seed=seed, start_token=model.start_token)

    def _pair(self, tokenizer: HuggingFaceTokenizer, name: str, record: Mapping[str, Any]) -> "TextPair":
        texts = [self._text(name, record, key) for key in ("source_field", "target_field")]
        # A source keeps its end token: no text follows it, as in generation.
        source = tokenizer.encode_for_encoder(self.prefix + texts[0])
        if not source:
            raise DataError(f"{name}: the source has no tokens. Leave the record out.")
        target = [*tokenizer.encode(texts[1], add_special_tokens=False), tokenizer.eos_id]
        return TextPair(name, np.asarray(source, np.int32), np.asarray(target, np.int32))

    def _text(self, name: str, record: Mapping[str, Any], key: str) -> str:
        field = getattr(self, key)
        if field not in record:
            fields = ", ".join(map(repr, record)) or "none"
            raise DataError(
                f"{name}: the record has no field {field!r}.{nearest(field, record)} Its fields: {fields}. Set "
                f"data.{key} to the field of the {key.partition('_')[0]} text."
            )
        if not isinstance(record[field], str):
            raise DataError(f"{name}: field {field!r} holds a {type(record[field]).__name__}; a string was expected.")
        return record[field]


@dataclass(frozen=True)
class TextPair:
    """A tokenized pair.

    Attributes:
      name: name of the record, for messages.
      source: int32 token ids of the source.
      target: int32 token ids of the target, without a start token.
    """

    name: str
    source: Int32[np.ndarray, " source_seq"]
    target: Int32[np.ndarray, " seq"]

    @property
    def identity(self) -> str:
        """Text that is equal for equal pairs, which go to the same split."""
        return f"{self.source.tobytes().hex()} {self.target.tobytes().hex()}"


class PairRows(PlannedRows):
    """Batches of pairs; see `Batches`."""

    _EXAMPLES = "pairs"
    _SETTINGS = ("source_tokens", "target_tokens", "batch_size", "packed", "validation_fraction")

    def __init__(self, *arguments: Any, start_token: int, **options: Any) -> None:
        self._start_token = start_token
        super().__init__(*arguments, **options)
        self.fingerprint["model.start_token"] = start_token

    def _plan(self, chosen: Int64[np.ndarray, " chosen"]) -> list[Int64[np.ndarray, " in_row"]]:
        """Puts each pair into the first open row with room for both texts."""
        config, rows = self._config, list[list[int]]()
        free = list[tuple[int, int]]()  # tokens left in each row, of sources and of targets
        for index in chosen.tolist():
            source, target = len(self._examples[index].source), len(self._examples[index].target)
            first = max(0, len(rows) - _MOST_OPEN) if config.packed else len(rows)
            opened = range(first, len(rows))
            place = next((row for row in opened if source <= free[row][0] and target <= free[row][1]), len(rows))
            if place == len(rows):
                rows.append([])
                free.append((config.source_tokens, config.target_tokens))
            rows[place].append(index)
            free[place] = (free[place][0] - source, free[place][1] - target)
        return [np.asarray(row, np.int64) for row in rows]

    def _row(self, examples: Sequence[TextPair]) -> dict[str, np.ndarray]:
        config = self._config
        return pair_row(examples, config.source_tokens, config.target_tokens, start_token=self._start_token)


_SOURCES = ("source_tokens", "source_segment_ids")


def pair_row(
    pairs: Sequence[TextPair], source_tokens: int, target_tokens: int, *, start_token: int
) -> dict[str, np.ndarray]:
    """Lays pairs into one row, as segments from 1 on; see `PairData`."""
    row = {name: np.zeros(target_tokens, np.int32) for name in ("tokens", "positions", "segment_ids")}
    row["targets"] = np.full(target_tokens, IGNORED_TARGET, np.int32)
    row |= {name: np.zeros(source_tokens, np.int32) for name in _SOURCES}
    begin = source_begin = 0
    for segment, pair in enumerate(pairs, start=1):
        places = slice(begin, begin + len(pair.target))
        row["tokens"][places] = [start_token, *pair.target[:-1]]
        row["targets"][places] = pair.target
        row["positions"][places] = np.arange(len(pair.target))
        row["segment_ids"][places] = segment
        source_places = slice(source_begin, source_begin + len(pair.source))
        row["source_tokens"][source_places], row["source_segment_ids"][source_places] = pair.source, segment
        begin, source_begin = places.stop, source_places.stop
    return row


def pair_shapes(batch_size: int, source_tokens: int, target_tokens: int) -> Shapes:
    """Returns the shapes and dtypes of a batch for an encoder-decoder."""
    sources = dict.fromkeys(_SOURCES, jax.ShapeDtypeStruct((batch_size, source_tokens), np.int32))
    return {**language_model_shapes(batch_size, target_tokens), **sources}


def check_source_model(kind: str, model: Any, *, source_tokens: int, target_tokens: int) -> None:
    """Raises a ConfigError if a model reads no sources, or rows are longer than its maximum sequence length."""
    if not hasattr(model, "start_token"):
        raise ConfigError(
            f"Data of kind {kind} is for encoder-decoders such as t5, not for family {model.name!r}; use data of kind "
            "chat with prompt and completion, or set model.name to t5."
        )
    for name, tokens in (("source_tokens", source_tokens), ("target_tokens", target_tokens)):
        if tokens > model.max_positions:
            raise ConfigError(
                f"data.{name} is {tokens}, but model.max_positions is {model.max_positions}. Lower data.{name} or "
                "raise model.max_positions."
            )


def fitting_pairs(
    pairs: Sequence[TextPair], source_tokens: int, target_tokens: int, too_long: TooLong, *, end_token: int
) -> list[TextPair]:
    """Returns the pairs whose texts fit a row, after cutting them if `too_long` is "cut".

    A cut source keeps `end_token` at its end, as in generation; a cut target lacks it.

    Raises:
      DataError: a text is too long and `too_long` is "error", or all pairs were dropped.
    """

    def cut(source: Int32[np.ndarray, " seq"]) -> Int32[np.ndarray, " cut_seq"]:
        is_longer = len(source) > source_tokens and source[-1] == end_token
        return np.append(source[: source_tokens - 1], source[-1]) if is_longer else source[:source_tokens]

    def fits(pair: TextPair) -> bool:
        return len(pair.source) <= source_tokens and len(pair.target) <= target_tokens

    longer = [pair for pair in pairs if not fits(pair)]
    if longer and too_long == "error":
        pair = longer[0]
        raise DataError(
            f"{len(longer)} of {len(pairs)} pairs are longer than data.source_tokens={source_tokens} or "
            f"data.target_tokens={target_tokens}; {pair.name} has {len(pair.source)} and {len(pair.target)} tokens. "
            "Raise them, or set data.too_long to drop (leaves these pairs out) or cut (keeps the beginnings of texts)."
        )
    if too_long == "cut":
        return [TextPair(pair.name, cut(pair.source), pair.target[:target_tokens]) for pair in pairs]
    if not (kept := list(filter(fits, pairs))):
        raise DataError(
            f"None of {len(pairs)} pairs fits data.source_tokens={source_tokens} and "
            f"data.target_tokens={target_tokens}. Raise them."
        )
    return kept
