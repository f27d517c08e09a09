"""UTF-8 bytes of single tokens, including tokens that are parts of characters."""

import re

import tokenizers

__all__ = ["TokenBytes"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The UTF-8 bytes of each token of a tokenizer; b"" for an unknown id.

    Decoding a token that is part of a character gives U+FFFD. If the vocabulary spells bytes, as byte-level characters
    or as names such as <0xE2>, they are read from the token's spelling instead.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token: each.content for token, each in added.items() if each.special}
        # Probes the decoder: a byte-level one turns the two characters of the bytes C3 A9 into "é".
        self._has_characters = self._decoded("\u00c3\u00a9") == "\u00e9"
        self._has_names = self._decoded("<0x41>") == "A"
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._found(token)
        return self._known[token]

    def _found(self, token: int) -> bytes:
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._special:
            return self._special[token].encode()
        if self._has_characters and all(character in _BYTES for character in written):
            return bytes(_BYTES[character] for character in written)
        if self._has_names and (byte := _BYTE.fullmatch(written)):
            return bytes.fromhex(byte[1])
        # Some decoders drop a leading space, so the token is decoded after another copy of the same token.
        once, twice = (self._tokenizer.decode([token] * count) for count in (1, 2))
        return twice[len(once) :].encode()

    def _decoded(self, written: str) -> str:
        decoder = self._tokenizer.decoder
        return written if decoder is None else decoder.decode([written])


def _byte_characters() -> dict[str, int]:
    """Returns the byte for each character of byte-level vocabularies.

    Printable bytes are written as the character of the same code, other bytes as characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
