"""Pre-tokenizers of llama.cpp for byte-level BPE, which divide a text into pieces before merges.

Source: the table in llama.cpp's `llama-vocab.cpp`. Its regular-expression engine requires approximations of some
published patterns; this table has the published patterns.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.errors import ConversionError

__all__ = ["CUTS", "NOT_BYTE_LEVEL", "Cut", "candidates_of", "patterns_of", "pre_tokenizer_of"]


@dataclass(frozen=True)
class Cut:
    """A pre-tokenizer.

    Attributes:
      patterns: regular expressions; each in turn splits all pieces into matches and the text between matches.
      ignores_merges: True if a piece in the vocabulary becomes that token without merges.
      adds_bos: default of `add_bos_token` for files without this key.
      composes: True if published tokenizers with this pre-tokenizer compose characters first (NFC). llama.cpp does not.
      is_exact: True if llama.cpp produces the same pieces. Inexact pre-tokenizers are read, but not written.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    composes: bool = False
    is_exact: bool = True


_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS, _THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"


def _after_llama_3(numbers: str) -> str:
    return f"{_SUFFIXES}|{_WORDS}|{numbers}{_SYMBOLS}{_SPACES}"


_LLAMA_3, _QWEN_2 = _after_llama_3(r"\p{N}{1,3}"), _after_llama_3(r"\p{N}")


def _cased(suffixes: str, *, without: str = "") -> str:
    """Returns GPT-4o's pattern of words, which splits "camelCase" into two pieces."""
    first = r"[^\r\n\p{L}\p{N}]?"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    return f"{first}{upper}*{lower}+{suffixes}|{first}{upper}+{lower}*{suffixes}"


_GPT_4O = _cased(f"{_SUFFIXES}?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_KIMI = (
    r"[\p{Han}]+|"
    + _cased(f"{_SUFFIXES}?", without=r"&&[^\p{Han}]")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    + _SPACES
)
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_IDEOGRAPHS = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    _IDEOGRAPHS,
    rf"{_ASCII_SYMBOL}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}",
)
_CASED_LETTERS = (  # in the Unicode version of DeepSeek's first tokenizers
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _IDEOGRAPHS
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATION = r"[\p{P}!-/:-@\[-`{-~]"

_SMOLLM = Cut((_DIGIT, _GPT_2))
_ROWS: Sequence[tuple[str, Cut]] = (
    # Exports use the first name whose patterns and flags match the tokenizer.
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum exaone4 jina-v1-en jina-v2-code "
        "roberta-bpe jais trillion granite-docling",
        Cut((_GPT_2,)),
    ),
    ("olmo mpt modern-bert", Cut((_GPT_2,), composes=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", _SMOLLM),
    ("command-r", Cut(_SMOLLM.patterns, composes=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Cut((_LLAMA_3,), ignores_merges=True, adds_bos=True),
    ),
    ("smaug-bpe dbrx glm4 chatglm-bpe", Cut((_LLAMA_3,))),
    ("qwen2 kormo f2llmv2", Cut((_QWEN_2,), composes=True)),
    ("hunyuan deepseek-r1-qwen megrez stablelm2 solar-open grok-2", Cut((_QWEN_2,))),
    (
        "qwen35",
        Cut(
            (
                rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",
            ),
            composes=True,
        ),
    ),
    ("minicpm5", Cut((r"\p{N}{1,3}", _after_llama_3(_DIGITS)), ignores_merges=True)),
    (
        "tekken",
        Cut(
            (_cased("") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,),
            ignores_merges=True,
            adds_bos=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Cut((_GPT_4O,))),
    (
        "granite-embed-multi-97m",
        Cut((_GPT_4O,), ignores_merges=True),
    ),
    # llama.cpp ends a number before an ideograph; for the published pattern, an ideograph is a letter.
    ("tiny_aya cohere2moe", Cut((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O), is_exact=False)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Cut(_DEEPSEEK_3)),
    (
        "spark2_5",
        Cut((*_DEEPSEEK_3[:2], _DEEPSEEK_3[2].replace(r"+[\r\n]*|\s*[\r\n]+|", r"+|[\r\n]|"), _DIGIT)),
    ),
    (
        "deepseek-llm",
        Cut(
            (
                "[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _CJK,
                _DIGITS,
            )
        ),
    ),
    ("deepseek-coder", Cut(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT))),
    (
        "youtu",
        Cut(
            (_YOUTU, _cased(f"{_SUFFIXES}?") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES),
            ignores_merges=True,
        ),
    ),
    ("falcon", Cut((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, _THREE_DIGITS))),
    ("default", Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, _DIGITS, _THREE_DIGITS))),
    (
        "jais-2",
        Cut(
            (
                f"{_SUFFIXES}|{_WORDS}|\\p{{N}}{{1,3}}{_SYMBOLS}|\\s*[\\r\\n]+"
                + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
                + r"|\s{1}",
            )
        ),
    ),
    ("bloom gpt3-finnish poro-chat", Cut((_BLOOM,))),
    ("viking", Cut((_BLOOM, _DIGIT))),
    (
        "chameleon",
        Cut(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                "([\t\n]|    |  )",
                _DIGIT,
                _PUNCTUATION,
                _GPT_2,
            ),
            adds_bos=True,
        ),
    ),
    ("kimi-k2", Cut((_KIMI,))),
    ("superbpe", Cut((_DIGITS, r"(?=(\d{3})+(?!\d))"), is_exact=False)),  # llama.cpp matches only ASCII digits
    (
        "bailingmoe bailingmoe2 llada-moe",
        Cut(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                r"|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "seed-coder",
        Cut((rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}",)),
    ),
    ("ufakzeka", Cut((f"{_WORDS}|\\p{{N}}{_SYMBOLS}{_SPACES}",))),
    (
        "afmoe",
        Cut((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN_SCRIPTS, _DEEPSEEK_3[2])),
    ),
    ("laguna", Cut((r"[^\n]+|[\n]+", _QWEN_2))),
    (
        "exaone-moe",
        Cut(
            (
                rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
)
CUTS: Mapping[str, Cut] = {name: cut for names, cut in _ROWS for name in names.split()}
"""Pre-tokenizers by GGUF name (`tokenizer.ggml.pre`)."""

NOT_BYTE_LEVEL = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
"""GGUF names of pre-tokenizers for BPE tokenizers that are not byte-level."""


def pre_tokenizer_of(cut: Cut) -> dict[str, Any]:
    """Returns the `pre_tokenizer` of a `tokenizer.json`."""
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cut.patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}


def candidates_of(patterns: tuple[str, ...], *, composes: bool) -> dict[str, Cut]:
    """Returns the pre-tokenizers with these patterns by GGUF name.

    Raises:
      ConversionError: GGUF lacks a pre-tokenizer with these patterns and this composition of characters.
    """
    found = {name: cut for name, cut in CUTS.items() if cut.patterns == patterns}
    if not found:
        raise ConversionError(
            f"The tokenizer cuts text by {json.dumps(patterns, ensure_ascii=False)[:300]}, which GGUF has no name "
            f"for. It has names for the cuts of: {', '.join(CUTS)}."
        )
    if inexact := [name for name, cut in found.items() if not cut.is_exact]:
        raise ConversionError(f"llama.cpp cuts some texts differently by {inexact[0]}, which is read only.")
    matching = {name: cut for name, cut in found.items() if cut.composes == composes}
    if not matching:
        raise ConversionError(
            f"The tokenizer {'composes' if composes else 'does not compose'} characters (NFC); tokenizers with its "
            f"cut in GGUF do the opposite: {', '.join(found)}."
        )
    return matching


def patterns_of(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns the regular expressions of the pre-tokenizer in a `tokenizer.json`.

    Raises:
      ConversionError: GGUF cannot represent a part of the pre-tokenizer; names the part.
    """
    parts = list(_parts(pre_tokenizer))
    if not parts or parts[-1].get("type") != "ByteLevel" or any(part["type"] == "ByteLevel" for part in parts[:-1]):
        kinds = ", ".join(str(part.get("type")) for part in parts) or "nothing"
        raise ConversionError(
            f"The tokenizer cuts text by {kinds}. GGUF has byte-level tokenizers, whose last part alone is ByteLevel."
        )
    # True is the default of the tokenizers library for both flags.
    if parts[-1].get("add_prefix_space", True):
        raise ConversionError(
            "The tokenizer puts a space before each text (ByteLevel's add_prefix_space), which llama.cpp does not do "
            "for byte-level tokenizers."
        )
    # With `use_regex`, ByteLevel itself applies GPT-2's pattern.
    last = (_GPT_2,) if parts[-1].get("use_regex", True) else ()
    return (*map(_pattern_of, parts[:-1]), *last)


def _parts(pre_tokenizer: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if pre_tokenizer is not None and pre_tokenizer.get("type") == "Sequence":
        for each in pre_tokenizer["pretokenizers"]:
            yield from _parts(each)
    elif pre_tokenizer is not None:
        yield pre_tokenizer


def _pattern_of(part: Mapping[str, Any]) -> str:
    kind, behavior = part.get("type"), part.get("behavior", "Isolated")
    if kind == "Digits":
        return _DIGIT if part.get("individual_digits") else _DIGITS
    if kind == "Punctuation" and behavior in ("Isolated", "Contiguous"):
        return _PUNCTUATION + ("+" if behavior == "Contiguous" else "")
    if kind == "Split":
        given = part["pattern"]
        pattern = given["Regex"] if "Regex" in given else re.escape(given["String"])
        if behavior == "Isolated" and not part.get("invert"):
            return pattern
        if behavior == "Removed" and part.get("invert") and pattern.endswith(r"|\s+"):
            return pattern  # the matches cover the complete text, so nothing is removed
    raise ConversionError(
        f"The tokenizer's pre-tokenizer {json.dumps(part, ensure_ascii=False)[:200]} has no place in GGUF."
    )
