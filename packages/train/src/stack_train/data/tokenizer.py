"""Tokenizers in the Hugging Face format: `tokenizer.json`, and config files that name the special tokens."""

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32, Int64

from stack_core.abi.errors import DataError
from stack_core.abi.local_paths import hub_advice
from stack_train.data.cache import digest_of
from stack_train.data.token_bytes import TokenBytes

__all__ = ["HuggingFaceTokenizer", "write_tokenizer"]

_VOCABULARY = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_LONG_CHARACTERS = 8192
_TEMPLATE = "chat_template.jinja"
_KEPT = (
    _CONFIG,
    _SPECIAL_TOKENS,
    _TEMPLATE,
    "chat_template.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class HuggingFaceTokenizer:
    """A tokenizer that keeps its files byte for byte, including the chat template.

    Training documents and prompts start with the same tokens, such as a beginning-of-text token. Only training
    documents end with the end-of-text token. `encode` drops it from prompts if the tokenizer's template adds it,
    because a completion follows.

    Attributes:
      vocab_size: largest token id plus one.
      eos_id, bos_id, pad_id: ids of the special tokens named in `tokenizer_config.json`, or None.
      special_tokens: text of each special token by its role, such as `bos_token`.
      chat_template: Jinja source of the chat template, or None.
      max_tokens: maximum length of a text by `model_max_length` in `tokenizer_config.json`, or None.
      digest: hash of everything that determines a text's token ids.

    Args:
      files: file contents by file name; only `tokenizer.json` is required.
      origin: origin of the files, for messages.

    Raises:
      DataError: the files are malformed, or name a special token that is not in the vocabulary.
    """

    def __init__(self, files: Mapping[str, bytes], origin: str) -> None:
        self._files = dict(files)
        self._origin = origin
        self._for_prompts = _parse_vocabulary(files[_VOCABULARY], origin)
        _keep_spaces_in_offsets(self._for_prompts.post_processor)
        settings = {**_json(files, _SPECIAL_TOKENS, origin), **_json(files, _CONFIG, origin)}
        # Ids may have gaps, so their number could be smaller than the largest id plus one.
        self.vocab_size: int = max(self._for_prompts.get_vocab(with_added_tokens=True).values()) + 1
        self.special_tokens = _special_tokens(settings)
        self.eos_id = self._special_id("eos_token")
        self.bos_id = self._special_id("bos_token")
        self.pad_id = self._special_id("pad_token")
        self.chat_template = _chat_template(files, settings)
        length = settings.get("model_max_length")
        self.max_tokens = int(length) if isinstance(length, int | float) and length >= 1 else None
        self._prefix = self._missing_prefix(settings)
        self._suffix_tokens = self._ending_tokens()
        self._token_bytes = TokenBytes(self._for_prompts)
        added = self._for_prompts.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self.digest = digest_of(files[_VOCABULARY].decode("utf-8"), self.eos_id, self._prefix)

    @classmethod
    def load(cls, path: str | Path) -> "HuggingFaceTokenizer":
        """Loads a tokenizer from a directory, or from the path of its `tokenizer.json`.

        Raises:
          DataError: `tokenizer.json` does not exist, or a file cannot be read.
        """
        path = Path(path).expanduser()
        directory = path.parent if path.suffix == ".json" else path
        vocabulary = path if path.suffix == ".json" else path / _VOCABULARY
        if not vocabulary.is_file():
            raise DataError(
                f"There is no tokenizer at {str(path)!r}: {str(vocabulary)!r} is missing. Give a directory that holds "
                f"tokenizer.json, the path of that file, or 'bpe' to train one.{hub_advice(str(path))}"
            )
        try:
            files = {name: (directory / name).read_bytes() for name in _KEPT if (directory / name).is_file()}
            return cls({**files, _VOCABULARY: vocabulary.read_bytes()}, str(path))
        except OSError as error:
            raise DataError(f"Cannot read the tokenizer at {str(path)!r}: {error}. Make its files readable.") from error

    def with_chat_template(self, template: str) -> "HuggingFaceTokenizer":
        """Returns a copy with another chat template (Jinja source), which `save` also writes."""
        return HuggingFaceTokenizer({**self._files, _TEMPLATE: template.encode("utf-8")}, self._origin)

    def for_encoder(self, *, lowercase: bool = False) -> "HuggingFaceTokenizer":
        """Returns a copy whose `encode` keeps the special tokens at both ends of a text.

        Args:
          lowercase: converts texts to lower case first.
        """
        found = copy.copy(self)
        found._suffix_tokens = 0
        if lowercase:
            found._for_prompts = _parse_vocabulary(self.vocabulary, self._origin)
            steps = [tokenizers.normalizers.Lowercase(), *filter(None, [found._for_prompts.normalizer])]
            found._for_prompts.normalizer = tokenizers.normalizers.Sequence(steps)
        return found

    @property
    def vocabulary(self) -> bytes:
        """The contents of `tokenizer.json`."""
        return self._files[_VOCABULARY]

    def save(self, directory: Path) -> None:
        """Writes the tokenizer's files into `directory`, creating it if necessary."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (directory / name).write_bytes(content)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `stack_core.abi.data.Tokenizer`."""
        ids = self._encoded(text, add_special_tokens)
        return ids[: len(ids) - self._suffix_tokens] if add_special_tokens else ids

    def encode_for_encoder(self, text: str) -> list[int]:
        """Encodes a text for a text encoder, keeping the special tokens at both ends."""
        return self._encoded(text, True)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_CHARACTERS:
            ids = self._for_prompts.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # only encode_batch releases the GIL; encoding a long prompt would otherwise block a server's threads
            (encoding,) = self._for_prompts.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        return [*self._prefix, *ids] if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str]) -> list[Int64[np.ndarray, " tokens"]]:
        """Encodes documents into one array of ids each; special tokens written in them are ordinary text."""
        encodings = self._for_documents.encode_batch_fast(list(texts))
        return [np.array([*self._prefix, *encoding.ids], np.int64) for encoding in encodings]

    def encode_with_offsets(
        self, text: str
    ) -> tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, "tokens begin_and_end"]]:
        """Encodes a text without adding special tokens, which chat templates already contain.

        Returns:
          The ids, and the begin and end of each token in characters of the text, including the token's spaces.
        """
        encoding = self._for_prompts.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with this text, or None for a text outside of the vocabulary."""
        return self._for_prompts.token_to_id(text)

    def is_special(self, token: int) -> bool:
        """Returns whether a token is a special token, such as an end-of-turn token."""
        return token in self._special_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens without special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._for_prompts.decode([int(index) for index in ids], skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """See `stack_core.abi.data.Tokenizer`."""
        return self._token_bytes(token)

    @cached_property
    def _for_documents(self) -> tokenizers.Tokenizer:
        """A second tokenizer, in which special tokens are ordinary text; servers never parse it."""
        tokenizer = _parse_vocabulary(self.vocabulary, self._origin)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _special_id(self, part: str) -> int | None:
        token = self.special_tokens.get(part)
        if token is None:
            return None
        index = self._for_prompts.token_to_id(token)
        if index is None:
            raise DataError(
                f"Tokenizer {self._origin!r} names {token!r} as its {part}, but its vocabulary has no such token. "
                f"Correct {part} in {_CONFIG}."
            )
        return index

    def _missing_prefix(self, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the beginning-of-text token that the config requires, unless `tokenizer.json` already adds one."""
        if not settings.get("add_bos_token") or self.bos_id is None:
            return ()
        return () if self.bos_id in self._for_prompts.encode("").ids else (self.bos_id,)

    def _ending_tokens(self) -> int:
        """Counts the special tokens that the tokenizer appends to a text, if the last one is the end-of-text token."""
        if self.eos_id is None or not self._for_prompts.num_special_tokens_to_add(is_pair=False):
            return 0
        # Any text would do; every vocabulary can encode this one.
        encoding = self._for_prompts.encode(self.special_tokens["eos_token"])
        count = encoding.special_tokens_mask[::-1].index(0)
        return count if encoding.ids[-1] == self.eos_id else 0


def write_tokenizer(tokenizer: HuggingFaceTokenizer, directory: Path) -> None:
    """Writes a tokenizer atomically to `tokenizer/` in a run's directory, unless that directory exists."""
    destination = directory / "tokenizer"
    if not destination.exists():
        partial = directory / "tokenizer.partial"
        tokenizer.save(partial)
        partial.replace(destination)


def _parse_vocabulary(content: bytes, origin: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # The library raises bare `Exception` for whatever it cannot parse.
        raise DataError(f"The {_VOCABULARY} of tokenizer {origin!r} is malformed: {error}. Fetch it again.") from error
    # `tokenizer.json` stores the truncation and padding of its last use, which would change the documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _keep_spaces_in_offsets(processor: Any) -> None:
    """Includes spaces in token offsets, which byte-level tokenizers may trim. Token ids do not change."""
    if isinstance(processor, tokenizers.processors.Sequence):
        for each in processor:
            _keep_spaces_in_offsets(each)
    elif hasattr(processor, "trim_offsets"):
        processor.trim_offsets = False


def _json(files: Mapping[str, bytes], name: str, origin: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise DataError(f"The {name} of tokenizer {origin!r} is not JSON: {error}. Fetch it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"The {name} of tokenizer {origin!r} holds a {type(content).__name__}, not an object.")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {part: token for part, token in settings.items() if part.endswith("_token")}
    texts = {part: token.get("content") if isinstance(token, dict) else token for part, token in named.items()}
    return {part: text for part, text in texts.items() if isinstance(text, str)}  # skips "add_bos_token", a bool


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    """Returns the template of the separate file or the config; selects "default" from a list of named templates."""
    if _TEMPLATE in files:
        return files[_TEMPLATE].decode("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template
