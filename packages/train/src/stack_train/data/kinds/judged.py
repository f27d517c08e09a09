"""`data.name: judged`: single answers to prompts, each labelled desirable or undesirable."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Int64

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import DataError
from stack_train.data.cache import digest_of
from stack_train.data.conversations import Conversation, Tokenization
from stack_train.data.files import expand_glob
from stack_train.data.jsonl import jsonl_records
from stack_train.data.kinds.chat import load_tokenizer
from stack_train.data.kinds.preferences import AnswersData, Pair, PreferenceBatches, fitting_pairs
from stack_train.data.kinds.text import check_vocabulary
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["JudgedBatches", "JudgedData"]


@config
class JudgedData(AnswersData):
    """Labelled answers in JSONL files, one record per line: `prompt`, `completion` and `label`.

    Prompt and completion are texts or lists of messages; the label is true for desirable answers. A batch pairs each
    answer with a mismatched one: the same prompt followed by the completion of a record with another prompt. KTO
    estimates the divergence from the reference with the mismatched answers. The arrays are int32[batch, 2, seq_tokens]
    with the answer first; `reference_logprobs`, float32[batch, 2]; and `desirable`, float32[batch], 1 or 0.

    Attributes:
      name: selects this kind of data. See `AnswersData` for more fields.
    """

    name: Literal["judged"] = "judged"

    def spec(self, model: Any) -> Shapes:
        return {**super().spec(model), "desirable": jax.ShapeDtypeStruct((self.batch_size,), np.float32)}

    def work(self) -> tuple[str, int]:
        return "answers", self.batch_size

    def build(self, *, seed: int, model: Any) -> "JudgedBatches":
        """Reads and tokenizes every answer.

        Raises:
          ConfigError: no tokenizer is configured, or its vocabulary is larger than the model's.
          DataError: a record is malformed or too long, or all answers have the same prompt.
        """
        tokenizer = load_tokenizer(self.tokenizer, self.name, self.chat_template)
        check_vocabulary(tokenizer.vocab_size, model)
        tokenization = Tokenization.by_template_of(tokenizer)
        records = [
            (name, _checked(name, record)) for name, record in jsonl_records(expand_glob(self.source, self.name))
        ]
        others = _unrelated_prompts([record["prompt"] for _, record in records], self.source)
        pairs: list[Pair] = []
        labels: dict[str, bool] = {}
        for (name, record), other in zip(records, others, strict=True):
            answer = tokenization.conversation(name, record)
            mismatched = {**record, "completion": records[other][1]["completion"]}
            cut = _cut(tokenization.conversation(name, mismatched), self.seq_tokens)
            # A long prompt may leave no room for the mismatched answer, and a divergence needs targets.
            pairs.append(Pair(answer, cut if cut.supervised.any() else answer))
            # By name, because `fitting_pairs` may drop records.
            labels[name] = bool(record["label"])
        kept = fitting_pairs(pairs, self.seq_tokens, self.too_long)
        desirable = np.asarray([labels[pair.chosen.name] for pair in kept])
        return JudgedBatches(self, tokenizer, kept, desirable, seed=seed)


class JudgedBatches(PreferenceBatches):
    """Batches of answers and mismatched answers; see `Batches`."""

    def __init__(
        self,
        config: JudgedData,
        tokenizer: HuggingFaceTokenizer,
        pairs: Sequence[Pair],
        desirable: Bool[np.ndarray, " pairs"],
        *,
        seed: int,
    ) -> None:
        super().__init__(config, tokenizer, pairs, seed=seed)
        self._desirable = desirable
        self.fingerprint["the labels (digest)"] = digest_of([int(label) for label in desirable])

    def _batch(self, chosen: Int64[np.ndarray, " batch"]) -> dict[str, np.ndarray]:
        return {**super()._batch(chosen), "desirable": self._desirable[chosen].astype(np.float32)}


def _checked(name: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    missing = [field for field in ("prompt", "completion", "label") if field not in record]
    if missing:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{name}: the record has no {' and no '.join(missing)}. Its fields: {fields}.")
    if record["label"] not in (0, 1):
        raise DataError(f"{name}: the label is {record['label']!r}; expected true, for a desirable answer, or false.")
    return record


def _unrelated_prompts(prompts: Sequence[Any], source: str) -> list[int]:
    """Returns, for each record, the index of the next record with another prompt.

    Raises:
      DataError: all records have the same prompt.
    """
    if all(prompt == prompts[0] for prompt in prompts):
        raise DataError(
            f"{source} holds {len(prompts)} answers to a single prompt; KTO estimates the policy's divergence from its "
            "reference with answers to other prompts. Add records with another prompt."
        )

    def differs(first: int) -> Callable[[int], bool]:
        return lambda step: prompts[(first + step) % len(prompts)] != prompts[first]

    # The next record instead of a random one: a resumed run must pair the same answers.
    steps = range(1, len(prompts))
    return [(place + next(filter(differs(place), steps))) % len(prompts) for place in range(len(prompts))]


def _cut(answer: Conversation, seq_tokens: int) -> Conversation:
    """Truncates a mismatched answer to a row. It is not a training example, so it need not be complete."""
    most = seq_tokens + 1
    return Conversation(answer.name, answer.tokens[:most], answer.supervised[:most])
