"""Byte-level tokenizers in GGUF: their vocabulary, merges, special tokens and chat template."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.errors import ConversionError
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.gguf.cuts import CUTS, NOT_BYTE_LEVEL, candidates_of, patterns_of, pre_tokenizer_of
from stack_train.gguf.representable import (
    added_tokens_at_ends,
    check_ids,
    check_model,
    check_parts,
    composes_characters,
    token_changed_by_merges,
)

__all__ = ["Vocabulary"]

# Numbers of llama.cpp's token types (LLAMA_TOKEN_TYPE).
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_PARTS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the spelling of the GGUF key
    "mask_token": "mask",
}


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer.

    Attributes:
      tokens: text of each token, by id.
      types: type of each token, as a number of ggml.
      merges: merges in order of priority, each as two tokens separated by a space.
      cut: name of the pre-tokenizer in GGUF, a key of `CUTS`.
      special: ids of special tokens by their keys in `tokenizer_config.json`, such as "bos_token".
      adds_bos: True if texts are encoded with a beginning-of-text token.
      adds_eos: True if texts are encoded with an end-of-text token.
      chat_template: Jinja template, or None.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    cut: str
    special: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None

    @classmethod
    def of(cls, tokenizer: HuggingFaceTokenizer, vocab_size: int) -> "Vocabulary":
        """Returns the vocabulary of a tokenizer, padded with unused tokens to the size of the model's vocabulary.

        Raises:
          ConversionError: GGUF cannot represent the tokenizer, or the result encodes a test text differently.
        """
        content = json.loads(tokenizer.vocabulary)
        check_model(content["model"])
        composes = composes_characters(content.get("normalizer"))
        check_parts(content, composes=composes)
        cut = _name_of_cut(content, composes=composes)
        ids = {name: tokenizer.token_id(text) for name, text in tokenizer.special_tokens.items() if name in _PARTS}
        special = {name: index for name, index in ids.items() if index is not None}
        first, last = added_tokens_at_ends(tokenizer)
        # A tokenizer may add a token that its config does not name.
        special |= {} if first is None else {"bos_token": first}
        special |= {} if last is None else {"eos_token": last}
        tokens, types = _tokens(content, vocab_size)
        # Older versions of tokenizers write a merge as one text, newer ones as a pair.
        merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
        found = cls(tokens, types, merges, cut, special, first is not None, last is not None, tokenizer.chat_template)
        check_ids(tokenizer, HuggingFaceTokenizer(cls.read(dict(found.settings())).files(), "the GGUF file"))
        if composes:
            warnings.warn(
                "The tokenizer composes characters first (NFC), which llama.cpp does not do: a text with decomposed "
                "characters gets other tokens there. Compose such texts before.",
                stacklevel=2,
            )
        return found

    def settings(self) -> list[tuple[str, Any]]:
        """Returns the tokenizer's settings under their GGUF keys."""
        ids = [(f"tokenizer.ggml.{_PARTS[name]}_token_id", index) for name, index in self.special.items()]
        template = [] if self.chat_template is None else [("tokenizer.chat_template", self.chat_template)]
        return [
            # llama.cpp's name of byte-level BPE.
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", self.cut),
            ("tokenizer.ggml.tokens", list(self.tokens)),
            ("tokenizer.ggml.token_type", list(self.types)),
            ("tokenizer.ggml.merges", list(self.merges)),
            *ids,
            ("tokenizer.ggml.add_bos_token", self.adds_bos),
            ("tokenizer.ggml.add_eos_token", self.adds_eos),
            *template,
        ]

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "Vocabulary":
        """Returns the vocabulary in the settings of a file.

        Raises:
          ConversionError: the tokenizer is not a byte-level BPE, its pre-tokenizer is unknown, or it adds a special
            token to texts without defining its id.
        """
        kind, cut = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre")
        if kind == "gpt2" and cut is None:
            cut = "default"
            warnings.warn(
                "The file does not name how its tokenizer cuts text (tokenizer.ggml.pre). It is read as 'default', as "
                "llama.cpp does; the model may have been trained with other tokens. Take a newer file of the model.",
                stacklevel=2,
            )
        if kind != "gpt2" or cut not in CUTS:
            reason = ", whose tokens are not bytes" if cut in NOT_BYTE_LEVEL else ""
            raise ConversionError(
                f"The file's tokenizer is {kind!r}, which cuts text as {cut!r}{reason}; 'gpt2' is read, cut as one of "
                f"{', '.join(CUTS)}."
            )
        tokens = settings["tokenizer.ggml.tokens"]
        ids = {name: settings.get(f"tokenizer.ggml.{part}_token_id") for name, part in _PARTS.items()}
        adds = {
            "bos_token": bool(settings.get("tokenizer.ggml.add_bos_token", CUTS[cut].adds_bos)),
            "eos_token": bool(settings.get("tokenizer.ggml.add_eos_token", False)),
        }
        if unnamed := [name for name, is_added in adds.items() if is_added and ids[name] is None]:
            raise ConversionError(f"The file adds its {unnamed[0]} to texts, but names none. Correct its metadata.")
        return cls(
            tokens,
            settings.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)),
            settings.get("tokenizer.ggml.merges", []),
            cut,
            {name: index for name, index in ids.items() if index is not None and index < len(tokens)},
            adds["bos_token"],
            adds["eos_token"],
            settings.get("tokenizer.chat_template"),
        )

    def files(self) -> dict[str, bytes]:
        """Returns the content of the tokenizer's Hugging Face files by name."""
        added = [
            {
                "id": index,
                "content": self.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                # Special tokens are found in the text before it is normalized.
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for index, kind in enumerate(self.types)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        model = {
            "type": "BPE",
            # Includes special tokens, which would otherwise get new ids after the last one.
            "vocab": {self.tokens[index]: index for index, kind in enumerate(self.types) if kind != _UNUSED},
            "merges": list(self.merges),
            "ignore_merges": CUTS[self.cut].ignores_merges,
        }
        content = {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if CUTS[self.cut].composes else None,
            "pre_tokenizer": pre_tokenizer_of(CUTS[self.cut]),
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
        ends = {"bos_token": self.adds_bos, "eos_token": self.adds_eos}
        names = {part: self.tokens[self.special[part]] for part, is_added in ends.items() if is_added}
        if not names:
            return None
        pieces = {part: [{"SpecialToken": {"id": name, "type_id": 0}}] for part, name in names.items()}
        first, last = pieces.get("bos_token", []), pieces.get("eos_token", [])
        text, second = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
        return {
            "type": "TemplateProcessing",
            "single": [*first, text, *last],
            "pair": [*first, text, *last, *first, second, *last],
            "special_tokens": {
                name: {"id": name, "ids": [self.special[part]], "tokens": [name]} for part, name in names.items()
            },
        }


def _name_of_cut(content: Mapping[str, Any], *, composes: bool) -> str:
    """Returns the GGUF name of a tokenizer's pre-tokenizer, which also determines `ignore_merges`.

    Raises:
      ConversionError: GGUF does not name the pre-tokenizer, or only with the opposite `ignore_merges`, which would
        change the encoding of a token.
    """
    candidates = candidates_of(patterns_of(content.get("pre_tokenizer")), composes=composes)
    ignores_merges = bool(content["model"].get("ignore_merges"))
    for name, cut in candidates.items():
        if cut.ignores_merges == ignores_merges:
            return name
    if changed := token_changed_by_merges(content):
        ignored = "ignores merges" if ignores_merges else "does not ignore merges"
        raise ConversionError(
            f"The tokenizer {ignored}, in which it differs from those with its cut in GGUF: {', '.join(candidates)}. "
            f"Token {changed!r} would be cut in another way."
        )
    return next(iter(candidates))


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Returns the token and the type of each id.

    Raises:
      ConversionError: the tokenizer has more tokens than the model, or several ids with the same text.
    """
    added = content.get("added_tokens") or ()
    ids = [*content["model"]["vocab"].values(), *(token["id"] for token in added)]
    if max(ids) >= vocab_size:
        raise ConversionError(f"The tokenizer has tokens up to id {max(ids)}, but the model has {vocab_size} tokens.")
    # llama.cpp's converter gives the same names to ids without a token.
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, index in content["model"]["vocab"].items():
        tokens[index], types[index] = token, _NORMAL
    for token in added:
        index = token["id"]
        # Added tokens are often in the vocabulary as well, but not as special ones.
        tokens[index], types[index] = token["content"], _CONTROL if token["special"] else _USER_DEFINED
    by_text: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if by_text.setdefault(token, index) != index:
            raise ConversionError(
                f"The tokenizer's ids {by_text[token]} and {index} are both {token!r}; GGUF has one id for each text."
            )
    return tokens, types
