"""The few shapes that steps are padded to, so that few programs are compiled."""

from dataclasses import dataclass

__all__ = ["Buckets"]

_LEAST_CHUNK_TOKENS = 16
_LEAST_HALVED_TOKENS = 128
_LEAST_SAMPLES = 8


@dataclass(frozen=True)
class Buckets:
    """Numbers of rows and of tokens that steps are compiled for.

    A step in which each row has a token has a power of two of rows. Another one, with parts of prompts, has a power of
    two of tokens, or from 128 on one and a half of it, and one row or `max_rows`, for rows without tokens cost little.
    Logits do not: after it a power of two of rows is sampled.

    Attributes:
      max_tokens: of a step, at least `max_rows`.
    """

    max_rows: int
    max_tokens: int

    def of_decoding(self, rows: int) -> int:
        """The least number of rows that holds a step with a token a row."""
        return 1 << (rows - 1).bit_length()

    def of_prompts(self, rows: int, tokens: int) -> tuple[int, int]:
        """The least rows and tokens that hold a step with more tokens than rows."""
        row_bucket = 1 if rows == 1 else self.of_decoding(self.max_rows)
        whole = 1 << (tokens - 1).bit_length()
        fits_between = tokens <= 3 * whole // 4 and whole > _LEAST_HALVED_TOKENS
        return row_bucket, max(row_bucket, _LEAST_CHUNK_TOKENS, 3 * whole // 4 if fits_between else whole)

    def of_samples(self, rows: int, samples: int) -> int:
        """The least number of sampled rows that holds those after a step with parts of prompts of so many rows."""
        return min(self.of_prompts(rows, rows + 1)[0], max(_LEAST_SAMPLES, self.of_decoding(samples)))

    @property
    def decoding(self) -> list[int]:
        """All that `of_decoding` gives."""
        return sorted({self.of_decoding(rows) for rows in range(1, self.max_rows + 1)})

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """All that `of_prompts` gives."""
        rows_of = range(1, min(self.max_rows, 2) + 1)
        sizes = ((rows, tokens) for rows in rows_of for tokens in range(rows + 1, self.max_tokens + 1))
        return sorted({self.of_prompts(rows, tokens) for rows, tokens in sizes})

    @property
    def samples(self) -> list[tuple[int, int]]:
        """The rows of `of_prompts`, each with all that `of_samples` gives for it."""
        sizes = ((rows, samples) for rows in {1, self.max_rows} for samples in range(1, rows + 1))
        return sorted({(self.of_prompts(rows, rows + 1)[0], self.of_samples(rows, samples)) for rows, samples in sizes})
