"""Attention of a prompt's tokens to pages, in LLVM IR.

All queries of a tile, up to 16, are processed together, with 128 keys at a time:

    S^T = K Q^T             a lane is a query
    P^T = exp(S^T - m)      m is the running maximum of each lane
    O  += P V               previous sums shrink as m grows

Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691).
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from llvmlite import ir

from stack_kernels.jit_cpu import vectors
from stack_kernels.jit_cpu.builder import BYTE, FLOAT, INDEX, INT32, POINTER, Builder, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.numbers import BITS, write
from stack_kernels.jit_cpu.paged_attention.call import TILE_QUERIES, PagedAttention, Sequences, strides

__all__ = ["BLOCK_KEYS", "LINE", "SQUARE", "PromptTile"]

BLOCK_KEYS = 128
LINE = 4 * TILE_QUERIES
"""Bytes of one number per query, or of a vector of one query's output."""
SQUARE = TILE_QUERIES * LINE


class PromptTile(ABC):
    """Builder of `prompt_tile`: some tokens of one sequence, with one key head and its queries.

    Attributes:
      scores: S^T of a block, 128 lines.
      output: O, in blocks of 16 entries of every query.
      decay: a line with the factors by which O shrinks.
    """

    dtype: ClassVar[str]
    """Dtype of queries and pages."""

    @classmethod
    def supports(cls, attention: PagedAttention, processor: Processor) -> bool:
        """Checks that vectors hold all queries of a tile and that a page holds multiples of 16 keys."""
        rows = attention.tokens * attention.group
        is_right = attention.query == attention.pages == cls.dtype and not attention.scaled
        fits = rows <= TILE_QUERIES == processor.lanes and attention.slots % TILE_QUERIES == 0
        return is_right and fits and attention.head_dim % TILE_QUERIES == 0

    def __init__(self, module: ir.Module, attention: PagedAttention) -> None:
        self.builder = builder = Builder(module, "prompt_tile", [POINTER, POINTER, *[INDEX] * 5, POINTER])
        # LLVM may inline it, and drops the symbol.
        builder.function.linkage = "internal"
        self.attention = attention
        arguments, results, self.sequence, self.head, self.first, self.last, self.shift, _ = builder.parameters
        self.sequences = Sequences(builder, arguments, attention)
        self.query, _ = builder.buffer(arguments, 0, 0)
        self.pools = [builder.buffer(arguments, number, 4)[0] for number in (1, 2)]
        _, sizes = builder.buffer(arguments, 1, 4)
        self.strides = strides(builder, attention.layout, sizes)
        self.results = [builder.buffer(results, number, 0)[0] for number in range(3)]
        # Negative if a sequence has more tokens than keys; -1 leaves no block.
        self.final = builder.max(builder.plus(self.last, self.shift), INDEX(-1))
        self.row_bytes = attention.head_dim * BITS[self.dtype] // 8
        self.slot_bytes = builder.times(self.strides["s"], self.row_bytes)
        self.parts = attention.head_dim // TILE_QUERIES
        self.scores = builder.scratch(BYTE, BLOCK_KEYS * LINE)
        self.output = builder.scratch(BYTE, self.parts * SQUARE)
        self.decay = builder.scratch(BYTE, LINE)

    @abstractmethod
    def open(self) -> None:
        """Stores the queries in the form that `score` needs."""

    @abstractmethod
    def score(self, sixteen: Any, key: Any) -> None:
        """Writes lines of S^T from 16 * `sixteen` on, for 16 keys from `key` on; missing keys get arbitrary values."""

    @abstractmethod
    def add_values(self, start: Any, keys: Any, level: Any) -> None:
        """Shrinks O and adds P V of a block with `keys` keys, a multiple of 16, of which some may be missing."""

    @abstractmethod
    def close(self) -> None:
        """Brings O to the form of `output` and restores all other state."""

    def write(self) -> Any:
        builder, attention = self.builder, self.attention
        self.open()
        self.positions = self._positions()
        zero = vectors.constant(0, TILE_QUERIES)
        self.maximum = builder.variable(zero.type, vectors.constant(float("-inf"), TILE_QUERIES))
        self.total = builder.variable(zero.type, zero)
        builder.clear(self.output, INDEX(self.parts * SQUARE))
        oldest = INDEX(0)
        if attention.left is not None:
            oldest = builder.max(builder.minus(builder.plus(self.first, self.shift), attention.left), oldest)
        # A multiple of 16, as are the slots of a page: 16 keys that are read together are in one page.
        start = builder.times(builder.over(oldest, TILE_QUERIES), TILE_QUERIES)
        # ceil((final + 1 - start) / BLOCK_KEYS)
        blocks = builder.over(builder.plus(builder.minus(self.final, start), BLOCK_KEYS), BLOCK_KEYS)
        with builder.loop(0, blocks) as block:
            self._visit(builder.plus(start, builder.times(block, BLOCK_KEYS)))
        self.close()
        self._finish()
        builder.close()
        return builder.function

    def query_row(self, row: int) -> tuple[Any, Any]:
        """Returns the address of a query, or of the first if it is missing, and whether it exists."""
        builder, group = self.builder, self.attention.group
        token = builder.plus(self.first, row // group)
        exists = builder.build.icmp_signed("<=", token, self.last)
        head = builder.plus(builder.times(self.head, group), row % group)
        number = builder.plus(
            builder.times(builder.build.select(exists, token, self.first), self.attention.heads), head
        )
        return builder.at(self.query, builder.times(number, self.row_bytes)), exists

    def slot(self, pool: Any, key: Any) -> Any:
        """Returns the pointer to a key or a value, by its index in the sequence."""
        builder, attention = self.builder, self.attention
        page = builder.over(key, attention.slots)
        number = self.sequences.page(self.sequence, page)
        slot = builder.minus(key, builder.times(page, attention.slots))
        terms = (number, "p"), (self.head, "h"), (slot, "s")
        row = INDEX(0)
        for index, axis in terms:
            row = builder.plus(row, builder.times(index, self.strides[axis]))
        return builder.at(pool, builder.times(row, self.row_bytes))

    def weight(self, score: Any, level: Any) -> Any:
        """Computes P for a line of S^T and adds it to the totals."""
        build, nothing = self.builder.build, vectors.constant(float("-inf"), TILE_QUERIES)
        weight = vectors.exp(self.builder, build.fsub(score, level))
        # `exp` never returns 0: its input ends at -87.3.
        weight = build.select(build.fcmp_ordered("==", score, nothing), vectors.constant(0, TILE_QUERIES), weight)
        self.total.set(build.fadd(self.total.get(), weight))
        return weight

    def _positions(self) -> Any:
        """Returns each query's key position; -1 for missing queries."""
        builder, group = self.builder, self.attention.group
        tokens = ir.Constant(vector(INT32, TILE_QUERIES), [row // group for row in range(TILE_QUERIES)])
        numbers = builder.build.add(tokens, self._splat(self.first))
        positions = builder.build.add(numbers, self._splat(self.shift))
        exists = builder.build.icmp_signed("<=", numbers, self._splat(self.last))
        return builder.build.select(exists, positions, ir.Constant(positions.type, [-1] * TILE_QUERIES))

    def _splat(self, value: Any) -> Any:
        return self.builder.splat(self.builder.build.trunc(value, INT32), TILE_QUERIES)

    def _visit(self, start: Any) -> None:
        """Processes the keys of a block, which begins at a multiple of 16."""
        builder = self.builder
        left = builder.min(builder.plus(builder.minus(self.final, start), 1), INDEX(BLOCK_KEYS))
        sixteens = builder.ceil_div(left, TILE_QUERIES)
        with builder.loop(0, sixteens) as sixteen:
            self.score(sixteen, builder.plus(start, builder.times(sixteen, TILE_QUERIES)))
        keys = builder.times(sixteens, TILE_QUERIES)
        self.add_values(start, keys, self._raise_maximum(start, keys))

    def _raise_maximum(self, start: Any, keys: Any) -> Any:
        """Scales and masks the scores and updates the maximum; returns the value to subtract from the scores.

        Stores the decay of previous sums and applies it to the totals.
        """
        builder, build = self.builder, self.builder.build
        kind, nothing = vector(FLOAT, TILE_QUERIES), vectors.constant(float("-inf"), TILE_QUERIES)
        before = self.maximum.get()
        highest = builder.variable(kind, before)
        highest.set(before)
        with builder.loop(0, keys) as number:
            place = builder.at(self.scores, builder.times(number, LINE))
            score = self._scaled(builder.load(kind, place))
            score = build.select(self._seen(builder.plus(start, number)), score, nothing)
            builder.store(score, place)
            # The maximum ignores NaN, but the weight of such a score is NaN.
            highest.set(build.select(build.fcmp_ordered(">", score, highest.get()), score, highest.get()))
        after = highest.get()
        self.maximum.set(after)
        # 0 while a query has seen no key: -inf - -inf would be NaN.
        level = build.select(build.fcmp_ordered(">", after, nothing), after, vectors.constant(0, TILE_QUERIES))
        # Before the first key the sums are zero and the decay is irrelevant.
        decay = vectors.exp(builder, build.fsub(before, level))
        builder.store(decay, self.decay)
        self.total.set(build.fmul(self.total.get(), decay))
        return level

    def _scaled(self, score: Any) -> Any:
        builder, attention = self.builder, self.attention
        score = builder.build.fmul(score, vectors.constant(attention.scale, TILE_QUERIES))
        if attention.softcap is None:
            return score
        cap = vectors.constant(attention.softcap, TILE_QUERIES)
        return builder.build.fmul(vectors.tanh(builder, builder.build.fdiv(score, cap)), cap)

    def _seen(self, key: Any) -> Any:
        """Checks which queries see a key."""
        build, number = self.builder.build, self._splat(key)
        seen = build.icmp_signed("<=", number, self.positions)
        if self.attention.left is None:
            return seen
        oldest = build.sub(self.positions, self._splat(INDEX(self.attention.left)))
        return build.and_(seen, build.icmp_signed(">=", number, oldest))

    def _finish(self) -> None:
        builder, build, attention = self.builder, self.builder.build, self.attention
        zero = vectors.constant(0, TILE_QUERIES)
        total = self.total.get()
        has_any = build.fcmp_unordered(">", total, zero)  # also true for NaN
        factors = build.select(has_any, build.fdiv(vectors.constant(1, TILE_QUERIES), total), zero)
        maxima = build.select(has_any, self.maximum.get(), zero)
        size = BITS[attention.output] // 8
        for row in range(min(TILE_QUERIES, attention.tokens * attention.group)):
            token = builder.plus(self.first, row // attention.group)
            with builder.when(build.icmp_signed("<=", token, self.last)):
                head = builder.plus(builder.times(self.head, attention.group), row % attention.group)
                number = builder.plus(builder.times(token, attention.heads), head)
                factor = builder.splat(build.extract_element(factors, INT32(row)), TILE_QUERIES)
                for part in range(self.parts):
                    values = builder.load(zero.type, builder.at(self.output, part * SQUARE + row * LINE))
                    at = builder.plus(builder.times(number, size * attention.head_dim), size * TILE_QUERIES * part)
                    place = builder.at(self.results[0], at)
                    write(builder, attention.output, build.fmul(values, factor), place, None)
                for result, values in zip(self.results[1:], (maxima, total), strict=True):
                    builder.store(
                        build.extract_element(values, INT32(row)), builder.at(result, builder.times(number, 4))
                    )
