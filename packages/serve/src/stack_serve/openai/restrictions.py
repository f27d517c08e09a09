"""Restrictions of the tokens or texts of an answer: vLLM's fields `allowed_token_ids` and `bad_words`."""

from collections.abc import Callable, Iterator, Sequence

from stack_core.abi.generation import Constraint
from stack_serve.openai.errors import bad_request
from stack_serve.openai.schemas import GenerationBody

__all__ = ["restriction_and_field"]

_MAX_WORDS, _MAX_CHARACTERS = 64, 128


def restriction_and_field(
    body: GenerationBody, check_tokens: Callable[[Sequence[int], str], Sequence[int]]
) -> tuple[Constraint | None, str | None]:
    """Returns the grammar of the answers that a request allows and the field that describes it, or (None, None).

    Args:
      check_tokens: raises an ApiError that names the field if a token is not in the vocabulary.

    Raises:
      ApiError: a field is empty or too long, or both are given.
    """
    tokens, words = body.allowed_token_ids, body.bad_words
    if tokens is not None and words:
        raise bad_request("allowed_token_ids and bad_words both restrict the answer; give one.", param="bad_words")
    if tokens is not None:
        if not tokens:
            raise bad_request("allowed_token_ids is empty; no token could follow.", param="allowed_token_ids")
        check_tokens(tokens, "allowed_token_ids")
        ranges = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in _ranges(tokens))
        return Constraint(grammar=f"start: (<[{ranges}]>)*"), "allowed_token_ids"
    if not words:
        return None, None
    if len(words) > _MAX_WORDS or any(not 1 <= len(word) <= _MAX_CHARACTERS for word in words):
        raise bad_request(
            f"bad_words takes up to {_MAX_WORDS} texts of 1 to {_MAX_CHARACTERS} characters each.", param="bad_words"
        )
    pattern = "|".join(map(_escaped, words))
    # llguidance intersects and negates regular expressions, so the words are excluded however they are tokenized.
    return Constraint(grammar=f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({pattern})(?s:.*)/"), "bad_words"


def _ranges(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last token of each run of consecutive tokens."""
    first = last = -2
    for token in sorted(set(tokens)):
        if token != last + 1:
            if first >= 0:
                yield first, last
            first = token
        last = token
    yield first, last


def _escaped(word: str) -> str:
    """Escapes a text for a regular expression between slashes."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in word)
