"""`data.name: preferences`: pairs of a chosen and a rejected answer to one prompt."""

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jaxtyping import Float32, Int64, UInt64
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.data import Batch, Shapes
from stack_core.abi.errors import DataError
from stack_core.abi.policy import PolicyBatches
from stack_core.text.chat_template import TEMPLATE_FIELDS
from stack_train.data.cache import digest_of
from stack_train.data.conversations import Conversation, Tokenization
from stack_train.data.examples import TooLong, fitting, laid_out, stacked
from stack_train.data.files import expand_glob
from stack_train.data.jsonl import jsonl_records
from stack_train.data.kinds.chat import load_tokenizer
from stack_train.data.kinds.text import check_positions, check_vocabulary
from stack_train.data.process_rows import ShuffledRows
from stack_train.data.split import split_documents, text_digest
from stack_train.data.tokenizer import HuggingFaceTokenizer, write_tokenizer

__all__ = ["AnswersData", "Pair", "PreferenceBatches", "PreferenceData", "fitting_pairs"]

_REFERENCE = "reference_logprobs.npz"
_NAMES = ("tokens", "targets", "positions", "segment_ids")


@config
class AnswersData:
    """Settings shared by all kinds of answers to prompts.

    Attributes:
      source: glob of JSONL files.
      tokenizer: directory of the tokenizer, or its `tokenizer.json`; None uses the tokenizer of `run.init_from`.
      chat_template: file with the Jinja source of a chat template; None uses the tokenizer's template.
      seq_tokens: tokens per row, which holds a prompt and one answer.
      too_long: policy for examples with an answer longer than a row: "error", "drop", or "cut", which keeps its start.
      reference: True scores the answers under the initial weights; disable it for objectives without a reference.
      batch_size: pairs or answers per batch, over all processes.
      validation_fraction: fraction of the examples held out for validation.
      prefetch_batches: number of batches that a thread assembles ahead; 0 assembles them in the step's thread.
    """

    source: str
    tokenizer: str | None = None
    chat_template: str | None = None
    seq_tokens: PositiveInt = 512
    too_long: TooLong = "error"
    reference: bool = True
    batch_size: PositiveInt = 8
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    prefetch_batches: NonNegativeInt = 2

    def spec(self, model: Any) -> Shapes:
        answers = jax.ShapeDtypeStruct((self.batch_size, 2, self.seq_tokens), np.int32)
        logprobs = {"reference_logprobs": jax.ShapeDtypeStruct((self.batch_size, 2), np.float32)}
        return dict.fromkeys(_NAMES, answers) | (logprobs if self.reference else {})

    def call_spec(self, model: Any) -> Shapes:
        """Returns the shapes of the answers as rows: int32[2 * batch, seq_tokens]."""
        return dict.fromkeys(_NAMES, jax.ShapeDtypeStruct((2 * self.batch_size, self.seq_tokens), np.int32))

    def check(self, model: Any) -> None:
        check_positions(self.seq_tokens, model)


@config
class PreferenceData(AnswersData):
    """Preference pairs in JSONL files, one record per line: `prompt`, `chosen` and `rejected`.

    Each of the three is a text or a list of messages. Without `prompt`, the common first messages of both answers are
    the prompt. A batch contains both answers of each pair, the chosen answer first: int32[batch, 2, seq_tokens] arrays
    with targets -100 in prompts.

    `reference_logprobs`, float32[batch, 2], are the log-probabilities of the answers under the initial weights of the
    run. They are computed once before the first step and stored in the run's directory with a digest of each pair,
    which avoids a second model in memory. A run cannot resume with pairs added later, because they lack scores.

    Attributes:
      name: selects this kind of data. See `AnswersData` for more fields.
    """

    name: Literal["preferences"] = "preferences"

    def work(self) -> tuple[str, int]:
        return "pairs", self.batch_size

    def build(self, *, seed: int, model: Any) -> "PreferenceBatches":
        """Reads and tokenizes every pair.

        Raises:
          ConfigError: no tokenizer is configured, or its vocabulary is larger than the model's.
          DataError: a record is malformed or too long, or the training split is empty.
        """
        tokenizer = load_tokenizer(self.tokenizer, self.name, self.chat_template)
        check_vocabulary(tokenizer.vocab_size, model)
        tokenization = Tokenization.by_template_of(tokenizer)
        records = jsonl_records(expand_glob(self.source, self.name))
        pairs = [_pair(tokenization, name, record) for name, record in records]
        if not pairs:
            raise DataError(f"{self.source} holds no pair. Point data.source at files with some.")
        return PreferenceBatches(self, tokenizer, fitting_pairs(pairs, self.seq_tokens, self.too_long), seed=seed)


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected answer to one prompt."""

    chosen: Conversation
    rejected: Conversation


class PreferenceBatches(ShuffledRows, PolicyBatches):
    """Batches of pairs; see `Batches`. If `config.reference`, pairs are scored under the run's initial weights."""

    def __init__(
        self, config: AnswersData, tokenizer: HuggingFaceTokenizer, pairs: Sequence[Pair], *, seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self._config, self._pairs, self._seed = config, pairs, seed
        texts = [pair.chosen.tokens.tobytes().hex() + pair.rejected.tokens.tobytes().hex() for pair in pairs]
        digests = np.asarray([text_digest(text) for text in texts], np.uint64)
        training, validation = split_documents(digests, config.validation_fraction)
        self._training, self._validation = np.sort(training), np.sort(validation)
        self._reference: Float32[np.ndarray, "pairs 2"] | None = None
        self._directory: Path | None = None
        self.train_rows = len(self._training)
        self.fingerprint = {
            "seed": seed,
            "data.seq_tokens": config.seq_tokens,
            "data.batch_size": config.batch_size,
            "data.validation_fraction": config.validation_fraction,
            "the pairs (digest)": digest_of([int(digest) for digest in digests]),
        }

    def train_batch(self, row_ids: Int64[np.ndarray, " batch"]) -> dict[str, np.ndarray]:
        return self._batch(self._training[row_ids % len(self._training)])

    def validation_batches(self) -> Iterator[Batch]:
        """Yields all held-out pairs once; padding in the last batch does not contribute to the loss."""
        from stack_train.data.rows import filled

        size = self._config.batch_size
        for first in range(0, len(self._validation), size):
            batch = self._batch(self._validation[first : first + size])
            yield {name: filled(values, size, name) for name, values in batch.items()}

    def update_weights(self, params: Any, version: int, score: Callable[[Any, Batch], Mapping[str, Any]]) -> None:
        """Scores all pairs under the run's initial weights (version 0), or loads the stored scores; runs only once.

        Raises:
          DataError: the run has been trained already and the stored scores are missing, damaged or incomplete.
        """
        if not self._config.reference or self._reference is not None:
            return
        kept = None if self._directory is None else self._directory / _REFERENCE
        if kept is not None and kept.is_file():
            self._reference = self._read_reference(kept)
        elif version:
            raise DataError(
                f"The reference's log-probabilities are missing: {kept}. They are computed at a run's start; restore "
                "the file, or start a new run."
            )
        else:
            self._reference = self._scored(params, score)
            if kept is not None and jax.process_index() == 0:  # all processes have the same scores
                partial = kept.with_suffix(".partial.npz")
                np.savez(partial, digests=self._pair_digests, logprobs=self._reference)
                partial.replace(kept)

    def read_scores(self, directory: Path) -> None:
        """Loads the scores that a run has stored; raises a DataError if they are missing, damaged or incomplete."""
        if self._config.reference:
            self._reference = self._read_reference(directory / _REFERENCE)

    def describe_rows(self, row_ids: Int64[np.ndarray, " rows"]) -> list[str]:
        """Names the record of each row."""
        return [self._pairs[self._training[row_id % len(self._training)]].chosen.name for row_id in map(int, row_ids)]

    def write(self, directory: Path) -> None:
        write_tokenizer(self.tokenizer, directory)
        self._directory = directory

    @property
    def _pair_digests(self) -> UInt64[np.ndarray, " pairs"]:
        """Digest of each pair's tokens and supervised positions."""

        # With the supervised positions, because the scores depend on these, too.
        def text(pair: Pair) -> str:
            arrays = (array for each in (pair.chosen, pair.rejected) for array in (each.tokens, each.supervised))
            return " ".join(array.tobytes().hex() for array in arrays)

        return np.asarray([text_digest(text(pair)) for pair in self._pairs], np.uint64)

    def _read_reference(self, path: Path) -> Float32[np.ndarray, "pairs 2"]:
        """Loads the log-probabilities of the pairs by their digests.

        Raises:
          DataError: the file is damaged, or lacks the scores of a pair.
        """
        try:
            with path.open("rb") as file, np.load(file) as stored:  # np.load(path) leaks files that are not archives
                logprobs = dict(zip(stored["digests"].tolist(), stored["logprobs"], strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"The reference's log-probabilities in {path} cannot be read: {error}. Restore the file, or start a "
                "new run."
            ) from error
        digests = self._pair_digests.tolist()
        if missing := [self._pairs[row].chosen.name for row, digest in enumerate(digests) if digest not in logprobs]:
            raise DataError(
                f"{path} lacks the log-probabilities of {len(missing)} of {len(digests)} pairs, the first of which is "
                f"{missing[0]}: they were computed at the start of the run, before these pairs were added or changed. "
                "Restore the data, or start a new run by run.init_from."
            )
        return np.stack([logprobs[digest] for digest in digests])

    def _scored(self, params: Any, score: Callable[[Any, Batch], Mapping[str, Any]]) -> Float32[np.ndarray, "pairs 2"]:
        size = self._config.batch_size
        found: list[np.ndarray] = []
        for first in range(0, len(self._pairs), size):
            chosen = np.arange(first, min(first + size, len(self._pairs)))
            # Repeats the last pair: batches of a single shape compile once.
            padded = np.append(chosen, np.repeat(chosen[-1:], size - len(chosen)))
            answers = {name: array.reshape(2 * size, -1) for name, array in self._answers(padded).items()}
            # The log-probability of an ignored target is 0, so the sum covers the answer only.
            logprobs = np.asarray(score(params, answers)["logprobs"], np.float32).sum(axis=-1)
            found.append(logprobs.reshape(size, 2)[: len(chosen)])
        return np.concatenate(found)

    def _batch(self, chosen: Int64[np.ndarray, " batch"]) -> dict[str, np.ndarray]:
        batch = self._answers(chosen)
        if self._config.reference:
            if self._reference is None:
                raise DataError("The reference has not been scored yet: call update_weights first.")
            batch["reference_logprobs"] = self._reference[chosen]
        return batch

    def _answers(self, chosen: Int64[np.ndarray, " batch"]) -> dict[str, np.ndarray]:
        seq_tokens = self._config.seq_tokens
        pairs = [self._pairs[index] for index in chosen]
        return stacked(
            [stacked([laid_out([answer], seq_tokens) for answer in (pair.chosen, pair.rejected)]) for pair in pairs]
        )


def _pair(tokenization: Tokenization, name: str, record: Mapping[str, Any]) -> Pair:
    missing = [field for field in ("chosen", "rejected") if field not in record]
    if missing:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{name}: the record has no {' and no '.join(missing)}. Its fields: {fields}.")
    prompt, answers = record.get("prompt"), [record["chosen"], record["rejected"]]
    if prompt is None:
        prompt, answers = _common(name, *answers)
    options = {field: record[field] for field in TEMPLATE_FIELDS if field in record}
    chosen, rejected = (
        tokenization.conversation(name, {"prompt": prompt, "completion": answer, **options}) for answer in answers
    )
    return Pair(chosen, rejected)


def _common(name: str, chosen: Any, rejected: Any) -> tuple[Any, list[Any]]:
    """Splits two lists of messages into their common beginning, the prompt, and the two remainders."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise DataError(
            f"{name}: the record has no prompt, and its answers are not lists of messages. Write the prompt."
        )
    # Leaves at least one message to each answer.
    alike = 0
    while alike < min(len(chosen), len(rejected)) - 1 and chosen[alike] == rejected[alike]:
        alike += 1
    if not alike:
        raise DataError(f"{name}: the answers begin with different messages, so the prompt is missing. Write it.")
    return chosen[:alike], [chosen[alike:], rejected[alike:]]


def fitting_pairs(pairs: Sequence[Pair], seq_tokens: int, too_long: TooLong) -> list[Pair]:
    """Returns the pairs whose answers both fit a row, after cutting them if `too_long` is "cut"; see `fitting`."""
    names = {each.name for each in fitting([pair.chosen for pair in pairs], seq_tokens, too_long)}
    names &= {each.name for each in fitting([pair.rejected for pair in pairs], seq_tokens, too_long)}
    kept = [pair for pair in pairs if pair.chosen.name in names]
    if not kept:
        raise DataError(f"None of {len(pairs)} pairs has answers that both fit data.seq_tokens={seq_tokens}. Raise it.")
    most = seq_tokens + 1

    def cut(answer: Conversation) -> Conversation:
        return Conversation(answer.name, answer.tokens[:most], answer.supervised[:most])

    return [Pair(cut(pair.chosen), cut(pair.rejected)) for pair in kept]
