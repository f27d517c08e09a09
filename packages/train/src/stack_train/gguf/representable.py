"""Checks that GGUF and llama.cpp can represent a byte-level `tokenizer.json`."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from stack_core.abi.errors import ConversionError
from stack_train.data.tokenizer import HuggingFaceTokenizer

__all__ = [
    "TEXTS",
    "added_tokens_at_ends",
    "check_ids",
    "check_model",
    "check_parts",
    "composes_characters",
    "token_changed_by_merges",
]

TEXTS = (
    "",
    " ",
    "a",
    " Hello, world! It's 9:05 PM; they'll've DONE it, WON'T they?",
    "  two  spaces\tand\ttabs \n\n\n lines\r\n   and spaces at the end   ",
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 0x1F a1b2c3",
    "def f(x):\n    return {x: [y**2 for y in range(10)]}  # a comment\n\n\nclass CamelCase:\n\tpass\n",
    "https://example.com/a/b?c=d&e=f#g user@example.com C:\\path ~/file_name-1.tar.gz",
    "!!!??? ...---=== <<>> (){}[] `code` \"quoted\" 'single' \u201ccurly\u201d \u2018quotes\u2019 \u2026",
    "na\u00efve caf\u00e9 \u00c4\u00d6\u00dc \u00df \u00f1 \u0152uvre \u0130stanbul \u1ec7 \ufb01",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac "
    "\u03c3\u03bf\u03c5 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0661\u0662\u0663\u0664",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01 \u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e "
    "\u3053\u3093\u306b\u3061\u306f \u30c6\u30b9\u30c8 \uc548\ub155\ud558\uc138\uc694 12\u5e74",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2 \u1019\u103c\u1014\u103a\u1019\u102c",
    "\U0001f680 \U0001f636\u200d\U0001f32b\ufe0f \u2705\U0001f999\U0001f999 \U0001f1eb\U0001f1f7 \u00bd "
    "\u00b2 \u2167 \u2460 \u20ac5 \u00a31 \u221e \u2200x",
    "\u00a0no-break\u2003space\u3000wide\u200bzero\ufeff\u0000\u0007\u001b[0m\u2028line",
    "cafe\u0301 A\u030a \u1100\u1161\u11a8",  # decomposed
)
"""Test texts with spaces, numbers, scripts and symbols that pre-tokenizers treat differently."""


def check_model(model: Mapping[str, Any]) -> None:
    """Raises a ConversionError if a tokenizer's model is not a plain byte-level BPE."""
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        fallback = " with bytes as a fallback" if model.get("byte_fallback") else ""
        raise ConversionError(f"The tokenizer is a {model.get('type')}{fallback}; byte-level BPE is written to GGUF.")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise ConversionError(f"The tokenizer's BPE has {field}={model[field]!r}, which GGUF has no place for.")
    missing = [letter for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet() if letter not in model["vocab"]]
    if missing and model.get("unk_token") is not None:  # without an unknown token, both skip these bytes
        raise ConversionError(
            f"The tokenizer has no token for {len(missing)} of the 256 bytes, {min(missing)!r} among them, and writes "
            f"{model['unk_token']!r} for them; llama.cpp leaves them out."
        )


def composes_characters(normalizer: Mapping[str, Any] | None) -> bool:
    """Returns whether a tokenizer composes characters (NFC), and raises a ConversionError if it does anything else."""
    parts: Sequence[Mapping[str, Any]] = [] if normalizer is None else [normalizer]
    while any(part.get("type") == "Sequence" for part in parts):
        parts = [each for part in parts for each in (part["normalizers"] if part["type"] == "Sequence" else [part])]
    kinds = [str(part.get("type")) for part in parts]
    if others := [kind for kind in kinds if kind != "NFC"]:
        raise ConversionError(
            f"The tokenizer's normalizer {', '.join(others)} has no place in GGUF: llama.cpp encodes texts of "
            "byte-level tokenizers as they are."
        )
    return bool(kinds)


def check_parts(content: Mapping[str, Any], *, composes: bool) -> None:
    """Raises a ConversionError if GGUF cannot represent the added tokens or the decoder of a tokenizer."""
    for token in content.get("added_tokens") or ():
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if flags:
            raise ConversionError(
                f"The tokenizer's added token {token['content']!r} has {' and '.join(flags)}, which GGUF has no place "
                "for: llama.cpp leaves the text around it as it is."
            )
        if composes and unicodedata.normalize("NFC", token["content"]) != token["content"]:
            raise ConversionError(f"The tokenizer's added token {token['content']!r} is not composed (NFC).")
    decoder = (content.get("decoder") or {}).get("type")
    if decoder != "ByteLevel":
        raise ConversionError(f"The tokenizer decodes by {decoder}; GGUF has byte-level tokenizers, of ByteLevel.")


def token_changed_by_merges(content: Mapping[str, Any]) -> str | None:
    """Returns a token that merges cannot build, or None. Without such a token, `ignore_merges` does nothing."""
    plain = {**content, "model": {**content["model"], "ignore_merges": False}}
    model = tokenizers.Tokenizer.from_str(json.dumps(plain)).model
    added = {token["content"] for token in content.get("added_tokens") or ()}
    tokens = (token for token in content["model"]["vocab"] if token not in added)
    return next((token for token in tokens if [piece.value for piece in model.tokenize(token)] != [token]), None)


def added_tokens_at_ends(tokenizer: HuggingFaceTokenizer) -> tuple[int | None, int | None]:
    """Returns the ids of the tokens that a tokenizer adds before and after a text, with None for an absent token.

    Raises:
      ConversionError: an added token is not the beginning-of-text or end-of-text token.
    """
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode_for_encoder("a")
    places = [place for place in range(len(full)) if full[place : place + len(plain)] == plain]
    first, last = full[: places[0]], full[places[0] + len(plain) :]
    for ids, own, name in ((first, tokenizer.bos_id, "before"), (last, tokenizer.eos_id, "behind")):
        if ids and (len(ids) > 1 or own not in (None, ids[0])):
            raise ConversionError(
                f"The tokenizer adds {[tokenizer.token_bytes(token).decode() for token in ids]} {name} each text; GGUF "
                "has a place for the beginning-of-text token before it and the end-of-text token behind it."
            )
    return (first[0] if first else None), (last[0] if last else None)


def check_ids(tokenizer: HuggingFaceTokenizer, again: HuggingFaceTokenizer) -> None:
    """Checks that a tokenizer and its copy in a GGUF file encode a fixed set of texts to the same ids.

    Raises:
      ConversionError: the ids of a text differ; quotes the text.
    """
    names = [*tokenizer.special_tokens.values()][:4]
    # Special tokens between and inside words, where two implementations may cut differently.
    texts = [*TEXTS, *(text for name in names for text in (f"a {name} b", f"{name}{name}c", f"d{name}\n {name}"))]
    documents = zip(tokenizer.encode_batch(texts), again.encode_batch(texts), strict=True)
    for text, (document, other) in zip(texts, documents, strict=True):
        pairs = [
            (tokenizer.encode_for_encoder(text), again.encode_for_encoder(text)),
            (tokenizer.encode(text, add_special_tokens=False), again.encode(text, add_special_tokens=False)),
            (document.tolist(), other.tolist()),
        ]
        for ours, theirs in pairs:
            if ours != theirs:
                raise ConversionError(
                    f"The tokenizer encodes {text!r} as {ours[:20]}, but as {theirs[:20]} from GGUF. It is not written."
                )
