"""`ring_attention` by a kernel of `attention`, which computes one pair of blocks of the sequence at a time.

Outputs of several pairs are merged by their log-sum-exp. Backward, the kernel gets the output and the lse of the full
sequence, so its gradients for a block of keys are that block's share (see `stack_core.ops.definitions.attention`):

    dz_ij = exp(z_ij - lse_i) (do_i v_j - do_i o_i)

Kernels need static positions, and a device's distance from its keys is only known at run time. Pairs of blocks have few
relations, such as "hidden" and "diagonal", and `lax.switch` selects among the kernels for these.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops import PackedSegments
from stack_core.ops.building import (
    BackwardCall,
    answer,
    as_backward,
    choose,
    implementations_of,
    joined_by_sinks,
    vary_alike,
)
from stack_kernels.attention.sinks import sinks_gradient
from stack_kernels.attention.splash import splash
from stack_kernels.supports import first_problem

__all__ = ["BLOCKS", "BlockKernel", "blocks"]


@dataclass(frozen=True)
class BlockKernel:
    """Implementation of `attention` that computes pairs of blocks, and its config."""

    attention: str
    config: Any

    def __str__(self) -> str:
        return self.attention if self.config is None else f"{self.attention} {self.config}"


def blocks(*, interpret: Any = None) -> OpImplementation:
    """Builds the implementation, which calls the `attention` that core would choose among those that fit.

    Args:
      interpret: interprets the splash kernel on any device and uses no other; see `splash`.
    """
    kernel = None if interpret is None else splash(interpret=interpret)

    def named(config: BlockKernel) -> OpImplementation:
        return kernel or implementations_of("attention")[config.attention]

    return OpImplementation(
        "ring_attention",
        "blocks",
        lambda **call: _forward(named(call["config"]), **call),
        as_backward(lambda call, *, config: _backward(named(config), call, config)),
        platforms=("gpu", "tpu"),
        supports=lambda call, chip, config: _supports(call, config, kernel),
        default=lambda call, chip: _default(call, chip, kernel),
        residuals=("lse",),
        is_opaque=True,
        exports=False,
    )


def _supports(call: OpCall, config: BlockKernel | None, kernel: OpImplementation | None) -> bool | str:
    problems = {
        "it takes one query_offset for all rows, known while tracing": "query_offset" in call.arrays,
        "it takes no gradient of lse": call.direction == "backward" and call.options["return_lse"],
        f"{call.forward!r} provides no lse": call.direction == "backward" and "lse" not in call.residuals,
    }
    if any(problems.values()):
        return first_problem(problems)
    if config is not None:
        return True
    refusals = (f"{name}: {reason}" for name, reason in _answers(call, kernel).items())
    return f"no kernel of attention supports its blocks ({'; '.join(refusals)})"


def _default(call: OpCall, chip: Chip, kernel: OpImplementation | None) -> BlockKernel | None:
    if "query_offset" in call.arrays:
        return None
    able = {name: found for name, found in _kernels(kernel).items() if _answers(call, kernel)[name] is True}
    if not able:
        return None
    choice = choose(_block_calls(call)[0], able)
    return BlockKernel(choice.implementation.name, choice.config)


def _kernels(kernel: OpImplementation | None) -> dict[str, OpImplementation]:
    if kernel is not None:
        return {kernel.name: kernel}
    return {name: found for name, found in implementations_of("attention").items() if name != "reference"}


def _answers(call: OpCall, kernel: OpImplementation | None) -> dict[str, bool | str]:
    """Returns for each kernel True, or the reason against it: the first block call that it does not support."""
    calls = _block_calls(call)
    return {
        name: next((found for each in calls if (found := _answer(implementation, each)) is not True), True)
        for name, implementation in _kernels(kernel).items()
    }


def _answer(kernel: OpImplementation, call: OpCall) -> bool | str:
    if "lse" not in kernel.residuals:
        return "it provides no lse"
    # Only a backward pass that requires the lse computes its weights from it.
    if call.direction == "backward" and answer(kernel, replace(call, residuals=())) is True:
        return "its backward pass does not read the lse"
    return answer(kernel, call)


def _block_calls(call: OpCall) -> list[OpCall]:
    """Returns the calls of `attention`, one for each shape and relation of two blocks."""
    found: dict[Any, OpCall] = {}
    for pair in _pairs(call.arrays, call.options):
        arrays: dict[str, Any] = dict(call.arrays, sinks=None, bias=None, mask=None)
        for name, rows in (("query", pair.rows), ("key", pair.keys), ("value", pair.keys)):
            arrays[name] = _resized(arrays[name], rows)
        if arrays["segment_ids"] is not None:
            of_queries, of_keys = arrays["segment_ids"]
            arrays["segment_ids"] = _same_kind(
                arrays["segment_ids"], _resized(of_queries, pair.rows), _resized(of_keys, pair.keys)
            )
        for relation in pair.relations:
            if relation is not None:
                shape = (arrays["query"].shape, arrays["key"].shape, relation)
                found[shape] = replace(call, op="attention", arrays=arrays, options=relation.of(call.options))
    return list(found.values())


def _resized(struct: Any, rows: slice) -> Any:
    shape = (struct.shape[0], rows.stop - rows.start, *struct.shape[2:])
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def _same_kind(segment_ids: Any, of_queries: Any, of_keys: Any) -> Any:
    found = (of_queries, of_keys)
    return PackedSegments(*found) if isinstance(segment_ids, PackedSegments) else found


class _Relation(NamedTuple):
    """Position of query 0 relative to key 0 of two blocks, and whether all keys are visible to all queries."""

    offset: int
    is_full: bool

    def of(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of `attention` for two blocks."""
        masks = {"causal": False, "window": None} if self.is_full else {name: options[name] for name in _MASKS}
        return {
            **masks,
            "query_offset": self.offset,
            "return_lse": False,
            "softcap": options["softcap"],
            "scale": options["scale"],
        }


_MASKS = ("causal", "window")


@dataclass(frozen=True, eq=False)
class _Pair:
    """A block of queries and a block of keys, each at the same rows of every device.

    Attributes:
      number: indices of the two blocks on their devices.
      rows: rows of the queries.
      keys: rows of the keys.
      key_starts: position of the first key in the full sequence, by device.
      relations: possible relations; None if no key is visible.
      table: index of the relation, int[device, distance], for keys of the device `distance` steps before.
    """

    number: tuple[int, int]
    rows: slice
    keys: slice
    key_starts: np.ndarray
    relations: tuple[_Relation | None, ...]
    table: np.ndarray

    def compute(
        self, run: Callable[[_Relation], Any], otherwise: Callable[[], Any], device: Any, distance: Any, among: Any
    ) -> Any:
        """Returns `run(relation)`, or `otherwise()` for hidden keys; None if the keys are hidden on every device.

        Args:
          device: index of the device.
          distance: distance of the keys.
          among: all possible distances.
        """
        possible = sorted(set(self.table[:, list(among)].flat))
        branches = [
            otherwise if relation is None else functools.partial(run, relation)
            for relation in (self.relations[index] for index in possible)
        ]
        if all(self.relations[index] is None for index in possible):
            return None
        if len(branches) == 1:
            return branches[0]()
        branch = jnp.asarray(np.searchsorted(possible, self.table))[device, distance]
        return lax.switch(branch, branches)


def _pairs(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[_Pair]:
    """Returns the pairs of blocks of two devices that any device may have to compute."""
    devices, zigzag = _devices(options["axis_name"]), options["order"] == "zigzag"
    left, right = options["window"] or (None, None)
    right = 0 if options["causal"] else right
    q_size, k_size = (arrays[name].shape[1] // (2 if zigzag else 1) for name in ("query", "key"))
    places = np.arange(devices)[:, None]
    # Block of the sequence by device and index on the device.
    order = np.concatenate([places, 2 * devices - 1 - places], axis=1) if zigzag else places
    senders = (places - places.T) % devices
    packed = isinstance(arrays["segment_ids"], PackedSegments)

    def relation(offset: int) -> _Relation | None:
        hidden_after = right is not None and offset + q_size - 1 + right < 0
        if hidden_after or (left is not None and offset - left > k_size - 1):
            return None
        sees_last = right is None or offset + right >= k_size - 1
        if sees_last and (left is None or offset + q_size - 1 - left <= 0):
            # Without a mask the offset matters to packed segments only, and there not beyond the nearest key.
            return _Relation(min(max(offset, -q_size), k_size) if packed else 0, True)
        return _Relation(offset, False)

    found = list[_Pair]()
    for row in range(order.shape[1]):
        for column in range(order.shape[1]):
            # [device, distance] of query 0 from key 0.
            offsets = options["query_offset"] + q_size * order[:, row, None] - k_size * order[senders, column]
            of_each = {int(offset): relation(int(offset)) for offset in np.unique(offsets)}
            relations = tuple(dict.fromkeys(of_each.values()))
            index = {offset: relations.index(each) for offset, each in of_each.items()}
            table = np.vectorize(index.get, otypes=[np.int32])(offsets)
            rows, keys = (
                slice(number * size, (number + 1) * size) for number, size in ((row, q_size), (column, k_size))
            )
            found.append(_Pair((row, column), rows, keys, k_size * order[:, column], relations, table))
    return found


def _devices(axis_name: Any) -> int:
    try:
        return int(lax.axis_size(axis_name))
    except NameError:  # outside of `jax.shard_map`, as in tables of what is supported: a ring of one device
        return 1


class _Keys(NamedTuple):
    """Keys, values and segment ids that travel around the ring."""

    key: Any
    value: Any
    segments: Any


@dataclass(frozen=True)
class _Ring:
    """A call on one device."""

    arrays: Mapping[str, Any]
    options: Mapping[str, Any]
    pairs: Sequence[_Pair]

    @classmethod
    def of(cls, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> "_Ring":
        return cls(arrays, options, _pairs(arrays, options))

    @property
    def axis(self) -> Any:
        return self.options["axis_name"]

    @property
    def devices(self) -> int:
        return _devices(self.axis)

    @property
    def blocks(self) -> int:
        """Number of blocks on each device."""
        return math.isqrt(len(self.pairs))

    def keys(self) -> _Keys:
        segments = None if self.arrays["segment_ids"] is None else self.arrays["segment_ids"][1]
        return self.varying(_Keys(self.arrays["key"], self.arrays["value"], segments))

    def varying(self, tree: Any) -> Any:
        """Casts to vary over the ring's devices too, as the results of `lax.switch` do."""
        return vary_alike(tree, dict(self.arrays), lax.axis_index(self.axis))[0]

    def pass_on(self, tree: Any) -> Any:
        """Sends a pytree to the next device and returns the previous device's."""
        following = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, following), tree)

    def operands(self, pair: _Pair, keys: _Keys, distance: Any) -> dict[str, Any]:
        """Returns the array arguments of `attention` for a pair of blocks."""
        segments, lengths = self.arrays["segment_ids"], self.arrays["kv_lengths"]
        if segments is not None:
            segments = _same_kind(segments, segments[0][:, pair.rows], keys.segments[:, pair.keys])
        if lengths is not None:
            sender = jnp.mod(lax.axis_index(self.axis) - distance, self.devices)
            size = pair.keys.stop - pair.keys.start
            lengths = jnp.clip(lengths - jnp.asarray(pair.key_starts)[sender], 0, size).astype(jnp.int32)
        return {
            "query": self.arrays["query"][:, pair.rows],
            "key": keys.key[:, pair.keys],
            "value": keys.value[:, pair.keys],
            "segment_ids": segments,
            "kv_lengths": lengths,
            "bias": None,
            "mask": None,
            "sinks": None,
        }


def _forward(
    kernel: OpImplementation, *, config: BlockKernel, requested: frozenset[str], return_lse: bool, **call: Any
) -> tuple[Any, Mapping[str, Any]]:
    arrays = {name: call.pop(name) for name in ("query", "key", "value", "segment_ids", "kv_lengths", "sinks")}
    ring = _Ring.of(arrays, call)
    query, value = arrays["query"], arrays["value"]
    rows = query.shape[1] // ring.blocks
    shape = (query.shape[0], rows, query.shape[2])
    empty = ring.varying((jnp.zeros((*shape, value.shape[3]), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)))

    def attend(pair: _Pair, operands: Any, relation: _Relation) -> Any:
        options = relation.of(call)
        found, residuals = kernel.forward(
            **operands, **options, **_keywords(kernel, config), requested=frozenset({"lse"})
        )
        return ring.varying((found.astype(jnp.float32), residuals["lse"].astype(jnp.float32)))

    def with_keys(totals: list[Any], keys: _Keys, distance: Any, among: Sequence[int]) -> list[Any]:
        totals = list(totals)
        for pair in ring.pairs:
            operands = ring.operands(pair, keys, distance)
            run = functools.partial(attend, pair, operands)
            found = pair.compute(run, lambda: empty, lax.axis_index(ring.axis), distance, among)
            if found is not None:
                totals[pair.number[0]] = _merged(totals[pair.number[0]], found)
        return totals

    totals, keys, last = [empty] * ring.blocks, ring.keys(), ring.devices - 1

    def step(carry: Any, distance: Any) -> Any:
        keys, totals = carry
        following = ring.pass_on(keys)  # while the kernel computes
        return (following, with_keys(totals, keys, distance, range(last))), None

    if last:
        (keys, totals), _ = lax.scan(step, (keys, totals), jnp.arange(last))
    totals = with_keys(totals, keys, last, (last,))
    output, lse = (jnp.concatenate(parts, axis=1) for parts in zip(*totals, strict=True))
    if arrays["sinks"] is not None:
        share, lse = joined_by_sinks(lse, arrays["sinks"])
        output = output * share[..., None]
    output = output.astype(query.dtype)
    return (output, lse) if return_lse else output, {"lse": lse}


def _backward(kernel: OpImplementation, call: BackwardCall, config: BlockKernel) -> Mapping[str, Any]:
    ring, lse = _Ring.of(call.arrays, call.options), call.residuals["lse"]

    def zeros(name: str) -> Any:
        array = call.arrays[name]
        shape = (array.shape[0], array.shape[1] // ring.blocks, *array.shape[2:])
        return ring.varying(jnp.zeros(shape, jnp.float32))

    def differentiate(pair: _Pair, operands: Any, relation: _Relation) -> Any:
        assert kernel.backward is not None, "chosen by `_answer`"
        found = kernel.backward(
            operands,
            relation.of(call.options),
            call.outputs[:, pair.rows],
            {"lse": lse[:, pair.rows]},
            call.cotangents[:, pair.rows],
            requested=frozenset(_TRAVELLERS),
            **_keywords(kernel, config),
        )
        return ring.varying(tuple(found[name].astype(jnp.float32) for name in _TRAVELLERS))

    def step(carry: Any, distance: Any) -> Any:
        keys, of_keys, of_query = carry
        following, of_keys, of_query = ring.pass_on(keys), list(of_keys), list(of_query)
        for pair in ring.pairs:
            operands, (row, column) = ring.operands(pair, keys, distance), pair.number
            run = functools.partial(differentiate, pair, operands)
            nothing = lambda: tuple(zeros(name) for name in _TRAVELLERS)
            found = pair.compute(run, nothing, lax.axis_index(ring.axis), distance, range(ring.devices))
            if found is not None:
                of_query[row] = of_query[row] + found[0]
                of_keys[column] = tuple(x + more for x, more in zip(of_keys[column], found[1:], strict=True))
        # The gradients of a device's keys travel with the keys, n times, until they are home again.
        return (following, ring.pass_on(of_keys), of_query), None

    start = (ring.keys(), [(zeros("key"), zeros("value"))] * ring.blocks, [zeros("query")] * ring.blocks)
    (_, of_keys, of_query), _ = lax.scan(step, start, jnp.arange(ring.devices))
    parts = (of_query, *zip(*of_keys, strict=True))
    found = {
        name: jnp.concatenate(of_one, axis=1).astype(call.arrays[name].dtype)
        for name, of_one in zip(_TRAVELLERS, parts, strict=True)
    }
    if "sinks" in call.requested:
        gradient = sinks_gradient(call.arrays["sinks"], lse, call.outputs, call.cotangents)
        found["sinks"] = gradient.astype(call.arrays["sinks"].dtype)
    return found


_TRAVELLERS = ("query", "key", "value")


def _keywords(kernel: OpImplementation, config: BlockKernel) -> dict[str, Any]:
    return {} if kernel.default is None else {"config": config.config}


def _merged(one: Any, other: Any) -> Any:
    """Merges attention to two disjoint sets of keys, as pairs (output, lse)."""
    (of_one, lse), (of_other, other_lse) = one, other
    largest = jnp.maximum(lse, other_lse)
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    first, second = jnp.exp(lse - largest), jnp.exp(other_lse - largest)
    total = first + second
    safe = jnp.where(total == 0, 1, total)
    output = (of_one * first[..., None] + of_other * second[..., None]) / safe[..., None]
    return output, jnp.where(total == 0, -jnp.inf, jnp.log(safe) + largest)


BLOCKS = blocks()
