"""Attention of a prompt's tokens to pages, in LLVM IR.

All queries of a tile are looked at together, up to 16 of them, with 128 keys at a time:

    S^T = K Q^T             a lane is a query
    P^T = exp(S^T - m)      m is the running maximum of each lane
    O  += P V               the sums so far shrink as m grows

Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691).
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from llvmlite import ir

from stack_kernels.llvm import vectors
from stack_kernels.llvm.code import BYTE, FLOAT, INDEX, INT32, POINTER, Code, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, write
from stack_kernels.paged_attention.llvm_call import TILE_QUERIES, PagedAttention, Sequences, strides

__all__ = ["BLOCK_KEYS", "LINE", "SQUARE", "PromptTile"]

BLOCK_KEYS = 128
LINE = 4 * TILE_QUERIES
"""The bytes of a number of every query, or of a vector of one query's output."""
SQUARE = TILE_QUERIES * LINE


class PromptTile(ABC):
    """Writes `prompt_tile`: some tokens of one sequence, with one key head and its queries.

    Attributes:
      scores: S^T of a block, 128 lines.
      output: O, 16 entries of every query together, then the next 16.
      decay: a line, what O shrinks by.
    """

    dtype: ClassVar[str]
    """Of queries and pages."""

    @classmethod
    def supports(cls, attention: PagedAttention, processor: Processor) -> bool:
        """Whether vectors hold the queries, and a page 16 keys after the other."""
        rows = attention.tokens * attention.group
        is_right = attention.query == attention.pages == cls.dtype and not attention.scaled
        fits = rows <= TILE_QUERIES == processor.lanes and attention.slots % TILE_QUERIES == 0
        return is_right and fits and attention.head_dim % TILE_QUERIES == 0

    def __init__(self, module: ir.Module, attention: PagedAttention) -> None:
        self.code = code = Code(module, "prompt_tile", [POINTER, POINTER, *[INDEX] * 5])
        code.function.linkage = "internal"
        self.attention = attention
        arguments, results, self.sequence, self.head, self.first, self.last, self.shift = code.parameters
        self.sequences = Sequences(code, arguments, attention)
        self.query, _ = code.buffer(arguments, 0, 0)
        self.pools = [code.buffer(arguments, number, 4)[0] for number in (1, 2)]
        _, sizes = code.buffer(arguments, 1, 4)
        self.strides = strides(code, attention.layout, sizes)
        self.results = [code.buffer(results, number, 0)[0] for number in range(3)]
        self.final = code.plus(self.last, self.shift)
        self.row_bytes = attention.head_dim * BITS[self.dtype] // 8
        self.slot_bytes = code.times(self.strides["s"], self.row_bytes)
        self.parts = attention.head_dim // TILE_QUERIES
        self.scores = code.scratch(BYTE, BLOCK_KEYS * LINE)
        self.output = code.scratch(BYTE, self.parts * SQUARE)
        self.decay = code.scratch(BYTE, LINE)

    @abstractmethod
    def open(self) -> None:
        """Brings the queries where `score` wants them."""

    @abstractmethod
    def score(self, sixteen: Any, key: Any) -> None:
        """Writes lines of S^T from 16 * `sixteen` on, for 16 keys from `key` on; anything where there is none."""

    @abstractmethod
    def add_values(self, start: Any, keys: Any, level: Any) -> None:
        """Shrinks O, and adds P V of a block: `keys` of them, a multiple of 16, some of which may not exist."""

    @abstractmethod
    def close(self) -> None:
        """Leaves O as `output` says, and all else as it was."""

    def write(self) -> Any:
        code, attention = self.code, self.attention
        self.open()
        self.positions = self._positions()
        zero = vectors.constant(0, TILE_QUERIES)
        self.maximum = code.variable(zero.type, vectors.constant(float("-inf"), TILE_QUERIES))
        self.total = code.variable(zero.type, zero)
        code.clear(self.output, INDEX(self.parts * SQUARE))
        oldest = INDEX(0)
        if attention.left is not None:
            oldest = code.most(code.minus(code.plus(self.first, self.shift), attention.left), oldest)
        start = code.times(code.over(oldest, TILE_QUERIES), TILE_QUERIES)
        blocks = code.over(code.plus(code.minus(self.final, start), BLOCK_KEYS), BLOCK_KEYS)
        with code.loop(0, blocks) as block:
            self._visit(code.plus(start, code.times(block, BLOCK_KEYS)))
        self.close()
        self._finish()
        code.close()
        return code.function

    def query_row(self, row: int) -> tuple[Any, Any]:
        """Where a query lies, or the first where there is none, and whether there is one."""
        code, group = self.code, self.attention.group
        token = code.plus(self.first, row // group)
        exists = code.build.icmp_signed("<=", token, self.last)
        head = code.plus(code.times(self.head, group), row % group)
        number = code.plus(code.times(code.build.select(exists, token, self.first), self.attention.heads), head)
        return code.at(self.query, code.times(number, self.row_bytes)), exists

    def slot(self, pool: Any, key: Any) -> Any:
        """The pointer to a key or a value, by its number in the sequence."""
        code, attention = self.code, self.attention
        page = code.over(key, attention.slots)
        entry = code.plus(code.times(self.sequence, self.sequences.pages), page)
        number = self.sequences.integer(self.sequences.tables, entry)
        slot = code.minus(key, code.times(page, attention.slots))
        terms = (number, "p"), (self.head, "h"), (slot, "s")
        row = INDEX(0)
        for index, axis in terms:
            row = code.plus(row, code.times(index, self.strides[axis]))
        return code.at(pool, code.times(row, self.row_bytes))

    def weight(self, score: Any, level: Any) -> Any:
        """P of a line of S^T, which is added to the totals."""
        build, nothing = self.code.build, vectors.constant(float("-inf"), TILE_QUERIES)
        weight = vectors.exp(self.code, build.fsub(score, level))
        weight = build.select(build.fcmp_ordered("==", score, nothing), vectors.constant(0, TILE_QUERIES), weight)
        self.total.set(build.fadd(self.total.get(), weight))
        return weight

    def _positions(self) -> Any:
        """Of each query among the keys; -1 where there is none."""
        code, group = self.code, self.attention.group
        tokens = ir.Constant(vector(INT32, TILE_QUERIES), [row // group for row in range(TILE_QUERIES)])
        numbers = code.build.add(tokens, self._splat(self.first))
        positions = code.build.add(numbers, self._splat(self.shift))
        exists = code.build.icmp_signed("<=", numbers, self._splat(self.last))
        return code.build.select(exists, positions, ir.Constant(positions.type, [-1] * TILE_QUERIES))

    def _splat(self, value: Any) -> Any:
        return self.code.splat(self.code.build.trunc(value, INT32), TILE_QUERIES)

    def _visit(self, start: Any) -> None:
        """The keys of a block, which begins at a multiple of 16."""
        code = self.code
        left = code.least(code.plus(code.minus(self.final, start), 1), INDEX(BLOCK_KEYS))
        sixteens = code.quotient_up(left, TILE_QUERIES)
        with code.loop(0, sixteens) as sixteen:
            self.score(sixteen, code.plus(start, code.times(sixteen, TILE_QUERIES)))
        keys = code.times(sixteens, TILE_QUERIES)
        self.add_values(start, keys, self._raise_maximum(start, keys))

    def _raise_maximum(self, start: Any, keys: Any) -> Any:
        """Scales and masks the scores; what is taken from them, with which the sums so far are brought in line."""
        code, build = self.code, self.code.build
        kind, nothing = vector(FLOAT, TILE_QUERIES), vectors.constant(float("-inf"), TILE_QUERIES)
        before = self.maximum.get()
        highest = code.variable(kind, before)
        highest.set(before)
        with code.loop(0, keys) as number:
            place = code.at(self.scores, code.times(number, LINE))
            score = self._scaled(code.load(kind, place))
            score = build.select(self._seen(code.plus(start, number)), score, nothing)
            code.store(score, place)
            highest.set(build.select(build.fcmp_ordered(">", score, highest.get()), score, highest.get()))
        after = highest.get()
        self.maximum.set(after)
        level = build.select(build.fcmp_ordered(">", after, nothing), after, vectors.constant(0, TILE_QUERIES))
        # What there was before the first key is zero, and stays it.
        decay = vectors.exp(code, build.fsub(before, level))
        code.store(decay, self.decay)
        self.total.set(build.fmul(self.total.get(), decay))
        return level

    def _scaled(self, score: Any) -> Any:
        code, attention = self.code, self.attention
        score = code.build.fmul(score, vectors.constant(attention.scale, TILE_QUERIES))
        if attention.softcap is None:
            return score
        cap = vectors.constant(attention.softcap, TILE_QUERIES)
        return code.build.fmul(vectors.tanh(code, code.build.fdiv(score, cap)), cap)

    def _seen(self, key: Any) -> Any:
        """Which queries see a key."""
        build, number = self.code.build, self._splat(key)
        seen = build.icmp_signed("<=", number, self.positions)
        if self.attention.left is None:
            return seen
        oldest = build.sub(self.positions, self._splat(INDEX(self.attention.left)))
        return build.and_(seen, build.icmp_signed(">=", number, oldest))

    def _finish(self) -> None:
        code, build, attention = self.code, self.code.build, self.attention
        zero = vectors.constant(0, TILE_QUERIES)
        total = self.total.get()
        has_any = build.fcmp_ordered(">", total, zero)
        factors = build.select(has_any, build.fdiv(vectors.constant(1, TILE_QUERIES), total), zero)
        maxima = build.select(has_any, self.maximum.get(), zero)
        size = BITS[attention.output] // 8
        for row in range(min(TILE_QUERIES, attention.tokens * attention.group)):
            token = code.plus(self.first, row // attention.group)
            with code.when(build.icmp_signed("<=", token, self.last)):
                head = code.plus(code.times(self.head, attention.group), row % attention.group)
                number = code.plus(code.times(token, attention.heads), head)
                factor = code.splat(build.extract_element(factors, INT32(row)), TILE_QUERIES)
                for part in range(self.parts):
                    values = code.load(zero.type, code.at(self.output, part * SQUARE + row * LINE))
                    at = code.plus(code.times(number, size * attention.head_dim), size * TILE_QUERIES * part)
                    place = code.at(self.results[0], at)
                    write(code, attention.output, build.fmul(values, factor), place, None)
                for result, values in zip(self.results[1:], (maxima, total), strict=True):
                    code.store(build.extract_element(values, INT32(row)), code.at(result, code.times(number, 4)))
