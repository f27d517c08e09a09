"""What every implementation says of random calls on eight chips, and whether what it accepts compiles for them.

`supports` answers from shapes and the chip, in words; it never raises, and its default config is among those it takes.
The calls are those of `random_calls.py`, and larger ones in the tiles that kernels want.
"""

import dataclasses
import functools
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip, use_target
from stack_core.testing import Quantized, first_call
from stack_kernels.from_tokamax import missing
from stack_kernels.laboratory.programs import kernels_of
from stack_kernels.laboratory.table import is_of_tokamax
from stack_kernels.laboratory.without_cudnn import pretend_cudnn
from stack_kernels.laboratory.without_tokamax import pretend_tokamax
from stack_kernels.laboratory.worker import target_of

from .random_calls import OPS

CHIPS = ("a100-80gb", "h100", "h200", "b200", "v5e", "v5p", "v6e", "v7x")
PLATFORMS = {chip: "tpu" if chip.startswith("v") else "gpu" for chip in CHIPS}
DTYPES = ("bfloat16", "float32", "float16")
SCALES = (1, 1, 2, 8, 16, 64, 128)
MAX_ENTRIES = 2**22
SELDOM_TAKEN = {"attention": ("bias", "kv_lengths", "sinks", "softcap"), "paged_attention": ("sinks", "softcap")}


def implementations(op: str) -> list[OpImplementation]:
    found = sorted(entry.name for entry in registries.ops.entries() if entry.provider == "kernels")
    return [registries.ops[name] for name in found if name.startswith(f"{op}/")]


@functools.cache
def calls(op: str, count: int) -> tuple[OpCall, ...]:
    """Random calls in both directions, as `supports` sees them."""
    plain = [_call(op, number) for number in range(count)]
    drawn = [*plain, *(again for call in plain[: count // 5] for again in _quantized(call))]
    return tuple(each for call in drawn for each in _directions(call))


@functools.cache
def _call(op: str, number: int) -> OpCall:
    rng = np.random.default_rng([zlib.crc32(op.encode()), number])
    signature = OPS[op](rng)
    arrays = jax.eval_shape(lambda: signature.draw(np.random.default_rng(0), DTYPES[number % 3]))
    scale = int(rng.choice(SCALES))
    call = first_call(lambda arrays: getattr(ops, op)(**arrays, **signature.options), arrays)
    return call if scale == 1 else _grown(call, scale)


def _quantized(call: OpCall) -> Iterator[OpCall]:
    """The call again with each of its matrices in int8, a scale for each column."""
    for name in ("weight", "w_gate", "rhs"):
        if (array := call.arrays.get(name)) is not None and hasattr(array, "shape") and array.size:
            codes, scale = np.zeros(array.shape, np.int8), np.zeros((*array.shape[:-2], 1, array.shape[-1]), np.float32)
            yield dataclasses.replace(call, arrays={**call.arrays, name: Quantized(codes, scale)})


def _grown(call: OpCall, scale: int) -> OpCall:
    """With each axis but those of size 1 `scale` times as long; quantized operands stay, and with them the call.

    As does a call with an array of more than `MAX_ENTRIES`, whose temporaries might not fit on a chip.
    """
    if any(hasattr(type(x), "__stack_qview__") for x in call.arrays.values()):
        return call
    longer = lambda x: jax.ShapeDtypeStruct(tuple(size if size == 1 else size * scale for size in x.shape), x.dtype)
    arrays = jax.tree.map(longer, dict(call.arrays))
    if any(x.size > MAX_ENTRIES for x in jax.tree.leaves(arrays)):
        return call
    if "query_starts" in arrays:  # one more than there are sequences
        places = (arrays["kv_lengths"].shape[0] + 1,)
        arrays["query_starts"] = jax.ShapeDtypeStruct(places, arrays["query_starts"].dtype)
    if call.options.get("layout") == "psh2d":  # of keys and values
        pool = arrays["key_pages"]
        arrays["key_pages"] = jax.ShapeDtypeStruct((*pool.shape[:3], 2, pool.shape[4]), pool.dtype)
    return dataclasses.replace(call, arrays=arrays)


def _directions(call: OpCall) -> Iterator[OpCall]:
    yield call
    named = ("lse", "inverse_rms", "gate", "up", OWN)
    for residuals in ((), named):
        yield dataclasses.replace(call, direction="backward", forward="reference", residuals=residuals)


def check_answers(op: str, chip: str, count: int) -> None:
    found = registries.chips[chip]
    with use_chip(found), pretend_tokamax():
        for implementation in implementations(op):
            if implementation.platforms is not None and PLATFORMS[chip] not in implementation.platforms:
                continue
            for number, call in enumerate(calls(op, count)):
                config = implementation.default and implementation.default(call, found)
                answer = implementation.supports(call, found, config)
                assert answer is True or (isinstance(answer, str) and answer), f"{op}/{implementation.name}: {answer!r}"
                if answer is True and implementation.default is not None:
                    assert config is not None, f"{op}/{implementation.name} takes {call} without a config"
                    if number % 10 == 0:
                        assert all(type(each) is type(config) for each in implementation.space(call, found))


@pytest.mark.parametrize("op", sorted(OPS))
def test_it_answers_random_calls_on_every_chip(op: str) -> None:
    for chip in CHIPS:
        check_answers(op, chip, 15)


def _quantized_weight(d_in: int, d_out: int, shared: int | None = None) -> Quantized:
    return Quantized(np.zeros((d_in, d_out), np.int8), np.zeros((d_in // (shared or d_in), d_out), np.float32))


def _of_shapes(op: str, shapes: dict[str, Any], direction: str = "forward", **options: Any) -> OpCall:
    integers = ("labels", "group_sizes", "block_tables", "kv_lengths", "query_starts")
    kinds = dict.fromkeys(integers, "int32") | {"mask": "bool"}
    arrays = {
        name: x if isinstance(x, Quantized) else jax.ShapeDtypeStruct(x, jnp.dtype(kinds.get(name, "bfloat16")))
        for name, x in shapes.items()
    }
    call = first_call(lambda arrays: getattr(ops, op)(**arrays, **options), arrays)
    kept = ("lse", "inverse_rms", OWN)
    return call if direction == "forward" else dataclasses.replace(call, direction=direction, residuals=kept)


def _linear(d_in: int, d_out: int, shared: int | None = None) -> OpCall:
    return _of_shapes("linear", {"x": (16, d_in), "weight": _quantized_weight(d_in, d_out, shared)})


def _attention(head_dim: int, direction: str = "forward") -> OpCall:
    return _of_shapes("attention", dict.fromkeys(("query", "key", "value"), (1, 256, 2, head_dim)), direction)


def _paged(heads: int) -> OpCall:
    shapes = {"query": (128, heads, 128), "key_pages": (9, 128, heads, 2, 128), "block_tables": (4, 8)}
    shapes |= {"kv_lengths": (4,), "query_starts": (5,)}
    return _of_shapes("paged_attention", shapes, layout="psh2d", value_pages=None)


def _gated(d_in: int) -> OpCall:
    return _of_shapes("gated_linear_unit", {"x": (16, d_in), "w_gate": (d_in, 256), "w_up": (d_in, 256)})


def _entropy(embed: int, direction: str = "forward") -> OpCall:
    shapes = {"hidden": (16, embed), "weight": (embed, 2048), "labels": (16,)}
    return _of_shapes("linear_cross_entropy", shapes, direction)


def _norm(rows: int, features: int) -> OpCall:
    return _of_shapes("norm", {"x": (rows, features), "scale": (features,)})


@pytest.mark.parametrize(
    ("name", "chip", "call_of", "sizes", "others"),
    [
        ("linear/mosaic_tpu", "v6e", _linear, (512, 512), (384, 512)),
        ("linear/mosaic_tpu", "v6e", _linear, (512, 512, 128), (512, 512, 256)),
        ("linear/mosaic_gpu", "h100", _linear, (512, 512), (576, 576)),
        ("attention/tokamax", "h100", _attention, (64,), (128,)),
        ("attention/tokamax", "h100", _attention, (64, "backward"), (256, "backward")),
        ("paged_attention/ragged", "v6e", _paged, (2,), (32,)),
        ("gated_linear_unit/tokamax", "h100", _gated, (128,), (64,)),
        ("linear_cross_entropy/tokamax", "v6e", _entropy, (512,), (384,)),
        ("norm/mosaic_tpu", "v6e", _norm, (512, 256), (512, 8192)),
        ("norm/tokamax_triton", "h100", _norm, (512, 256), (512, 16384)),
    ],
)
def test_a_config_of_another_call_is_refused_where_it_does_not_fit(
    name: str, chip: str, call_of: Callable[..., OpCall], sizes: tuple[Any, ...], others: tuple[Any, ...]
) -> None:
    found, chosen = registries.ops[name], registries.chips[chip]
    call, other = call_of(*sizes), call_of(*others)
    with use_chip(chosen), pretend_tokamax():
        assert found.supports(other, chosen, found.default(other, chosen)) is True
        theirs = list(found.space(other, chosen))
        foreign = [config for config in found.space(call, chosen) if config not in theirs]
        assert foreign
        for config in foreign:
            assert str(config) in str(found.supports(other, chosen, config))


@pytest.mark.parametrize("embed", [256, 768, 1024])
def test_both_passes_of_the_cross_entropy_take_the_tiles_that_they_share(embed: int) -> None:
    tokamax, chip = registries.ops["linear_cross_entropy/tokamax"], registries.chips["v6e"]
    tiles = list(tokamax.space(_entropy(embed), chip))
    assert tiles == list(tokamax.space(_entropy(embed, "backward"), chip))
    assert tiles and all(embed != 2 * tile.embed for tile in tiles)  # the backward pass does not take halves


@pytest.mark.parametrize(
    ("direction", "more", "takes"),
    [
        ("forward", {"mask": (1, 1, 1, 8192)}, True),
        ("forward", {"mask": (2, 16, 1, 8192)}, False),  # the kernel's mask has all queries
        ("forward", {"bias": (1, 16, 1, 1)}, True),
        ("backward", {"bias": (1, 16, 1, 1)}, False),  # its gradient has all queries and keys at first
    ],
)
def test_tokamaxs_attention_counts_what_it_makes_of_a_mask_and_a_bias(
    direction: str, more: dict[str, Any], takes: bool
) -> None:
    shapes = dict.fromkeys(("query", "key", "value"), (2, 8192, 16, 64))
    call, chip = _of_shapes("attention", {**shapes, **more}, direction), registries.chips["h100"]
    tokamax = registries.ops["attention/tokamax"]
    with pretend_tokamax():
        answer = tokamax.supports(call, chip, None)
    assert answer is True if takes else " would take " in str(answer)


def test_tokamaxs_attention_has_barriers_for_three_stages_of_a_mask_on_hopper() -> None:
    shapes = dict.fromkeys(("query", "key", "value"), (1, 256, 2, 64))
    tokamax, chip = registries.ops["attention/tokamax"], registries.chips["h100"]
    stages = [
        {tile.stages for tile in tokamax.space(_of_shapes("attention", {**shapes, **more}), chip)}
        for more in ({}, {"mask": (1, 1, 256, 256)})
    ]
    assert stages == [{2, 3, 4}, {2, 3}]


def test_a_config_of_narrow_products_is_refused_where_wider_numbers_do_not_fit() -> None:
    megablox, chip = registries.ops["ragged_dot/megablox"], registries.chips["v6e"]
    call = _of_shapes("ragged_dot", {"lhs": (512, 1024), "rhs": (2, 1024, 1024), "group_sizes": (2,)})
    wide = {name: call.arrays[name].update(dtype=jnp.float32) for name in ("lhs", "rhs")}
    wide = dataclasses.replace(call, arrays={**call.arrays, **wide})
    answers = {config: megablox.supports(wide, chip, config) for config in megablox.space(call, chip)}
    fitting = set(megablox.space(wide, chip))
    assert {config for config, answer in answers.items() if answer is True} == fitting != set(answers)


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(OPS))
def test_it_answers_a_thousand_random_calls_on_every_chip(op: str) -> None:
    for chip in CHIPS:
        check_answers(op, chip, 334)  # in three directions, and some with quantized matrices
    assert len(calls(op, 334)) >= 1000


def accepted(implementation: OpImplementation, chip: str, count: int) -> list[tuple[int, OpCall]]:
    """The first calls that it takes forward, of many."""
    found: list[tuple[int, OpCall]] = []
    chosen = registries.chips[chip]
    with use_chip(chosen), pretend_cudnn():
        for number in range(150 * count):
            call = _call(implementation.op, number)
            if any(0 in x.shape for x in jax.tree.leaves(dict(call.arrays))):
                continue  # core answers an empty call itself
            for each in (call, *_plainer(call)):
                config = implementation.default and implementation.default(each, chosen)
                if implementation.supports(each, chosen, config) is True:
                    found.append((number, each))
                    break
            if len(found) == count:
                break
    return found


def _plainer(call: OpCall) -> Iterator[OpCall]:
    """The call without what few kernels take, and that with codes for each of its matrices."""
    left_out = SELDOM_TAKEN.get(call.op, ())
    arrays = {name: None if name in left_out else x for name, x in call.arrays.items() if name != "query_offset"}
    options = {name: None if name in left_out else value for name, value in call.options.items()}
    if "query_offset" in call.arrays:
        options["query_offset"] = 0
    plain = dataclasses.replace(call, arrays=arrays, options=options)
    yield plain
    yield from _quantized(plain)


def check_compiles(chip: str, count: int) -> None:
    target = target_of(chip)
    place = jax.sharding.SingleDeviceSharding(target.devices[0])
    problems, tried = [], 0
    for implementation in (each for op in sorted(OPS) for each in implementations(op)):
        name = f"{implementation.op}/{implementation.name}"
        if PLATFORMS[chip] not in (implementation.platforms or ()) or (is_of_tokamax(name) and missing() is not None):
            continue
        for number, call in accepted(implementation, chip, count):
            tried += 1
            arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), dict(call.arrays))
            try:
                with pretend_cudnn(), use_target(target), warnings.catch_warnings():
                    # It may be taken forward alone, and that is said.
                    warnings.filterwarnings("ignore", ".* was named and runs forward, but not backward", RuntimeWarning)
                    compiled = jax.jit(_value_and_gradients(call, implementation)).lower(arrays).compile()
                assert kernels_of(compiled.as_text() or ""), "the program calls no kernel"
            except Exception as error:  # compilers fail in any way
                problems.append(f"{name} on {chip}, call {number}: {type(error).__name__}: {str(error)[:300]}\n{call}")
    assert tried, f"nothing takes a call on {chip}"
    assert not problems, "\n".join(problems)


def _value_and_gradients(call: OpCall, implementation: OpImplementation) -> Any:
    """Of the floating operands, by its own backward pass where it has one for this call."""
    moving = [name for name, x in call.arrays.items() if x is not None and _is_floating(x)]
    function = getattr(ops, call.op)

    def total(moved: Any, arrays: Any) -> Any:
        options = {name: value for name, value in call.options.items() if name != "scale" or call.op == "attention"}
        result = function(**{**arrays, **moved}, **options, implementation=implementation.name)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(result))

    if implementation.backward is None:
        return lambda arrays: total({}, arrays)
    return lambda arrays: jax.value_and_grad(total)({name: arrays[name] for name in moving}, arrays)


def _is_floating(array: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(array))


@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip.startswith("v")])
def test_a_few_accepted_calls_compile_for_a_tpu(chip: str) -> None:
    check_compiles(chip, 2)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("chip", ["h100"])
def test_a_few_accepted_calls_compile_for_a_gpu(chip: str) -> None:
    check_compiles(chip, 2)  # Mosaic-GPU compiles for one chip a process


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip.startswith("v")])
def test_sixty_accepted_calls_compile_for_a_tpu(chip: str) -> None:
    check_compiles(chip, 60)


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.parametrize("chip", ["a100-80gb", "h100", "h200", "b200"])
def test_sixty_accepted_calls_compile_for_a_gpu(chip: str) -> None:
    check_compiles(chip, 60)
