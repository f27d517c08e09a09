"""What a kernel of attention to pages is written for, and how it finds its way in the buffers."""

from dataclasses import dataclass
from typing import Any

from stack_kernels.llvm.code import INDEX, INT32, Code

__all__ = ["TILE_QUERIES", "PagedAttention", "Sequences", "strides"]

TILE_QUERIES = 16
"""The most queries of a tile, where a key head has no more."""


@dataclass(frozen=True)
class PagedAttention:
    """What a kernel is written for.

    The buffers are query[tokens, heads, head_dim]; the pools of keys and of values in the axes of `layout`; int32 block
    tables[batch, pages], kv_lengths[batch] and query_starts[batch + 1]; and, if `scaled`, pools of a float32 scale for
    each vector of keys and of values. Results are the output, shaped like the query, and the running maximum and the
    sum of the softmax, float32[tokens, heads]; of what has nothing to attend to all are 0.

    Attributes:
      lanes: the numbers of its vectors, which head_dim is a multiple of.
      query: "float32", or "bfloat16" where keys are and the processor has such a dot product.
      pages: the dtype of keys and values, one of `BITS` of at least 8.
      output: the dtype of the output, one of `WRITTEN`.
      left: how far back a query sees; None for all the way.
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
        return "_".join(["paged_attention", *(str(value) for value in vars(self).values())])

    @property
    def group(self) -> int:
        """The query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def tokens(self) -> int:
        """The most tokens of a tile."""
        return max(1, TILE_QUERIES // self.group)


class Sequences:
    """Where the tokens of each sequence are, in whatever function is being written."""

    def __init__(self, code: Code, arguments: Any, attention: PagedAttention) -> None:
        self.code, self.attention = code, attention
        self.tables, (self.count, self.pages) = code.buffer(arguments, 3, 2)
        self.lengths, _ = code.buffer(arguments, 4, 0)
        self.starts, _ = code.buffer(arguments, 5, 0)

    def integer(self, values: Any, index: Any) -> Any:
        code = self.code
        return code.build.sext(code.load(INT32, code.at(values, code.times(index, 4))), INDEX)

    def start(self, sequence: Any) -> Any:
        return self.integer(self.starts, sequence)

    def parts(self, sequence: Any) -> Any:
        """How many tiles its tokens take for each key head."""
        code, tokens = self.code, self.attention.tokens
        newest = code.minus(self.start(code.plus(sequence, 1)), self.start(sequence))
        return code.quotient_up(newest, tokens)

    def of_part(self, part: Any) -> tuple[Any, Any]:
        """The sequence that a part belongs to, and which of its parts it is."""
        code = self.code
        left, own, found = (code.variable(INDEX, value) for value in (part, INDEX(0), INDEX(0)))
        with code.loop(0, self.count) as sequence:
            parts = self.parts(sequence)
            is_inside = code.build.and_(
                code.build.icmp_signed(">=", left.get(), INDEX(0)), code.build.icmp_signed("<", left.get(), parts)
            )
            found.set(code.build.select(is_inside, sequence, found.get()))
            own.set(code.build.select(is_inside, left.get(), own.get()))
            left.set(code.minus(left.get(), parts))
        return found.get(), own.get()


def strides(code: Code, layout: str, sizes: list[Any]) -> dict[str, Any]:
    """How many vectors of head_dim apart neighbours along each axis lie."""
    found = {}
    stride = INDEX(1)
    for axis, size in zip(reversed(layout[:-1]), reversed(sizes[:-1]), strict=True):
        found[axis] = stride
        stride = code.times(stride, size)
    return found
