"""Byte-level tokenizers in GGUF: their vocabulary, merges, special tokens and chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.errors import ConversionError
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = ["Vocabulary"]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_SPACES = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_GPT_2 = "gpt-2"
_PATTERNS = {
    "llama-bpe": _CASES + "\\p{N}{1,3}" + _SPACES,
    "qwen2": _CASES + "\\p{N}" + _SPACES,
}
"""How text is cut before merges, by the name in GGUF; gpt-2 is what `tokenizers` calls ByteLevel with its regex."""

_PARTS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE.

    Attributes:
      tokens: by id.
      types: of each token, in ggml's numbers.
      cut: how text is cut before merges, by its name in GGUF.
      special: ids of "bos_token", "eos_token" and "pad_token", of those that there are.
      adds_bos: a prompt begins with the first of these.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    cut: str
    special: Mapping[str, int]
    adds_bos: bool
    chat_template: str | None

    @classmethod
    def of(cls, tokenizer: HuggingFaceTokenizer, vocab_size: int) -> "Vocabulary":
        """That of a tokenizer; tokens that the model has beyond it are filled up with unused ones.

        Raises:
          ConversionError: it is no byte-level BPE that GGUF has a name for.
        """
        content = json.loads(tokenizer.vocabulary)
        model = content["model"]
        if model.get("type") != "BPE" or model.get("byte_fallback"):
            fallback = " with bytes as a fallback" if model.get("byte_fallback") else ""
            raise ConversionError(
                f"The tokenizer is a {model.get('type')}{fallback}; byte-level BPE is written to GGUF."
            )
        tokens = [f"[PAD{index}]" for index in range(vocab_size)]
        types = [_UNUSED] * vocab_size
        for token, index in model["vocab"].items():
            tokens[index], types[index] = token, _NORMAL
        for added in content.get("added_tokens") or ():
            index = added["id"]
            tokens[index], types[index] = added["content"], _CONTROL if added["special"] else _USER_DEFINED
        merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        special = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
        return cls(
            tokens,
            types,
            merges,
            _cut_of(content.get("pre_tokenizer")),
            {name: index for name, index in special.items() if index is not None},
            tokenizer.bos_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_id],
            tokenizer.chat_template,
        )

    def settings(self) -> list[tuple[str, Any]]:
        """Under their keys in GGUF."""
        ids = [(f"tokenizer.ggml.{_PARTS[name]}_token_id", index) for name, index in self.special.items()]
        template = [] if self.chat_template is None else [("tokenizer.chat_template", self.chat_template)]
        return [
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", self.cut),
            ("tokenizer.ggml.tokens", list(self.tokens)),
            ("tokenizer.ggml.token_type", list(self.types)),
            ("tokenizer.ggml.merges", list(self.merges)),
            *ids,
            ("tokenizer.ggml.add_bos_token", self.adds_bos),
            *template,
        ]

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "Vocabulary":
        """That of a file.

        Raises:
          ConversionError: it is another kind of tokenizer, or cuts text in a way that is not known here.
        """
        kind, cut = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or cut not in (_GPT_2, *_PATTERNS):
            raise ConversionError(
                f"The file's tokenizer is {kind!r}, which cuts text as {cut!r}; 'gpt2' is read, cut as one of "
                f"{', '.join((_GPT_2, *_PATTERNS))}."
            )
        tokens = settings["tokenizer.ggml.tokens"]
        ids = {name: settings.get(f"tokenizer.ggml.{part}_token_id") for name, part in _PARTS.items()}
        return cls(
            tokens,
            settings.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)),
            settings.get("tokenizer.ggml.merges", []),
            cut,
            {name: index for name, index in ids.items() if index is not None},
            bool(settings.get("tokenizer.ggml.add_bos_token", False)),
            settings.get("tokenizer.chat_template"),
        )

    def files(self) -> dict[str, bytes]:
        """As Hugging Face's files have it."""
        added = [
            {
                "id": index,
                "content": self.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for index, kind in enumerate(self.types)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        model = {
            "type": "BPE",
            # With the special tokens, which otherwise would come after the last, whatever their ids.
            "vocab": {self.tokens[index]: index for index, kind in enumerate(self.types) if kind != _UNUSED},
            "merges": list(self.merges),
            "ignore_merges": self.cut == "llama-bpe",
        }
        content = {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if self.cut == "qwen2" else None,
            "pre_tokenizer": _pre_tokenizer(self.cut),
            "post_processor": self._post_processor(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "model": model,
        }
        config = {name: self.tokens[index] for name, index in self.special.items()}
        template = {} if self.chat_template is None else {"chat_template.jinja": self.chat_template.encode()}
        return {
            "tokenizer.json": json.dumps(content, ensure_ascii=False).encode(),
            "tokenizer_config.json": json.dumps(config, indent=2).encode(),
            **template,
        }

    def _post_processor(self) -> dict[str, Any] | None:
        if not self.adds_bos or "bos_token" not in self.special:
            return None
        index = self.special["bos_token"]
        name = self.tokens[index]
        first = {"SpecialToken": {"id": name, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]}},
        }


def _pre_tokenizer(cut: str) -> dict[str, Any]:
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cut == _GPT_2}
    if cut == _GPT_2:
        return bytes_of
    pattern = {"type": "Split", "pattern": {"Regex": _PATTERNS[cut]}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [pattern, bytes_of]}


def _cut_of(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """The name in GGUF of how a tokenizer cuts text."""
    given = pre_tokenizer or {}
    if given.get("type") == "ByteLevel" and given.get("use_regex", True) and not given.get("add_prefix_space"):
        return _GPT_2
    patterns = [each.get("pattern", {}).get("Regex") for each in given.get("pretokenizers", ())]
    for name, pattern in _PATTERNS.items():
        if pattern in patterns:
            return name
    raise ConversionError(
        f"The tokenizer cuts text as {json.dumps(given)[:200]}, which GGUF has no name for that is known here: "
        f"{', '.join((_GPT_2, *_PATTERNS))}."
    )
