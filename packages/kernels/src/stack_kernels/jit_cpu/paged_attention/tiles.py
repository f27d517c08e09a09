"""Attention to pages in LLVM IR: each page is read once for all queries that share its sequence and key head.

A tile is a key head with some of the newest tokens of a sequence. It processes as many keys at a time as a vector has
lanes: their scores with one query, a step of the running softmax, and the weighted sum of their values; then the same
for the next query, while the keys are still in the L1 cache.
"""

import functools
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from stack_kernels.jit_cpu import vectors
from stack_kernels.jit_cpu.builder import FLOAT, INDEX, INT32, POINTER, TILE, Builder, Variable, vector
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.numbers import BITS, read, write
from stack_kernels.jit_cpu.paged_attention.amx_prompts import TiledPrompts
from stack_kernels.jit_cpu.paged_attention.call import PagedAttention, Sequences, strides
from stack_kernels.jit_cpu.paged_attention.vector_prompts import VectorPrompts

__all__ = ["paged_attention_module"]

_FEW_TOKENS = 2
_BF16_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"


def paged_attention_module(attention: PagedAttention, processor: Processor) -> ir.Module:
    """Builds `@tiles` and `@tile` of an attention."""
    module = ir.Module(attention.name)
    _write_tiles(module, attention)
    tiles = [kind for kind in (TiledPrompts, VectorPrompts) if kind.supports(attention, processor)]
    _Tile(module, attention).write(tiles[0](module, attention).write() if tiles else None)
    return module


def _write_tiles(module: ir.Module, attention: PagedAttention) -> None:
    """Builds `@tiles`, which counts the tiles and zeroes the output of padding."""
    builder = Builder(module, "tiles", [POINTER, POINTER], INDEX)
    arguments, results = builder.parameters
    sequences = Sequences(builder, arguments, attention)
    first = sequences.first_token()
    parts, filled = builder.variable(INDEX, INDEX(0)), builder.variable(INDEX, first)
    with sequences.each() as (_, start, end):
        parts.set(builder.plus(parts.get(), sequences.parts(start, end)))
        filled.set(end)
    # Tokens before the first and after the last sequence belong to no tile. Sizes are bytes per head of each result.
    for number, size in enumerate((attention.head_dim * BITS[attention.output] // 8, 4, 4)):
        data, _ = builder.buffer(results, number, 0)
        for start, end in ((INDEX(0), first), (filled.get(), sequences.tokens)):
            token_bytes = attention.heads * size
            builder.clear(
                builder.at(data, builder.times(start, token_bytes)),
                builder.times(builder.minus(end, start), token_bytes),
            )
    builder.close(builder.times(parts.get(), attention.kv_heads))


class _Tile:
    """Builder of `@tile`: some tokens of one sequence, with one key head and its queries."""

    def __init__(self, module: ir.Module, attention: PagedAttention) -> None:
        self.builder = builder = Builder(module, "tile", TILE)
        self.attention, self.lanes = attention, attention.lanes
        arguments, results, tile, _ = builder.parameters
        self.buffers = arguments, results
        self.sequences = Sequences(builder, arguments, attention)
        self.query, _ = builder.buffer(arguments, 0, 0)
        self.pools = [builder.buffer(arguments, number, 4)[0] for number in (1, 2)]
        _, sizes = builder.buffer(arguments, 1, 4)
        self.strides = strides(builder, attention.layout, sizes)
        self.scales = (
            [builder.buffer(arguments, number, 4)[0] for number in (6, 7)] if attention.scaled else [None, None]
        )
        self.results = [builder.buffer(results, number, 0)[0] for number in range(3)]
        part = builder.over(tile, attention.kv_heads)
        self.head = builder.minus(tile, builder.times(part, attention.kv_heads))
        self.sequence, own, start, end = self.sequences.of_part(part)
        self.first = builder.plus(start, builder.times(own, attention.tokens))
        self.last = builder.minus(builder.min(builder.plus(self.first, attention.tokens), end), 1)
        # Difference between a token's key position and its index.
        self.shift = builder.minus(self.sequences.length(self.sequence), end)
        rows = attention.tokens * attention.group
        self.sums = builder.scratch(FLOAT, rows * attention.head_dim)
        # Totals have a sum per lane, which `_finish` adds up.
        self.maxima, self.totals = builder.scratch(FLOAT, rows), builder.scratch(FLOAT, rows * self.lanes)
        self.weights = builder.scratch(FLOAT, self.lanes)

    def write(self, prompt_tile: Any | None) -> None:
        """Writes the function; `prompt_tile` is the function for tiles of several tokens, if there is one."""
        builder = self.builder
        if prompt_tile is None:
            self._attend_one_by_one()
        else:
            is_prompt = builder.build.icmp_signed(">", self.last, builder.plus(self.first, _FEW_TOKENS - 1))
            with builder.build.if_else(is_prompt) as (then, otherwise):
                with then:
                    places = [self.sequence, self.head, self.first, self.last, self.shift]
                    builder.build.call(prompt_tile, [*self.buffers, *places, builder.parameters[-1]])
                with otherwise:
                    self._attend_one_by_one()
        builder.close()

    def _attend_one_by_one(self) -> None:
        builder, attention = self.builder, self.attention
        self._start()
        # Negative if a sequence has more tokens than keys; -1 makes the loop over pages empty.
        final = builder.max(builder.plus(self.last, self.shift), INDEX(-1))
        oldest = INDEX(0)
        if attention.left is not None:
            oldest = builder.max(builder.minus(builder.plus(self.first, self.shift), attention.left), oldest)
        slots = attention.slots
        with builder.loop(builder.over(oldest, slots), builder.over(builder.plus(final, slots), slots)) as page:
            self._visit(page, final)
        self._finish()

    def _rows(self, visit: Any) -> None:
        """Calls `visit` with each query: its row in the scratchpad, its token, and its head."""
        builder, group = self.builder, self.attention.group
        with builder.loop(self.first, builder.plus(self.last, 1)) as token, builder.loop(0, group) as member:
            row = builder.plus(builder.times(builder.minus(token, self.first), group), member)
            visit(row, token, builder.plus(builder.times(self.head, group), member))

    def _start(self) -> None:
        zero = vectors.constant(0, self.lanes)

        def clear(row: Any, token: Any, head: Any) -> None:
            self.builder.store(
                ir.Constant(FLOAT, float("-inf")), self.builder.at(self.maxima, self.builder.times(row, 4))
            )
            self._total(row).set(zero)
            for part in self._parts_of_sums(row):
                part.set(zero)

        self._rows(clear)

    def _total(self, row: Any) -> Variable:
        place = self.builder.at(self.totals, self.builder.times(row, 4 * self.lanes))
        return Variable(self.builder, place, vector(FLOAT, self.lanes))

    def _parts_of_sums(self, row: Any) -> list[Variable]:
        """Returns the weighted sum of the values, as vectors."""
        place = self.builder.at(self.sums, self.builder.times(row, 4 * self.attention.head_dim))
        kind = vector(FLOAT, self.lanes)
        return [
            Variable(self.builder, self.builder.at(place, 4 * lane), kind)
            for lane in range(0, self.attention.head_dim, self.lanes)
        ]

    def _visit(self, page: Any, final: Any) -> None:
        """Attends all queries to the keys of a page, up to `final`."""
        builder, attention = self.builder, self.attention
        page_first = builder.times(page, attention.slots)
        held = builder.min(INDEX(attention.slots), builder.plus(builder.minus(final, page_first), 1))
        base = self._page(page)
        # At the last page the page itself, because the table may end there.
        following = self._page(builder.min(builder.plus(page, 1), builder.over(final, attention.slots)))
        self._ask_ahead(self.pools[0], following)
        whole = builder.times(builder.over(held, self.lanes), self.lanes)
        with builder.loop(0, whole, self.lanes) as slot:
            keys = _Keys(builder.plus(page_first, slot), slot, INDEX(self.lanes), base)
            self._rows(functools.partial(self._attend, keys))
        with builder.when(builder.build.icmp_signed("<", whole, held)):
            keys = _Keys(builder.plus(page_first, whole), whole, builder.minus(held, whole), base)
            self._rows(functools.partial(self._attend, keys))
        self._ask_ahead(self.pools[1], following)

    def _page(self, page: Any) -> Any:
        """Returns the number of vectors in the pool before slot 0 of this head in a page of the sequence."""
        builder = self.builder
        number = self.sequences.page(self.sequence, page)
        return builder.plus(builder.times(number, self.strides["p"]), builder.times(self.head, self.strides["h"]))

    def _ask_ahead(self, pool: Any, page: Any) -> None:
        """Prefetches the next page, whose location the processor cannot predict.

        Keys and values separately, to limit the amount.
        """
        builder, attention = self.builder, self.attention
        row_bytes = attention.head_dim * BITS[attention.pages] // 8
        with builder.loop(0, attention.slots) as slot:
            row = builder.at(pool, builder.times(builder.plus(page, builder.times(slot, self.strides["s"])), row_bytes))
            for line in range(0, row_bytes, 64):
                builder.prefetch(builder.at(row, line))

    def _attend(self, keys: "_Keys", row: Any, token: Any, head: Any) -> None:
        """Attends one query to some keys: a step of its running softmax."""
        builder, lanes = self.builder, self.lanes
        bounds = self._bounds(keys, builder.plus(token, self.shift))
        seen = self._seen(bounds)
        nothing = vectors.constant(float("-inf"), lanes)
        scores = builder.build.select(seen, self._scores(keys, token, head), nothing)
        place = builder.at(self.maxima, builder.times(row, 4))
        before = builder.load(FLOAT, place)
        highest = vectors.reduce_max(builder, scores)
        after = builder.build.select(builder.build.fcmp_ordered(">", highest, before), highest, before)
        builder.store(after, place)
        is_finite = builder.build.fcmp_ordered(">", after, ir.Constant(FLOAT, float("-inf")))
        # The maximum ignores NaN, and it is -inf if all scores are; the values of visible keys are added nevertheless.
        with builder.when(builder.build.or_(is_finite, vectors.any_lane(builder, seen))):
            level = builder.splat(builder.build.select(is_finite, after, ir.Constant(FLOAT, 0.0)), lanes)
            # Before the first key the sums are zero and the decay is irrelevant.
            decay = vectors.exp(builder, builder.build.fsub(builder.splat(before, lanes), level))
            weights = vectors.exp(builder, builder.build.fsub(scores, level))
            # `exp` never returns 0: its input ends at -87.3.
            is_absent = builder.build.fcmp_ordered("==", scores, nothing)
            weights = builder.build.select(is_absent, vectors.constant(0, lanes), weights)
            total = self._total(row)
            total.set(builder.fma(total.get(), decay, weights))
            builder.store(weights, self.weights)
            self._add_values(keys, row, decay, bounds)

    def _bounds(self, keys: "_Keys", position: Any) -> tuple[Any, Any]:
        """Returns the first visible key for a query at this position, and the end of its visible keys."""
        builder = self.builder
        behind = builder.minus(position, keys.first)
        stop = builder.min(keys.count, builder.plus(behind, 1))
        if self.attention.left is None:
            return INDEX(0), stop
        return builder.max(builder.minus(behind, self.attention.left), INDEX(0)), stop

    def _seen(self, bounds: tuple[Any, Any]) -> Any:
        """Converts the bounds to a mask over lanes."""
        builder, lanes = self.builder, self.lanes
        numbers = ir.Constant(vector(INT32, lanes), list(range(lanes)))

        def lane(value: Any) -> Any:
            return builder.splat(builder.build.trunc(value, INT32), lanes)

        first, stop = bounds
        seen = builder.build.icmp_signed("<", numbers, lane(stop))
        if self.attention.left is None:
            return seen
        return builder.build.and_(seen, builder.build.icmp_signed(">=", numbers, lane(first)))

    def _scores(self, keys: "_Keys", token: Any, head: Any) -> Any:
        """Computes the score of each key, in its lane; unused lanes get arbitrary values."""
        builder, attention = self.builder, self.attention
        queries = self._query(token, head)
        products = []
        for lane in range(self.lanes):
            # For a missing key another one is read, because its memory may not exist.
            place = self._slot(self.pools[0], keys, builder.min(INDEX(lane), builder.minus(keys.count, 1)))
            # A partial sum per lane; `sums` below turns the vectors of all keys into one vector of scores.
            products.append(self._dot(queries, place))
        scores = builder.build.fmul(vectors.sums(builder, products), vectors.constant(attention.scale, self.lanes))
        if attention.scaled:
            scores = builder.build.fmul(scores, self._scale(self.scales[0], keys))
        if attention.softcap is None:
            return scores
        cap = vectors.constant(attention.softcap, self.lanes)
        return builder.build.fmul(vectors.tanh(builder, builder.build.fdiv(scores, cap)), cap)

    def _query(self, token: Any, head: Any) -> list[Any]:
        """Loads the numbers of a query as vectors; bf16 numbers in pairs."""
        builder, attention = self.builder, self.attention
        number_bytes = BITS[attention.query] // 8
        row = builder.plus(builder.times(token, attention.heads), head)
        place = builder.at(self.query, builder.times(row, attention.head_dim * number_bytes))
        kind = vector(FLOAT if attention.query == "float32" else INT32, self.lanes)
        size = 4 * self.lanes
        return [builder.load(kind, builder.at(place, at)) for at in range(0, attention.head_dim * number_bytes, size)]

    def _dot(self, queries: list[Any], key: Any) -> Any:
        """Multiplies a query with a key, partially summed in each lane."""
        builder, attention = self.builder, self.attention
        total = vectors.constant(0, self.lanes)
        for number, query in enumerate(queries):
            if attention.query == "bfloat16":
                pairs = builder.load(vector(INT32, self.lanes), builder.at(key, 4 * self.lanes * number))
                total = builder.intrinsic(_BF16_DOT, total.type, total, query, pairs)
            else:
                total = builder.fma(query, self._numbers(key, number), total)
        return total

    def _numbers(self, place: Any, number: int) -> Any:
        """Reads a vector of a key or a value as float32."""
        width = self.lanes * BITS[self.attention.pages] // 8
        return read(self.builder, self.attention.pages, self.builder.at(place, width * number), self.lanes, None, None)

    def _slot(self, pool: Any, keys: "_Keys", lane: Any) -> Any:
        """Returns the pointer to the key or the value of a lane."""
        builder = self.builder
        row = builder.plus(keys.page, builder.times(builder.plus(keys.slot, lane), self.strides["s"]))
        return builder.at(pool, builder.times(row, self.attention.head_dim * BITS[self.attention.pages] // 8))

    def _scale(self, scales: Any, keys: "_Keys") -> Any:
        """Returns the scale of each slot, in its lane."""
        builder = self.builder
        scale = vectors.constant(0, self.lanes)
        for lane in range(self.lanes):
            slot = builder.plus(keys.slot, builder.min(INDEX(lane), builder.minus(keys.count, 1)))
            row = builder.plus(keys.page, builder.times(slot, self.strides["s"]))
            one = builder.load(FLOAT, builder.at(scales, builder.times(row, 4)))
            scale = builder.build.insert_element(scale, one, INT32(lane))
        return scale

    def _add_values(self, keys: "_Keys", row: Any, decay: Any, bounds: tuple[Any, Any]) -> None:
        """Adds the weighted values to the decayed sum. Values of invisible keys are not read."""
        builder = self.builder
        if self.attention.scaled:
            weights = builder.load(decay.type, self.weights)
            builder.store(builder.build.fmul(weights, self._scale(self.scales[1], keys)), self.weights)
        kept = self._parts_of_sums(row)
        sums = [builder.variable(decay.type, builder.build.fmul(part.get(), decay)) for part in kept]
        with builder.loop(*bounds) as lane:
            weight = builder.splat(builder.load(FLOAT, builder.at(self.weights, builder.times(lane, 4))), self.lanes)
            place = self._slot(self.pools[1], keys, lane)
            for number, part in enumerate(sums):
                part.set(builder.fma(weight, self._numbers(place, number), part.get()))
        for part, summed in zip(kept, sums, strict=True):
            part.set(summed.get())

    def _finish(self) -> None:
        builder, attention = self.builder, self.attention
        output, maxima, totals = self.results

        def finish_row(row: Any, token: Any, head: Any) -> None:
            total = vectors.total(builder, self._total(row).get())
            # Unordered is also true for NaN, which then reaches the output.
            has_any = builder.build.fcmp_unordered(">", total, ir.Constant(FLOAT, 0.0))
            zero, one = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 1.0)
            factor = builder.splat(builder.build.select(has_any, builder.build.fdiv(one, total), zero), self.lanes)
            place = builder.plus(builder.times(token, attention.heads), head)
            for number, part in enumerate(self._parts_of_sums(row)):
                size = BITS[attention.output] // 8
                at = builder.at(output, builder.times(place, size * attention.head_dim), size * self.lanes * number)
                write(builder, attention.output, builder.build.fmul(part.get(), factor), at, None)
            maximum = builder.load(FLOAT, builder.at(self.maxima, builder.times(row, 4)))
            builder.store(builder.build.select(has_any, maximum, zero), builder.at(maxima, builder.times(place, 4)))
            builder.store(total, builder.at(totals, builder.times(place, 4)))

        self._rows(finish_row)


@dataclass(frozen=True)
class _Keys:
    """Up to as many keys of a page as a vector has lanes.

    Attributes:
      first: index of the first key in its sequence.
      slot: slot of the first key.
      count: number of keys, at least 1.
      page: number of vectors in the pool before slot 0 of this head.
    """

    first: Any
    slot: Any
    count: Any
    page: Any
