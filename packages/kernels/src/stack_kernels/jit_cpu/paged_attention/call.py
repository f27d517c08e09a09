"""Static properties of a kernel of attention to pages, and its index arithmetic in the buffers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stack_kernels.jit_cpu.builder import INDEX, INT32, Builder

__all__ = ["TILE_QUERIES", "PagedAttention", "Sequences", "strides"]

TILE_QUERIES = 16
"""Maximum number of queries per tile, unless a key head alone has more."""


@dataclass(frozen=True)
class PagedAttention:
    """Static properties of a kernel.

    The buffers are query[tokens, heads, head_dim]; the pools of keys and of values in the axes of `layout`; int32 block
    tables[batch, pages], kv_lengths[batch] and query_starts[batch + 1]; and, if `scaled`, pools of a float32 scale for
    each vector of keys and of values. The results are the output, shaped like the query, and the running maximum and
    the sum of the softmax, float32[tokens, heads]; all are 0 for tokens without visible keys.

    Attributes:
      lanes: lanes of its vectors; divides head_dim.
      query: "float32", or "bfloat16" if keys are bf16 and the processor has such a dot product.
      pages: dtype of keys and values, one of `BITS` with at least 8 bits.
      output: dtype of the output, one of `WRITTEN`.
      scaled: True if keys and values have scales.
      layout: axes of the pools.
      heads: number of query heads.
      kv_heads: number of key heads.
      head_dim: size of a key and of a value.
      slots: slots per page.
      scale: factor of the scores.
      softcap: softcap of the scores, or None.
      left: number of earlier keys that a query sees; None for all.
    """

    lanes: int
    query: str
    pages: str
    output: str
    scaled: bool
    layout: str
    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    scale: float
    softcap: float | None
    left: int | None

    @property
    def name(self) -> str:
        # All properties, because a compiled kernel is found by its name.
        return "_".join(["paged_attention", *(str(value) for value in vars(self).values())])

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def tokens(self) -> int:
        """Maximum number of tokens per tile."""
        return max(1, TILE_QUERIES // self.group)


class Sequences:
    """Token and key ranges of each sequence, for the function under construction.

    Indices are always within bounds, whatever the index arrays hold: they are clipped as in
    `stack_core.ops.building.bounded_places`.
    """

    def __init__(self, builder: Builder, arguments: Any, attention: PagedAttention) -> None:
        self.builder, self.attention = builder, attention
        _, (self.tokens, _, _) = builder.buffer(arguments, 0, 3)
        _, pool = builder.buffer(arguments, 1, 4)
        self.last_page = builder.minus(pool[attention.layout.index("p")], 1)
        self.tables, (self.count, self.pages) = builder.buffer(arguments, 3, 2)
        self.lengths, _ = builder.buffer(arguments, 4, 0)
        self.starts, _ = builder.buffer(arguments, 5, 0)

    def page(self, sequence: Any, number: Any) -> Any:
        """Returns the index in the pool of a sequence's page."""
        entry = self.builder.plus(self.builder.times(sequence, self.pages), number)
        return self._integer(self.tables, entry, self.last_page)

    def length(self, sequence: Any) -> Any:
        """Returns the number of keys of a sequence."""
        return self._integer(self.lengths, sequence, self.builder.times(self.pages, self.attention.slots))

    def first_token(self) -> Any:
        """Returns the first token that belongs to a sequence."""
        return self._integer(self.starts, INDEX(0), self.tokens)

    @contextmanager
    def each(self) -> Iterator[tuple[Any, Any, Any]]:
        """Runs the block for each sequence, with its index, its first token and the end of its tokens."""
        builder = self.builder
        start = builder.variable(INDEX, self.first_token())
        with builder.loop(0, self.count) as sequence:
            # Starts that decrease make a sequence empty.
            end = builder.max(start.get(), self._integer(self.starts, builder.plus(sequence, 1), self.tokens))
            yield sequence, start.get(), end
            start.set(end)

    def parts(self, start: Any, end: Any) -> Any:
        """Returns the number of tiles per key head for these tokens."""
        return self.builder.ceil_div(self.builder.minus(end, start), self.attention.tokens)

    def of_part(self, part: Any) -> tuple[Any, Any, Any, Any]:
        """Returns a part's sequence, its index within that sequence, and the start and end of the sequence's tokens."""
        builder = self.builder
        left = builder.variable(INDEX, part)
        found = [builder.variable(INDEX, INDEX(0)) for _ in range(4)]
        with self.each() as (sequence, start, end):
            parts = self.parts(start, end)
            is_inside = builder.build.and_(
                builder.build.icmp_signed(">=", left.get(), INDEX(0)), builder.build.icmp_signed("<", left.get(), parts)
            )
            for variable, value in zip(found, (sequence, left.get(), start, end), strict=True):
                variable.set(builder.build.select(is_inside, value, variable.get()))
            # Negative once the sequence was found, and no later sequence matches.
            left.set(builder.minus(left.get(), parts))
        sequence, own, start, end = (variable.get() for variable in found)
        return sequence, own, start, end

    def _integer(self, values: Any, index: Any, limit: Any) -> Any:
        """Loads `values[index]` of an int32 array and clips it to the range from 0 to `limit`, inclusive."""
        builder = self.builder
        value = builder.build.sext(builder.load(INT32, builder.at(values, builder.times(index, 4))), INDEX)
        return builder.max(builder.min(value, limit), INDEX(0))


def strides(builder: Builder, layout: str, sizes: list[Any]) -> dict[str, Any]:
    """Returns the distance of neighbors along each axis, in vectors of head_dim."""
    found = {}
    stride = INDEX(1)
    # Without the last axis: the unit is a vector of head_dim.
    for axis, size in zip(reversed(layout[:-1]), reversed(sizes[:-1]), strict=True):
        found[axis] = stride
        stride = builder.times(stride, size)
    return found
