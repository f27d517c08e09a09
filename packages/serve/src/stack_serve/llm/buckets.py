"""The few shapes that steps are padded to, so that few programs are compiled."""

from dataclasses import dataclass

__all__ = ["Buckets"]

_LEAST_DECODING = 4
_LEAST_CHUNK_TOKENS = 16
_LEAST_HALVED_TOKENS = 128
_LEAST_SAMPLES = 8


@dataclass(frozen=True)
class Buckets:
    """Numbers of rows and of tokens that steps are compiled for.

    A step in which each row has a token has one row, or a power of two from 4 on. Another one, with parts of prompts,
    has `most_rows`, for rows without tokens cost little, and a power of two of tokens, or from 128 on one and a half of
    it. Logits do cost: after it 8 rows or all are sampled.

    Attributes:
      max_tokens: of a step, at least `max_rows`.
    """

    max_rows: int
    max_tokens: int

    @property
    def most_rows(self) -> int:
        """The rows of the largest steps."""
        return self.of_decoding(self.max_rows)

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest step."""
        return self.of_prompts(self.max_tokens)

    def of_decoding(self, rows: int) -> int:
        """The least number of rows that holds a step with a token a row."""
        return 1 if rows == 1 else max(_LEAST_DECODING, _power_of_two(rows))

    def of_prompts(self, tokens: int) -> int:
        """The least number of tokens that holds a step with parts of prompts."""
        whole = _power_of_two(tokens)
        fits_between = tokens <= 3 * whole // 4 and whole > _LEAST_HALVED_TOKENS
        return max(self.most_rows, _LEAST_CHUNK_TOKENS, 3 * whole // 4 if fits_between else whole)

    def of_samples(self, samples: int) -> int:
        """The least number of sampled rows that holds those after a step with parts of prompts."""
        return min(self.most_rows, _LEAST_SAMPLES if samples <= _LEAST_SAMPLES else self.most_rows)

    @property
    def decoding(self) -> list[int]:
        """All that `of_decoding` gives."""
        return sorted({self.of_decoding(rows) for rows in range(1, self.max_rows + 1)})

    @property
    def prompts(self) -> list[int]:
        """All that `of_prompts` gives."""
        return sorted({self.of_prompts(tokens) for tokens in range(2, self.max_tokens + 1)})

    @property
    def samples(self) -> list[int]:
        """All that `of_samples` gives."""
        return sorted({self.of_samples(samples) for samples in range(1, self.max_rows + 1)})


def _power_of_two(count: int) -> int:
    """The least one that is not below."""
    return 1 << (count - 1).bit_length()
