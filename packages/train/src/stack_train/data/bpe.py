"""A byte-level BPE trained on a sample of a source's training documents."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from stack_core.abi.data import DataSource
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.cache import cached, digest_of
from stack_train.data.source import check_unchanged, documents_with_text
from stack_train.data.split import split_documents, text_digest
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["BPE_VOCAB_SIZE", "trained_bpe"]

BPE_VOCAB_SIZE = 4096

_EOS, _BOS, _PAD = "<|end_of_text|>", "<|begin_of_text|>", "<|pad|>"
_SPECIAL_TOKENS = (_EOS, _BOS, _PAD)
_SMALLEST = 256 + len(_SPECIAL_TOKENS)
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _BOS,
    "eos_token": _EOS,
    "pad_token": _PAD,
    # transformers would otherwise remove spaces before punctuation when it decodes.
    "clean_up_tokenization_spaces": False,
}
# Part of the cache's key: raise it if equal documents and settings give another tokenizer.
_FORMAT = 1


def trained_bpe(
    source: DataSource,
    *,
    vocab_size: int,
    sample_bytes: int,
    validation_fraction: float,
    cache_dir: Path,
    fewer: bool = False,
) -> HuggingFaceTokenizer:
    """Trains a BPE on a source, or loads it from the cache if the documents and settings are the same.

    Args:
      source: source of the documents.
      vocab_size: number of tokens, special tokens included.
      sample_bytes: maximum number of UTF-8 bytes to train on, from training documents selected by digest.
      validation_fraction: fraction of the documents held out for validation, which are not trained on.
      cache_dir: directory of cached tokenizers.
      fewer: accept fewer tokens than `vocab_size` if the sample has too few distinct words.

    Raises:
      ConfigError: `vocab_size` is smaller than the 256 bytes and the special tokens.
      DataError: the sample has too few distinct words for `vocab_size`.
    """
    if vocab_size < _SMALLEST:
        raise ConfigError(
            f"data.vocab_size is {vocab_size}; a byte-level BPE needs at least {_SMALLEST}: "
            f"256 bytes and {len(_SPECIAL_TOKENS)} special tokens."
        )

    fingerprint = source.fingerprint()

    def build(folder: Path) -> None:
        sample = _sample(source, sample_bytes, validation_fraction)
        (folder / "tokenizer.json").write_text(_train(sample, vocab_size, fewer).to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG, indent=2), encoding="utf-8")
        check_unchanged(source, fingerprint)

    settings = (vocab_size, sample_bytes, validation_fraction)
    # Appended only if it is set, so keys of earlier tokenizers stay valid.
    key = digest_of("bpe", _FORMAT, fingerprint, *settings, *(["fewer"] if fewer else []))
    return HuggingFaceTokenizer.load(cached(cache_dir / "tokenizers" / key, build))


def _sample(source: DataSource, sample_bytes: int, validation_fraction: float) -> Iterator[str]:
    """Yields texts of up to `sample_bytes` to train on, in the source's order.

    Documents are selected in order of their digest, which makes the sample random but reproducible. The last selected
    document is cut.
    """
    # Two passes, because the texts of a large source do not fit into memory.
    facts = [
        (text_digest(document.text), len(document.text.encode("utf-8"))) for document in documents_with_text(source)
    ]
    digests, sizes_bytes = np.array(facts, np.uint64).reshape(-1, 2).T
    training, _ = split_documents(digests, validation_fraction)
    sizes_bytes = sizes_bytes.astype(np.int64)
    before_bytes = np.cumsum(sizes_bytes[training]) - sizes_bytes[training]
    take_bytes = np.zeros(len(facts), np.int64)
    take_bytes[training] = np.clip(sample_bytes - before_bytes, 0, sizes_bytes[training])
    # Not strict: `check_unchanged` reports documents that have changed since the first pass.
    for document, take in zip(documents_with_text(source), take_bytes, strict=False):
        if take:
            # The cut may fall inside a character.
            yield document.text.encode("utf-8")[:take].decode("utf-8", "ignore")


def _train(sample: Iterator[str], vocab_size: int, fewer: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        # Otherwise texts with bytes that the sample lacks could not be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    if (learned := tokenizer.get_vocab_size()) < vocab_size and not fewer:
        raise DataError(
            f"The documents are too few to learn data.vocab_size={vocab_size} tokens: {learned} were found that occur "
            f"more than once. Lower data.vocab_size to {learned}, raise data.tokenizer_bytes, or add text."
        )
    bos_id = tokenizer.token_to_id(_BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{_BOS} $A", special_tokens=[(_BOS, bos_id)])
    return tokenizer
