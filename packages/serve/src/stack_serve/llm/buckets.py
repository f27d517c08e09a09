"""The few shapes that steps are padded to, so that few programs are compiled."""

from dataclasses import dataclass

__all__ = ["Buckets"]

_LEAST_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class Buckets:
    """Numbers of rows and of tokens that steps are compiled for.

    While all sequences decode, a step has a token a row, and a power of two of rows. A step with parts of prompts has a
    power of two of tokens, and one row or `max_rows`, for rows without tokens cost little.

    Attributes:
      max_tokens: of a step, at least `max_rows`.
    """

    max_rows: int
    max_tokens: int

    def of(self, rows: int, tokens: int) -> tuple[int, int]:
        """The smallest bucket, (rows, tokens), that holds a step."""
        if tokens == rows:
            return self._row_bucket(rows), self._row_bucket(rows)
        row_bucket = 1 if rows == 1 else self._row_bucket(self.max_rows)
        return row_bucket, max(row_bucket, self._chunk_bucket(tokens))

    def all(self) -> list[tuple[int, int]]:
        """All buckets."""
        decoding = {self.of(rows, rows) for rows in range(1, self.max_rows + 1)}
        mixed = {self.of(rows, tokens) for rows in (1, 2) for tokens in range(rows + 1, self.max_tokens + 1)}
        return sorted(decoding | mixed)

    def _row_bucket(self, rows: int) -> int:
        return 1 << (rows - 1).bit_length()

    def _chunk_bucket(self, tokens: int) -> int:
        return max(_LEAST_CHUNK_TOKENS, 1 << (tokens - 1).bit_length())
