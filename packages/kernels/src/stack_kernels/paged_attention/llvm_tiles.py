"""Attention to pages in LLVM IR: each page is read once by all queries that share its sequence and key head.

A tile is a key head with some of the newest tokens of a sequence. It goes along the keys by as many as a vector has
lanes: their scores with one query, a step of the running softmax, and the weighted sum of their values; then the same
for the next query, while the keys are still in the first cache.
"""

import functools
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.llvm import vectors
from stack_kernels.llvm.code import FLOAT, INDEX, INT32, POINTER, Code, Variable, vector
from stack_kernels.llvm.host import Processor
from stack_kernels.llvm.numbers import BITS, read, write
from stack_kernels.paged_attention.amx_prompts import TiledPrompts
from stack_kernels.paged_attention.llvm_call import PagedAttention, Sequences, strides
from stack_kernels.paged_attention.vector_prompts import VectorPrompts

__all__ = ["paged_attention_module"]

_FEW_TOKENS = 2
_BF16_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"


def paged_attention_module(attention: PagedAttention, processor: Processor) -> ir.Module:
    """`@tiles` and `@tile` of an attention."""
    module = ir.Module("paged_attention")
    _write_tiles(module, attention)
    tiles = [kind for kind in (TiledPrompts, VectorPrompts) if kind.supports(attention, processor)]
    _Tile(module, attention).write(tiles[0](module, attention).write() if tiles else None)
    return module


def _write_tiles(module: ir.Module, attention: PagedAttention) -> None:
    """Counts them, and makes the output of padding zero."""
    code = Code(module, "tiles", [POINTER, POINTER], INDEX)
    arguments, results = code.parameters
    sequences = Sequences(code, arguments, attention)
    parts = code.variable(INDEX, INDEX(0))
    with code.loop(0, sequences.count) as sequence:
        parts.set(code.plus(parts.get(), sequences.parts(sequence)))
    filled = code.times(sequences.start(sequences.count), attention.heads)
    _, (tokens, _, _) = code.buffer(arguments, 0, 3)
    rows = code.minus(code.times(tokens, attention.heads), filled)
    for number, size in enumerate((attention.head_dim * BITS[attention.output] // 8, 4, 4)):
        data, _ = code.buffer(results, number, 0)
        code.clear(code.at(data, code.times(filled, size)), code.times(rows, size))
    code.close(code.times(parts.get(), attention.kv_heads))


class _Tile:
    """Writes `@tile`: some tokens of one sequence, with one key head and its queries."""

    def __init__(self, module: ir.Module, attention: PagedAttention) -> None:
        self.code = code = Code(module, "tile", [POINTER, POINTER, INDEX])
        self.attention, self.lanes = attention, attention.lanes
        arguments, results, tile = code.parameters
        self.buffers = arguments, results
        self.sequences = Sequences(code, arguments, attention)
        self.query, _ = code.buffer(arguments, 0, 0)
        self.pools = [code.buffer(arguments, number, 4)[0] for number in (1, 2)]
        _, sizes = code.buffer(arguments, 1, 4)
        self.strides = strides(code, attention.layout, sizes)
        self.scales = [code.buffer(arguments, number, 4)[0] for number in (6, 7)] if attention.scaled else [None, None]
        self.results = [code.buffer(results, number, 0)[0] for number in range(3)]
        part = code.over(tile, attention.kv_heads)
        self.head = code.minus(tile, code.times(part, attention.kv_heads))
        self.sequence, own = self.sequences.of_part(part)
        start, end = (self.sequences.start(code.plus(self.sequence, ahead)) for ahead in (0, 1))
        self.first = code.plus(start, code.times(own, attention.tokens))
        self.last = code.minus(code.least(code.plus(self.first, attention.tokens), end), 1)
        # What a token's number and its place among the keys differ by.
        self.shift = code.minus(self.sequences.integer(self.sequences.lengths, self.sequence), end)
        rows = attention.tokens * attention.group
        self.sums = code.scratch(FLOAT, rows * attention.head_dim)
        self.maxima, self.totals = code.scratch(FLOAT, rows), code.scratch(FLOAT, rows * self.lanes)
        self.weights = code.scratch(FLOAT, self.lanes)

    def write(self, prompt_tile: Any | None) -> None:
        """With the function for tiles of several tokens, where there is one."""
        code = self.code
        if prompt_tile is None:
            self._attend_one_by_one()
        else:
            is_prompt = code.build.icmp_signed(">", self.last, code.plus(self.first, _FEW_TOKENS - 1))
            with code.build.if_else(is_prompt) as (then, otherwise):
                with then:
                    places = [self.sequence, self.head, self.first, self.last, self.shift]
                    code.build.call(prompt_tile, [*self.buffers, *places])
                with otherwise:
                    self._attend_one_by_one()
        code.close()

    def _attend_one_by_one(self) -> None:
        code, attention = self.code, self.attention
        self._start()
        final = code.plus(self.last, self.shift)
        oldest = INDEX(0)
        if attention.left is not None:
            oldest = code.most(code.minus(code.plus(self.first, self.shift), attention.left), oldest)
        slots = attention.slots
        with code.loop(code.over(oldest, slots), code.over(code.plus(final, slots), slots)) as page:
            self._visit(page, final)
        self._finish()

    def _rows(self, visit: Any) -> None:
        """Calls `visit` with each query: its row in the scratch, its token, and its head."""
        code, group = self.code, self.attention.group
        with code.loop(self.first, code.plus(self.last, 1)) as token, code.loop(0, group) as member:
            row = code.plus(code.times(code.minus(token, self.first), group), member)
            visit(row, token, code.plus(code.times(self.head, group), member))

    def _start(self) -> None:
        zero = vectors.constant(0, self.lanes)

        def clear(row: Any, token: Any, head: Any) -> None:
            self.code.store(ir.Constant(FLOAT, float("-inf")), self.code.at(self.maxima, self.code.times(row, 4)))
            self._total(row).set(zero)
            for part in self._parts_of_sums(row):
                part.set(zero)

        self._rows(clear)

    def _total(self, row: Any) -> Variable:
        place = self.code.at(self.totals, self.code.times(row, 4 * self.lanes))
        return Variable(self.code, place, vector(FLOAT, self.lanes))

    def _parts_of_sums(self, row: Any) -> list[Variable]:
        """The weighted sum of the values, by vectors."""
        place = self.code.at(self.sums, self.code.times(row, 4 * self.attention.head_dim))
        kind = vector(FLOAT, self.lanes)
        return [
            Variable(self.code, self.code.at(place, 4 * lane), kind)
            for lane in range(0, self.attention.head_dim, self.lanes)
        ]

    def _visit(self, page: Any, final: Any) -> None:
        """All keys of a page up to `final`, with all queries."""
        code, attention = self.code, self.attention
        page_first = code.times(page, attention.slots)
        held = code.least(INDEX(attention.slots), code.plus(code.minus(final, page_first), 1))
        base = self._page(page)
        following = self._page(code.least(code.plus(page, 1), code.over(final, attention.slots)))
        self._ask_ahead(self.pools[0], following)
        whole = code.times(code.over(held, self.lanes), self.lanes)
        with code.loop(0, whole, self.lanes) as slot:
            keys = _Keys(code.plus(page_first, slot), slot, INDEX(self.lanes), base)
            self._rows(functools.partial(self._attend, keys))
        with code.when(code.build.icmp_signed("<", whole, held)):
            keys = _Keys(code.plus(page_first, whole), whole, code.minus(held, whole), base)
            self._rows(functools.partial(self._attend, keys))
        self._ask_ahead(self.pools[1], following)

    def _page(self, page: Any) -> Any:
        """The number of vectors in the pool before slot 0 of this head in a page of the sequence."""
        code = self.code
        table = code.times(self.sequence, self.sequences.pages)
        number = self.sequences.integer(self.sequences.tables, code.plus(table, page))
        return code.plus(code.times(number, self.strides["p"]), code.times(self.head, self.strides["h"]))

    def _ask_ahead(self, pool: Any, page: Any) -> None:
        """For a page that comes next: the processor cannot know where it lies. All of it at once would be too much."""
        code, attention = self.code, self.attention
        row_bytes = attention.head_dim * BITS[attention.pages] // 8
        with code.loop(0, attention.slots) as slot:
            row = code.at(pool, code.times(code.plus(page, code.times(slot, self.strides["s"])), row_bytes))
            for line in range(0, row_bytes, 64):
                code.prefetch(code.at(row, line))

    def _attend(self, keys: "_Keys", row: Any, token: Any, head: Any) -> None:
        """One query to some keys: a step of its running softmax."""
        code, lanes = self.code, self.lanes
        seen = self._seen(keys, code.plus(token, self.shift))
        nothing = vectors.constant(float("-inf"), lanes)
        scores = code.build.select(seen, self._scores(keys, token, head), nothing)
        place = code.at(self.maxima, code.times(row, 4))
        before = code.load(FLOAT, place)
        highest = vectors.largest(code, scores)
        after = code.build.select(code.build.fcmp_ordered(">", highest, before), highest, before)
        code.store(after, place)
        has_any = code.build.fcmp_ordered(">", after, ir.Constant(FLOAT, float("-inf")))
        with code.when(has_any):
            level = code.splat(after, lanes)
            # What is not seen, and what there was before the first key, weighs next to nothing: exp(-87).
            decay = vectors.exp(code, code.build.fsub(code.splat(before, lanes), level))
            weights = vectors.exp(code, code.build.fsub(scores, level))
            total = self._total(row)
            total.set(code.fma(total.get(), decay, weights))
            code.store(weights, self.weights)
            self._add_values(keys, row, decay)

    def _seen(self, keys: "_Keys", position: Any) -> Any:
        """Which of the keys a query at this position sees."""
        code, lanes = self.code, self.lanes
        numbers = ir.Constant(vector(INT32, lanes), list(range(lanes)))

        def lane(value: Any) -> Any:
            return code.splat(code.build.trunc(value, INT32), lanes)

        behind = code.minus(position, keys.first)
        seen = code.build.icmp_signed("<=", numbers, lane(code.least(behind, code.minus(keys.count, 1))))
        if self.attention.left is None:
            return seen
        oldest = code.most(code.minus(behind, self.attention.left), INDEX(0))
        return code.build.and_(seen, code.build.icmp_signed(">=", numbers, lane(oldest)))

    def _scores(self, keys: "_Keys", token: Any, head: Any) -> Any:
        """Of each key, in its lane; whatever is in slots that hold none."""
        code, attention = self.code, self.attention
        queries = self._query(token, head)
        products = []
        for lane in range(self.lanes):
            # Where a key is missing another is read, for there may be no memory.
            place = self._slot(self.pools[0], keys, code.least(INDEX(lane), code.minus(keys.count, 1)))
            products.append(self._dot(queries, place))
        scores = code.build.fmul(vectors.sums(code, products), vectors.constant(attention.scale, self.lanes))
        if attention.scaled:
            scores = code.build.fmul(scores, self._scale(self.scales[0], keys))
        if attention.softcap is None:
            return scores
        cap = vectors.constant(attention.softcap, self.lanes)
        return code.build.fmul(vectors.tanh(code, code.build.fdiv(scores, cap)), cap)

    def _query(self, token: Any, head: Any) -> list[Any]:
        """The numbers of a query, by vectors; those of bf16 in pairs."""
        code, attention = self.code, self.attention
        number_bytes = BITS[attention.query] // 8
        row = code.plus(code.times(token, attention.heads), head)
        place = code.at(self.query, code.times(row, attention.head_dim * number_bytes))
        kind = vector(FLOAT if attention.query == "float32" else INT32, self.lanes)
        size = 4 * self.lanes
        return [code.load(kind, code.at(place, at)) for at in range(0, attention.head_dim * number_bytes, size)]

    def _dot(self, queries: list[Any], key: Any) -> Any:
        """The products of a query with a key, some of them added up in each lane."""
        code, attention = self.code, self.attention
        total = vectors.constant(0, self.lanes)
        for number, query in enumerate(queries):
            if attention.query == "bfloat16":
                pairs = code.load(vector(INT32, self.lanes), code.at(key, 4 * self.lanes * number))
                total = code.intrinsic(_BF16_DOT, total.type, total, query, pairs)
            else:
                total = code.fma(query, self._numbers(key, number), total)
        return total

    def _numbers(self, place: Any, number: int) -> Any:
        """A vector of a key or a value as float32."""
        width = self.lanes * BITS[self.attention.pages] // 8
        return read(self.code, self.attention.pages, self.code.at(place, width * number), self.lanes, None, None)

    def _slot(self, pool: Any, keys: "_Keys", lane: Any) -> Any:
        """The pointer to the key or the value of a lane."""
        code = self.code
        row = code.plus(keys.page, code.times(code.plus(keys.slot, lane), self.strides["s"]))
        return code.at(pool, code.times(row, self.attention.head_dim * BITS[self.attention.pages] // 8))

    def _scale(self, scales: Any, keys: "_Keys") -> Any:
        """The scale of each slot, in its lane."""
        code = self.code
        scale = vectors.constant(0, self.lanes)
        for lane in range(self.lanes):
            slot = code.plus(keys.slot, code.least(INDEX(lane), code.minus(keys.count, 1)))
            row = code.plus(keys.page, code.times(slot, self.strides["s"]))
            one = code.load(FLOAT, code.at(scales, code.times(row, 4)))
            scale = code.build.insert_element(scale, one, INT32(lane))
        return scale

    def _add_values(self, keys: "_Keys", row: Any, decay: Any) -> None:
        """The values by their weights, to what is left of the sum so far. Values without a key are not looked at."""
        code = self.code
        if self.attention.scaled:
            weights = code.load(decay.type, self.weights)
            code.store(code.build.fmul(weights, self._scale(self.scales[1], keys)), self.weights)
        kept = self._parts_of_sums(row)
        sums = [code.variable(decay.type, code.build.fmul(part.get(), decay)) for part in kept]
        with code.loop(0, keys.count) as lane:
            weight = code.splat(code.load(FLOAT, code.at(self.weights, code.times(lane, 4))), self.lanes)
            place = self._slot(self.pools[1], keys, lane)
            for number, part in enumerate(sums):
                part.set(code.fma(weight, self._numbers(place, number), part.get()))
        for part, summed in zip(kept, sums, strict=True):
            part.set(summed.get())

    def _finish(self) -> None:
        code, attention = self.code, self.attention
        output, maxima, totals = self.results

        def finish_row(row: Any, token: Any, head: Any) -> None:
            total = vectors.total(code, self._total(row).get())
            has_any = code.build.fcmp_ordered(">", total, ir.Constant(FLOAT, 0.0))
            zero, one = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 1.0)
            factor = code.splat(code.build.select(has_any, code.build.fdiv(one, total), zero), self.lanes)
            place = code.plus(code.times(token, attention.heads), head)
            for number, part in enumerate(self._parts_of_sums(row)):
                size = BITS[attention.output] // 8
                at = code.at(output, code.times(place, size * attention.head_dim), size * self.lanes * number)
                write(code, attention.output, code.build.fmul(part.get(), factor), at, None)
            maximum = code.load(FLOAT, code.at(self.maxima, code.times(row, 4)))
            code.store(code.build.select(has_any, maximum, zero), code.at(maxima, code.times(place, 4)))
            code.store(total, code.at(totals, code.times(place, 4)))

        self._rows(finish_row)


@dataclass(frozen=True)
class _Keys:
    """Up to as many keys of a page as a vector has lanes.

    Attributes:
      first: the place of the first among the keys of its sequence.
      slot: its slot.
      count: how many there are, at least 1.
      page: the number of vectors in the pool before slot 0 of this head.
    """

    first: Any
    slot: Any
    count: Any
    page: Any
