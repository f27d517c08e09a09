"""Attention of a prompt's tokens to pages on processors with AMX, in LLVM IR.

All queries of a tile are looked at together, up to 16 of them, with 128 keys at a time:

    S^T = K Q^T             keys are rows of memory, as tiles want them; a lane is a query
    P^T = exp(S^T - m)      m is the running maximum of each lane
    O  += P V               the sums so far shrink as m grows

The weights are rounded to bf16 for the last product, as in FlashAttention.

Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691).
"""

from typing import Any

from llvmlite import ir

from stack_kernels.llvm import vectors
from stack_kernels.llvm.code import BYTE, FLOAT, INDEX, INT32, POINTER, SHORT, Code, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, write
from stack_kernels.llvm.tile_registers import TILE_BYTES, TILE_LINE, TILE_ROWS, TileRegisters
from stack_kernels.paged_attention.llvm_call import PagedAttention, Sequences, strides

__all__ = ["PromptTile", "is_for_prompts"]

_KEYS = 32  # the entries of a tile's row
_BLOCK_KEYS = 128
_SCORES, _OF_KEYS = 0, 1  # tile registers
_OUTPUT, _OF_WEIGHTS, _OF_VALUES = 0, 1, 2
_QUERIES = 4
_MOST_HEAD_DIM = _KEYS * 4


def is_for_prompts(attention: PagedAttention, processor: Processor) -> bool:
    """Whether keys and queries are such as tiles hold."""
    is_bf16 = attention.query == attention.pages == "bfloat16" and not attention.scaled
    fits = attention.head_dim % _KEYS == 0 and attention.head_dim <= _MOST_HEAD_DIM
    rows = attention.tokens * attention.group
    return processor.has_tiles and is_bf16 and fits and attention.slots % TILE_ROWS == 0 and rows <= TILE_ROWS


class PromptTile:
    """Writes `prompt_tile`: some tokens of one sequence, with one key head and its queries."""

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
        self.registers = TileRegisters(code)
        self.final = code.plus(self.last, self.shift)
        self.row_bytes = 2 * attention.head_dim
        self.parts = attention.head_dim // TILE_ROWS  # vectors of float32 of a head
        self.scores = code.scratch(BYTE, _BLOCK_KEYS // TILE_ROWS * TILE_BYTES)
        self.weights = code.scratch(BYTE, _BLOCK_KEYS // _KEYS * TILE_BYTES)
        self.values = code.scratch(BYTE, _BLOCK_KEYS // _KEYS * self.parts * TILE_BYTES)
        self.output = code.scratch(BYTE, self.parts * TILE_BYTES)
        self.added = code.scratch(BYTE, TILE_BYTES)
        self.decay = code.scratch(FLOAT, TILE_ROWS)

    def write(self) -> Any:
        code, attention = self.code, self.attention
        self.registers.configure(INDEX(TILE_ROWS), ())
        self._load_queries()
        self.positions = self._positions()
        zero = vectors.constant(0, TILE_ROWS)
        self.maximum = code.variable(zero.type, vectors.constant(float("-inf"), TILE_ROWS))
        self.total = code.variable(zero.type, zero)
        code.clear(self.output, INDEX(self.parts * TILE_BYTES))
        oldest = INDEX(0)
        if attention.left is not None:
            oldest = code.most(code.minus(code.plus(self.first, self.shift), attention.left), oldest)
        start = code.times(code.over(oldest, TILE_ROWS), TILE_ROWS)
        blocks = code.over(code.plus(code.minus(self.final, start), _BLOCK_KEYS), _BLOCK_KEYS)
        with code.loop(0, blocks) as block:
            self._visit(code.plus(start, code.times(block, _BLOCK_KEYS)))
        self._finish()
        self.registers.release()
        code.close()
        return code.function

    def _load_queries(self) -> None:
        """Q^T, two entries of a query beside each other, into its tile registers; zero where there is no query."""
        code = self.code
        rows = [self._query_row(row) for row in range(TILE_ROWS)]
        nothing = ir.Constant(vector(INT32, TILE_ROWS), None)
        for number in range(self.attention.head_dim // _KEYS):
            pairs = []
            for place, exists in rows:
                pair = code.load(nothing.type, code.at(place, number * TILE_LINE))
                pairs.append(code.build.select(exists, pair, nothing))
            for at, part in enumerate(vectors.transposed(code, pairs)):
                code.store(part, code.at(self.added, at * TILE_LINE))
            self.registers.load(_QUERIES + number, self.added, INDEX(TILE_LINE))

    def _query_row(self, row: int) -> tuple[Any, Any]:
        """Where a query lies, or the first where there is none, and whether there is one."""
        code, group = self.code, self.attention.group
        token = code.plus(self.first, row // group)
        exists = code.build.icmp_signed("<=", token, self.last)
        head = code.plus(code.times(self.head, group), row % group)
        number = code.plus(code.times(code.build.select(exists, token, self.first), self.attention.heads), head)
        return code.at(self.query, code.times(number, self.row_bytes)), exists

    def _positions(self) -> Any:
        """Of each query among the keys; -1 where there is none."""
        code, group = self.code, self.attention.group
        tokens = ir.Constant(vector(INT32, TILE_ROWS), [row // group for row in range(TILE_ROWS)])
        numbers = code.build.add(tokens, self._splat(self.first))
        positions = code.build.add(numbers, self._splat(self.shift))
        exists = code.build.icmp_signed("<=", numbers, self._splat(self.last))
        return code.build.select(exists, positions, ir.Constant(positions.type, [-1] * TILE_ROWS))

    def _splat(self, value: Any) -> Any:
        return self.code.splat(self.code.build.trunc(value, INT32), TILE_ROWS)

    def _visit(self, start: Any) -> None:
        """The keys of a block, which begins at a multiple of 16."""
        code = self.code
        left = code.least(code.plus(code.minus(self.final, start), 1), INDEX(_BLOCK_KEYS))
        sixteens = code.over(code.plus(left, TILE_ROWS - 1), TILE_ROWS)
        pairs = code.over(code.plus(left, _KEYS - 1), _KEYS)
        with code.loop(0, sixteens) as sixteen:
            self._score(sixteen, code.plus(start, code.times(sixteen, TILE_ROWS)))
        with code.loop(0, pairs) as pair:
            self._pack_values(pair, code.plus(start, code.times(pair, _KEYS)))
        level = self._raise_maximum(start, code.times(sixteens, TILE_ROWS))
        with code.loop(0, pairs) as pair:
            self._weigh(pair, sixteens, level)
        with code.loop(0, self.parts) as part:
            self._add_values(part, pairs)

    def _slot(self, pool: Any, key: Any) -> Any:
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

    def _score(self, sixteen: Any, key: Any) -> None:
        """S^T of 16 keys that begin with one; whatever is in slots that hold none."""
        code = self.code
        place, stride = self._slot(self.pools[0], key), code.times(self.strides["s"], self.row_bytes)
        self.registers.clear(_SCORES)
        for number in range(self.attention.head_dim // _KEYS):
            self.registers.load(_OF_KEYS, code.at(place, number * TILE_LINE), stride)
            self.registers.multiply(_SCORES, _OF_KEYS, _QUERIES + number)
        self.registers.store(_SCORES, code.at(self.scores, code.times(sixteen, TILE_BYTES)), INDEX(TILE_LINE))

    def _pack_values(self, pair: Any, key: Any) -> None:
        """V of 32 keys, the entries of two keys beside each other; zero where there is no key."""
        code, wide = self.code, vector(SHORT, _KEYS)
        stride = code.times(self.strides["s"], self.row_bytes)
        for half in range(_KEYS // TILE_ROWS):
            first = code.plus(key, half * TILE_ROWS)
            known = code.least(first, code.times(code.over(self.final, TILE_ROWS), TILE_ROWS))
            base = self._slot(self.pools[1], known)
            with code.loop(0, TILE_ROWS, 2) as row:
                line = code.over(code.plus(row, half * TILE_ROWS), 2)
                exists = [
                    code.build.icmp_signed("<=", code.plus(code.plus(first, row), step), self.final) for step in (0, 1)
                ]
                for number in range(self.attention.head_dim // _KEYS):
                    place = code.at(base, code.times(row, stride), number * TILE_LINE)
                    entries = [code.load(wide, place), code.load(wide, code.at(place, stride))]
                    upper, lower = (
                        code.build.select(is_key, entry, ir.Constant(wide, None))
                        for is_key, entry in zip(exists, entries, strict=True)
                    )
                    for part, values in enumerate(vectors.interleaved(code, upper, lower, _KEYS)):
                        tile = code.plus(code.times(pair, self.parts), 2 * number + part)
                        place = code.at(self.values, code.times(tile, TILE_BYTES), code.times(line, TILE_LINE))
                        code.store(values, place)

    def _raise_maximum(self, start: Any, keys: Any) -> Any:
        """Scales and masks the scores; what is taken from them, with which the sums so far are brought in line."""
        code, build = self.code, self.code.build
        kind, nothing = vector(FLOAT, TILE_ROWS), vectors.constant(float("-inf"), TILE_ROWS)
        before = self.maximum.get()
        highest = code.variable(kind, before)
        highest.set(before)
        with code.loop(0, keys) as number:
            place = code.at(self.scores, code.times(number, TILE_LINE))
            score = self._scaled(code.load(kind, place))
            score = build.select(self._seen(code.plus(start, number)), score, nothing)
            code.store(score, place)
            highest.set(build.select(build.fcmp_ordered(">", score, highest.get()), score, highest.get()))
        after = highest.get()
        self.maximum.set(after)
        level = build.select(build.fcmp_ordered(">", after, nothing), after, vectors.constant(0, TILE_ROWS))
        # What there was before the first key is zero, and stays it.
        decay = vectors.exp(code, build.fsub(before, level))
        code.store(decay, self.decay)
        self.total.set(build.fmul(self.total.get(), decay))
        return level

    def _scaled(self, score: Any) -> Any:
        code, attention = self.code, self.attention
        score = code.build.fmul(score, vectors.constant(attention.scale, TILE_ROWS))
        if attention.softcap is None:
            return score
        cap = vectors.constant(attention.softcap, TILE_ROWS)
        return code.build.fmul(vectors.tanh(code, code.build.fdiv(score, cap)), cap)

    def _seen(self, key: Any) -> Any:
        """Which queries see a key."""
        build, number = self.code.build, self._splat(key)
        seen = build.icmp_signed("<=", number, self.positions)
        if self.attention.left is None:
            return seen
        oldest = build.sub(self.positions, self._splat(INDEX(self.attention.left)))
        return build.and_(seen, build.icmp_signed(">=", number, oldest))

    def _weigh(self, pair: Any, sixteens: Any, level: Any) -> None:
        """P of 32 keys from their scores, as a tile; the second 16 may not exist."""
        code, build = self.code, self.code.build
        kind, nothing = vector(FLOAT, TILE_ROWS), vectors.constant(float("-inf"), TILE_ROWS)
        zero = vectors.constant(0, TILE_ROWS)
        columns = []
        for row in range(0, _KEYS, 2):
            sixteen = code.plus(code.times(pair, _KEYS // TILE_ROWS), row // TILE_ROWS)
            exists = build.icmp_signed("<", sixteen, sixteens)
            weights = []
            for step in range(2):
                place = code.at(self.scores, code.times(pair, _KEYS * TILE_LINE), (row + step) * TILE_LINE)
                score = build.select(exists, code.load(kind, place), nothing)
                weight = vectors.exp(code, build.fsub(score, level))
                weights.append(build.select(build.fcmp_ordered("==", score, nothing), zero, weight))
                self.total.set(build.fadd(self.total.get(), weights[-1]))
            rounded = vectors.as_bfloat16(code, *weights)
            together = code.shuffle(rounded, rounded, [lane + half for lane in range(TILE_ROWS) for half in (0, 16)])
            columns.append(build.bitcast(together, vector(INT32, TILE_ROWS)))
        place = code.at(self.weights, code.times(pair, TILE_BYTES))
        for row, part in enumerate(vectors.transposed(code, columns)):
            code.store(part, code.at(place, row * TILE_LINE))

    def _add_values(self, part: Any, pairs: Any) -> None:
        """16 entries of every query's output."""
        code = self.code
        self.registers.clear(_OUTPUT)
        with code.loop(0, pairs) as pair:
            weights = code.at(self.weights, code.times(pair, TILE_BYTES))
            values = code.at(self.values, code.times(code.plus(code.times(pair, self.parts), part), TILE_BYTES))
            self.registers.load(_OF_WEIGHTS, weights, INDEX(TILE_LINE))
            self.registers.load(_OF_VALUES, values, INDEX(TILE_LINE))
            self.registers.multiply(_OUTPUT, _OF_WEIGHTS, _OF_VALUES)
        self.registers.store(_OUTPUT, self.added, INDEX(TILE_LINE))
        kind = vector(FLOAT, TILE_ROWS)
        output = code.at(self.output, code.times(part, TILE_BYTES))
        for row in range(TILE_ROWS):
            place = code.at(output, row * TILE_LINE)
            decay = code.splat(code.load(FLOAT, code.at(self.decay, 4 * row)), TILE_ROWS)
            added = code.load(kind, code.at(self.added, row * TILE_LINE))
            code.store(code.fma(code.load(kind, place), decay, added), place)

    def _finish(self) -> None:
        code, build, attention = self.code, self.code.build, self.attention
        zero = vectors.constant(0, TILE_ROWS)
        total = self.total.get()
        has_any = build.fcmp_ordered(">", total, zero)
        factors = build.select(has_any, build.fdiv(vectors.constant(1, TILE_ROWS), total), zero)
        maxima = build.select(has_any, self.maximum.get(), zero)
        size = BITS[attention.output] // 8
        for row in range(min(TILE_ROWS, attention.tokens * attention.group)):
            token = code.plus(self.first, row // attention.group)
            with code.when(build.icmp_signed("<=", token, self.last)):
                head = code.plus(code.times(self.head, attention.group), row % attention.group)
                number = code.plus(code.times(token, attention.heads), head)
                factor = code.splat(build.extract_element(factors, INT32(row)), TILE_ROWS)
                for part in range(self.parts):
                    values = code.load(zero.type, code.at(self.output, part * TILE_BYTES + row * TILE_LINE))
                    at = code.plus(code.times(number, size * attention.head_dim), size * TILE_ROWS * part)
                    place = code.at(self.results[0], at)
                    write(code, attention.output, build.fmul(values, factor), place, None)
                for result, values in zip(self.results[1:], (maxima, total), strict=True):
                    code.store(build.extract_element(values, INT32(row)), code.at(result, code.times(number, 4)))
