"""Shape buckets to which steps are padded to limit the number of compiled programs."""

from dataclasses import dataclass

__all__ = ["Buckets"]

# Every bucket is one more program to compile at startup, so small steps share one.
_LEAST_DECODING = 4
_LEAST_CHUNK_TOKENS = 16
# Without buckets between powers of two, a step of 137 tokens would compute 256.
_LEAST_HALVED_TOKENS = 128
_LEAST_SAMPLES = 8
# On CPUs, a step of 8 tokens takes little longer than a step of 2, and a step of 32 much longer than a step of 8.
_LEAST_VERIFIED_TOKENS = 8


@dataclass(frozen=True)
class Buckets:
    """Row and token counts for which steps are compiled.

    A decoding step, with one token per row, has `min_rows` rows or a power of two >= 4. A step with prompt chunks has
    `largest_rows` rows, since empty rows are cheap, and 2**k tokens, or 1.5 * 2**k if 2**k >= 128. Logits are
    expensive, so either 8 rows or all rows are sampled after such a step. A step that verifies drafts has
    `largest_rows` rows and 8 * 4**k tokens.

    Attributes:
      max_rows: maximum number of rows per step.
      max_tokens: maximum number of tokens per step, at least `max_rows`.
      max_drafts: maximum number of drafted tokens per row; 0 without speculation.
      min_rows: minimum number of rows of a decoding step.
    """

    max_rows: int
    max_tokens: int
    max_drafts: int = 0
    min_rows: int = 1

    @property
    def largest_rows(self) -> int:
        """Number of rows of the largest step."""
        return self.of_decoding(self.max_rows)

    @property
    def largest_tokens(self) -> int:
        """Number of tokens of the largest step."""
        return self.of_prompts(self.max_tokens)

    def of_decoding(self, rows: int) -> int:
        """Returns the smallest row bucket for a decoding step."""
        return 1 if rows == self.min_rows == 1 else max(_LEAST_DECODING, self.min_rows, _power_of_two(rows))

    def of_prompts(self, tokens: int) -> int:
        """Returns the smallest token bucket for a step with prompt chunks."""
        whole = _power_of_two(tokens)
        fits_between = tokens <= 3 * whole // 4 and whole > _LEAST_HALVED_TOKENS
        return max(self.largest_rows, _LEAST_CHUNK_TOKENS, 3 * whole // 4 if fits_between else whole)

    def of_samples(self, samples: int) -> int:
        """Returns the smallest bucket of sampled rows for a step with prompt chunks."""
        return min(self.largest_rows, _LEAST_SAMPLES if samples <= _LEAST_SAMPLES else self.largest_rows)

    def of_verification(self, tokens: int) -> int:
        """Returns the smallest token bucket for a step that verifies drafts."""
        return next(size for size in self.verification if size >= tokens)

    @property
    def decoding(self) -> list[int]:
        """All values of `of_decoding`, ascending."""
        return sorted({self.of_decoding(rows) for rows in range(1, self.max_rows + 1)})

    @property
    def prompts(self) -> list[int]:
        """All values of `of_prompts`, ascending."""
        return sorted({self.of_prompts(tokens) for tokens in range(2, self.max_tokens + 1)})

    @property
    def samples(self) -> list[int]:
        """All values of `of_samples`, ascending."""
        return sorted({self.of_samples(samples) for samples in range(1, self.max_rows + 1)})

    @property
    def verification(self) -> list[int]:
        """All values of `of_verification`, ascending."""
        if not self.max_drafts:
            return []
        largest = _power_of_two(min(self.max_rows * (1 + self.max_drafts), self.max_tokens))
        sizes = [_LEAST_VERIFIED_TOKENS]
        while sizes[-1] < largest:
            sizes.append(min(4 * sizes[-1], largest))
        return sizes


def _power_of_two(count: int) -> int:
    """Returns the smallest power of two >= count."""
    return 1 << (count - 1).bit_length()
