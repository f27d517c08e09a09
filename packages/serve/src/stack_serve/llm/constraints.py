"""Constrained generation: masks of the tokens that a formal language allows next, computed by llguidance.

llguidance was chosen over xgrammar, whose wheel needs torch and transformers (0.8 GB; llguidance: 8 MB, no dependency).
With the 49,152 tokens of SmolLM2 on one core, llguidance compiles a schema in 0.5 to 5 ms and computes a mask in 13 to
31 us on average. xgrammar takes 5 to 11 ms, or 1.2 s if a string has `maxLength`, and 5 to 33 us for a mask.
"""

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import Constraint
from stack_core.abi.installing import install_command
from stack_core.ops.sampling.sampling import mask_words

__all__ = ["ConstraintCompiler", "Matcher", "is_installed"]

_PACKAGE = "llguidance"
_MOST_CACHED = 256
_NO_TEXT = "no text matches it"
# Unbounded space would let a weak model write spaces until its token limit.
_JSON_SPACE = r"( |\r?\n[ \t]{0,32})?"
# A schema may otherwise set these options in `x-guidance` and obtain text that is not JSON or violates the schema.
_STRICT = {"item_separator": ",", "key_separator": ":", "lenient": False, "coerce_one_of": False}


def is_installed() -> bool:
    """Returns whether the optional package that compiles constraints is installed."""
    return find_spec(_PACKAGE) is not None


@dataclass(slots=True, eq=False)
class Matcher:
    """Position of one continuation in the language of its constraint.

    Attributes:
      state: `llguidance.LLMatcher` after the tokens of the continuation.
    """

    state: Any

    def advance(self, token: int) -> None:
        """Appends a token that the mask allowed."""
        self.state.consume_token(token)

    def allowed(self, tokens: Sequence[int], end_tokens: Collection[int]) -> int:
        """Returns how many of the next tokens continue a text of the language, without end tokens."""
        texts = list(itertools.takewhile(lambda token: token not in end_tokens, tokens))
        return self.state.validate_tokens(texts)

    def copy(self) -> "Matcher":
        """Returns a matcher at the same position."""
        return Matcher(self.state.deep_copy())

    @property
    def error(self) -> str | None:
        """The reason why no further mask can be computed, such as a limit of the parser; otherwise None."""
        return _first_lines(self.state.get_error()) if self.state.is_error() else None


class ConstraintCompiler:
    """Compiles constraints for one tokenizer, keeps the latest of them, and computes masks, on any thread.

    Attributes:
      text_tokens: int32[words], mask of all tokens except the end tokens.

    Args:
      tokenizer: tokenizer of the model.
      vocab_size: number of tokens with logits. Masks exclude tokens that the tokenizer does not have.
      end_tokens: end tokens of the model, which masks allow after a complete text.

    Raises:
      GenerationError: the package llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]) -> None:
        self._library = _library()
        self._words = mask_words(vocab_size)
        tokens = [tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b"" for token in range(vocab_size)]
        # An end token is never text, or else it would end a continuation in the middle of the language.
        special = {token for token, content in enumerate(tokens) if content and not tokenizer.decode([token, token])}
        ends = sorted(end_tokens)
        if not ends:  # llguidance needs one: a token beyond the vocabulary, whose bit is cut off
            tokens.append(b"<end of text>")
            ends = [vocab_size]
        vocabulary = _Vocabulary(tokenizer, tokens, special_token_ids=sorted(special.union(ends)), eos_token_id=ends[0])
        self._vocabulary = vocabulary
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(vocabulary), n_vocab=len(tokens), eos_token=ends
        )
        self._own_words = mask_words(len(tokens))
        self.text_tokens = np.full(self._words, -1, np.int32)
        for token in ends[: None if ends[-1] < 32 * self._words else -1]:
            self.text_tokens.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        self._limits = self._library.LLParserLimits(verbose_errors=False)
        # On CPUs, the threads of an executor compete with the model for the cores: 8 masks take 1.3 ms with it and
        # 0.16 ms without, on two cores.
        self._executor = None if jax.default_backend() == "cpu" else self._library.LLExecutor()
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """Returns the matcher of an empty continuation; compiles a constraint that is not in the cache.

        Raises:
          GenerationError: the constraint cannot be compiled, or no text belongs to its language.
        """
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is not None:
                self._compiled.move_to_end(constraint)
                return Matcher(compiled.deep_copy())
        compiled = self._compile(constraint)  # without the lock, since it may take a second
        with self._lock:
            self._compiled[constraint] = compiled
            while len(self._compiled) > _MOST_CACHED:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy())

    def masks(self, matchers: Sequence[Matcher | None]) -> Int32[np.ndarray, "rows words"]:
        """Computes the mask of each row, in the format of `ops.sampling.sampling.sample`; None allows all tokens."""
        masks = np.full((len(matchers), self._own_words), -1, np.int32)
        rows = [(matcher.state, row) for row, matcher in enumerate(matchers) if matcher is not None]
        if self._executor is not None and len(rows) > 1:
            self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks[0].nbytes, len(masks))
        else:
            for state, row in rows:
                state.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
        return np.ascontiguousarray(masks[:, : self._words])

    def _terminal(self, marker: str | None) -> "_Terminal | None":
        """Returns a marker for a grammar: special tokens are not text, and have to be named by their ids."""
        if marker is None:
            return None
        tokens = self._vocabulary(marker)
        is_special = len(tokens) == 1 and tokens[0] in self._vocabulary.special_token_ids
        return _Terminal(f"<[{tokens[0]}]>" if is_special else _escaped(marker), is_special)

    def _compile(self, constraint: Constraint) -> Any:
        name, grammar = _grammar(self._library, constraint)
        if constraint.reasoning_end is not None:
            # The language alone first: behind the reasoning, an empty one would show only when it is reached.
            self.matcher(replace(constraint, reasoning_end=None, reasoning_begin=None))
            grammar = _after_reasoning(
                grammar, *map(self._terminal, (constraint.reasoning_begin, constraint.reasoning_end))
            )
        compiled = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        first = Matcher(compiled)
        if first.error is None:
            # The first mask finds languages without a text, and those too large for the limits of the parser.
            self.masks([first])
        if first.error is not None:
            raise _uncompilable(name, first.error)
        return compiled


@dataclass(frozen=True)
class _Vocabulary:
    """The attributes that `llguidance.TokenizerWrapper` reads of a tokenizer."""

    tokenizer: Tokenizer
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GenerationError(
            f"Constraints need the package {_PACKAGE}, which is not installed. Install it: "
            f"{install_command('stack-serve[structured]')}",
            parameter="constraint",
        ) from None
    return llguidance


def _grammar(library: Any, constraint: Constraint) -> tuple[str, str]:
    """Returns the name of the constraint's language, and its grammar in llguidance's format."""
    if constraint.json_schema is not None:
        name, make = "json_schema", lambda: _json_grammar(library, constraint)
    elif constraint.regex is not None:
        name, make = "regex", lambda: library.grammar_from("regex", constraint.regex)
    elif constraint.choice is not None:
        name, make = "choice", lambda: library.grammar_from("choice", json.dumps(constraint.choice))
    else:
        name, make = "grammar", lambda: library.grammar_from("grammar", constraint.grammar)
    try:
        return name, make()
    except ValueError as error:
        raise _uncompilable(name, str(error)) from None


def _json_grammar(library: Any, constraint: Constraint) -> str:
    assert constraint.json_schema is not None
    schema = json.loads(constraint.json_schema)
    if schema is False:
        raise ValueError(_NO_TEXT)
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a schema is an object or a boolean, not {json.dumps(schema)[:100]}")
    space = _JSON_SPACE if constraint.whitespace is None else constraint.whitespace
    text = "{}" if schema is True else constraint.json_schema  # llguidance sets options in objects only
    return library.LLMatcher.grammar_from_json_schema(text, overrides={**_STRICT, "whitespace_pattern": space})


@dataclass(frozen=True)
class _Terminal:
    """A marker in a grammar: the id of a special token, or a regular expression."""

    pattern: str
    is_special: bool


def _escaped(text: str) -> str:
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _after_reasoning(grammar: str, begin: _Terminal | None, end: _Terminal | None) -> str:
    """Returns the grammar of texts with reasoning, which is optional with a marker `begin`, before the language."""
    assert end is not None
    grammars = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    grammars[0]["name"] = "answer"
    first = "" if begin is None else begin.pattern
    if begin is not None and not begin.is_special:
        first = f"/{begin.pattern}/"
    # Lazy: the reasoning ends at the first marker. Special tokens are not text, so TEXT cannot contain the marker.
    rest = f"TEXT? {end.pattern}\nTEXT: /(?s:.+)/" if end.is_special else f"rest\nrest[lazy]: /(?s:.*){end.pattern}/"
    reasoning = "reasoning SPACE?" if begin is None else "(SPACE? reasoning SPACE?)?"
    lark = f"start: {reasoning} @answer\nreasoning: {first} {rest}\nSPACE: /[ \\t\\r\\n]{{1,32}}/"
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def _uncompilable(name: str, reason: str) -> GenerationError:
    return GenerationError(
        f"The {name} of the constraint cannot be compiled: {_first_lines(reason)}. Correct or simplify it.",
        parameter="constraint",
    )


def _first_lines(message: str) -> str:
    """Shortens a message of llguidance, which may quote the grammar and its state."""
    lines = " ".join(message.partition("<state>")[0].partition("<non-verbose/>")[0].split())
    # llguidance reports a dead end by this name.
    return _NO_TEXT if lines.startswith("NoExtension") else lines[:500].rstrip(".")
