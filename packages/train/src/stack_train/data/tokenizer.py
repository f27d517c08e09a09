"""A tokenizer in the Hugging Face format: `tokenizer.json`, and beside it who plays which special part."""

import json
from collections.abc import Mapping, Sequence
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
    """Text to token ids and back; its files are kept byte for byte, the chat template included.

    The tokens that the tokenizer itself puts before a text, such as a beginning-of-text token, are the same in training
    documents and in prompts. Only training documents end with the end-of-text token. `encode` drops it from prompts if
    the tokenizer's own template adds it, because an answer follows.

    Attributes:
      vocab_size: the largest token id plus one.
      eos_id, bos_id, pad_id: the special tokens that `tokenizer_config.json` names, or None.
      special_tokens: the texts of all that it names, such as `bos_token`.
      chat_template: Jinja source, or None.
      digest: changes whenever a text could get other token ids.

    Args:
      files: contents by file name; `tokenizer.json` is needed, the rest is optional.
      origin: where the files come from, for messages.

    Raises:
      DataError: the files are malformed, or name a special token that the vocabulary lacks.
    """

    def __init__(self, files: Mapping[str, bytes], origin: str) -> None:
        self._files = dict(files)
        self._origin = origin
        self._for_prompts = _parse_vocabulary(files[_VOCABULARY], origin)
        _keep_spaces_in_offsets(self._for_prompts.post_processor)
        self._for_documents = _parse_vocabulary(files[_VOCABULARY], origin)
        self._for_documents.encode_special_tokens = True
        settings = {**_json(files, _SPECIAL_TOKENS, origin), **_json(files, _CONFIG, origin)}
        self.vocab_size: int = max(self._for_prompts.get_vocab(with_added_tokens=True).values()) + 1
        self.special_tokens = _special_tokens(settings)
        self.eos_id = self._special_id("eos_token")
        self.bos_id = self._special_id("bos_token")
        self.pad_id = self._special_id("pad_token")
        self.chat_template = _chat_template(files, settings)
        self._prefix = self._missing_prefix(settings)
        self._suffix_tokens = self._ending_tokens()
        self._token_bytes = TokenBytes(self._for_prompts)
        added = self._for_prompts.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self.digest = digest_of(files[_VOCABULARY].decode("utf-8"), self.eos_id, self._prefix)

    @classmethod
    def load(cls, path: str | Path) -> "HuggingFaceTokenizer":
        """Reads a directory that holds `tokenizer.json`, or that file and its neighbours.

        Raises:
          DataError: there is none, or it cannot be read.
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
        """The same tokenizer with another chat template, Jinja source, which goes where its files go."""
        return HuggingFaceTokenizer({**self._files, _TEMPLATE: template.encode("utf-8")}, self._origin)

    @property
    def vocabulary(self) -> bytes:
        """The contents of its `tokenizer.json`."""
        return self._files[_VOCABULARY]

    def save(self, directory: Path) -> None:
        """Writes the tokenizer's files into `directory`, which is made if it is not there."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (directory / name).write_bytes(content)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `stack_core.abi.data.Tokenizer`."""
        ids = self._encoded(text, add_special_tokens)
        return ids[: len(ids) - self._suffix_tokens] if add_special_tokens else ids

    def encode_for_encoder(self, text: str) -> list[int]:
        """Encodes a text for a text encoder, with the special tokens at both ends."""
        return self._encoded(text, True)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG_CHARACTERS:
            ids = self._for_prompts.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # as a batch, for which alone it lets go of Python's lock: a long prompt would hold a whole server
            (encoding,) = self._for_prompts.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        return [*self._prefix, *ids] if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str]) -> list[Int64[np.ndarray, " tokens"]]:
        """Encodes documents, one array of ids each; the names of special tokens in them are ordinary text."""
        encodings = self._for_documents.encode_batch_fast(list(texts))
        return [np.array([*self._prefix, *encoding.ids], np.int64) for encoding in encodings]

    def encode_with_offsets(
        self, text: str
    ) -> tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, "tokens begin_and_end"]]:
        """Encodes a text without adding tokens, as chat templates write their own.

        Returns:
          The ids, and the begin and end of each token in the text's characters, its spaces included.
        """
        encoding = self._for_prompts.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with this text, or None if the vocabulary lacks it."""
        return self._for_prompts.token_to_id(text)

    def is_special(self, token: int) -> bool:
        """Whether a token is none of a text's own, such as one that ends a turn."""
        return token in self._special_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self._for_prompts.decode([int(index) for index in ids], skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """See `stack_core.abi.data.Tokenizer`."""
        return self._token_bytes(token)

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
        """The beginning-of-text token, where the config asks for it and `tokenizer.json` does not add it itself."""
        if not settings.get("add_bos_token") or self.bos_id is None:
            return ()
        return () if self.bos_id in self._for_prompts.encode("").ids else (self.bos_id,)

    def _ending_tokens(self) -> int:
        """Counts the tokens that the tokenizer adds behind a text, if the last of them is the end-of-text token."""
        if self.eos_id is None or not self._for_prompts.num_special_tokens_to_add(is_pair=False):
            return 0
        encoding = self._for_prompts.encode(self.special_tokens["eos_token"])  # a text that every vocabulary has
        count = encoding.special_tokens_mask[::-1].index(0)
        return count if encoding.ids[-1] == self.eos_id else 0


def write_tokenizer(tokenizer: HuggingFaceTokenizer, directory: Path) -> None:
    """Writes a tokenizer under `tokenizer/` of a run's directory, whole or not at all; one that is there stays."""
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
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _keep_spaces_in_offsets(processor: Any) -> None:
    """Makes the offsets of tokens include their spaces, which byte-level tokenizers may trim; ids stay the same."""
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
    return {part: text for part, text in texts.items() if isinstance(text, str)}  # "add_bos_token" is no text


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    """The template in its own file, or the config's; a config's list of named ones gives its "default"."""
    if _TEMPLATE in files:
        return files[_TEMPLATE].decode("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template
