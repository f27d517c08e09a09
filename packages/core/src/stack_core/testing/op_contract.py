"""Contract checks of an op: value and gradient in every dtype against float64, under jit, vmap, scan and shard_map."""

import functools
import operator
import unittest
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from stack_core.abi.errors import UnsupportedOp
from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import function_of, suite_of
from stack_core.testing.alone import first_call, isolated_value_and_gradients
from stack_core.testing.cases import OpCase

__all__ = ["TOLERANCES", "OpCheck", "accelerator_checks", "assert_close", "draw", "op_checks"]

TOLERANCES: Mapping[str, float] = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Tolerances of the contract, in the sense of `assert_close`, by the dtype of the operands."""

_TRANSFORMED = "transformed"
_SHARD_MAP = "shard_map"
# Oracles run once on tiny arrays, so compiling them would take most of the time.
_QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class OpCheck:
    """One aspect of a case of an op's contract; call it with the implementation under test.

    It raises AssertionError if the implementation is wrong. It raises `unittest.SkipTest`, with the reason from
    `supports`, if the implementation rejects the case. If `supports` rejects only the backward pass, another
    implementation computes the gradient.

    Attributes:
      case: call that is checked.
      aspect: dtype of the operands, "transformed" or "shard_map".
      is_covering: whether the check is part of the covering selection, which still finds a bug in one option or one
        dtype. It checks every case at the tolerance of fp32 (one in three under vmap and scan), one in four in bf16 or
        fp16 as well, and one in eight inside `jax.shard_map`.
    """

    case: OpCase
    aspect: str
    is_covering: bool

    def __call__(self, implementation: OpImplementation) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* was named and runs forward, but not backward", RuntimeWarning)
            try:
                if self.aspect in TOLERANCES:
                    _check_against_oracle(self.case, implementation, self.aspect)
                elif self.aspect == _TRANSFORMED:
                    _check_transformations(self.case, implementation)
                else:
                    _check_in_shard_map(self.case, implementation)
            except UnsupportedOp as error:
                raise unittest.SkipTest(str(error)) from error

    def isolated(self, implementation: OpImplementation) -> None:
        """Checks the implementation's own functions in the aspect's dtype, without dispatch and JAX's derivatives.

        This is how kernels are checked in an interpreter that fills unwritten memory with NaN.

        Raises:
          unittest.SkipTest: the aspect is not a dtype, or the implementation rejects the call.
        """
        if self.aspect not in TOLERANCES:
            raise unittest.SkipTest("transformed calls do not reach the implementation directly")
        op, arrays = function_of(self.case.op), draw(self.case, self.aspect)

        def call(arrays: Mapping[str, Any]) -> Any:
            return self.case.call(op, arrays, self.case.options)

        output, gradients = isolated_value_and_gradients(call, arrays, implementation, _cotangent)
        expected, of_leaves = _expected(self.case, self.aspect)
        if gradients is None:
            assert_close((output, {}), (expected, {}), TOLERANCES[self.aspect])
            return
        given = _by_leaf(arrays, gradients)
        found = {
            path: np.zeros_like(exact) if given[path] is None else given[path] for path, exact in of_leaves.items()
        }
        assert_close((output, found), (expected, of_leaves), TOLERANCES[self.aspect])

    def seen(self, dtype: str) -> OpCall:
        """Returns the call as `supports` sees it, with operands of a dtype, without running anything.

        Raises:
          unittest.SkipTest: a requirement of the call is missing; the message names the requirement.
        """
        op = function_of(self.case.op)
        return first_call(lambda arrays: self.case.call(op, arrays, self.case.options), draw(self.case, dtype))

    def __str__(self) -> str:
        return f"{self.case.name}-{self.aspect}"


def op_checks(op: str) -> tuple[OpCheck, ...]:
    """Returns all checks of an op's contract.

    @pytest.mark.parametrize("check", op_checks("attention"), ids=str)
    def test_contract(check):
        check(MY_IMPLEMENTATION)
    """
    return tuple(
        OpCheck(case, aspect, aspect in _covering_aspects(place))
        for place, case in enumerate(suite_of(op).cases)
        for aspect in (*TOLERANCES, _TRANSFORMED, _SHARD_MAP)
        # Ops with collectives run inside a shard_map of their own in every case.
        if aspect != _SHARD_MAP or case.call is OpCase.call
    )


def accelerator_checks(op: str) -> tuple[OpCheck, ...]:
    """Returns the checks of an op's contract in bf16 and fp16 at sizes that kernels of accelerators support.

    Each call is checked in value and gradient. The covering selection has every twelfth call, in one dtype.
    A CPU implementation must pass these checks too.
    """
    dtypes = ("bfloat16", "float16")
    return tuple(
        OpCheck(case, dtype, place % 12 == 0 and dtype == dtypes[place // 12 % 2])
        for place, case in enumerate(suite_of(op).for_accelerators)
        for dtype in dtypes
    )


def _covering_aspects(place: int) -> tuple[str, ...]:
    """Returns the aspects of the covering selection for the case at an index of its suite."""
    return (
        _TRANSFORMED if place % 3 == 1 else "float32",
        *(["bfloat16"] if place % 8 == 0 else []),
        *(["float16"] if place % 8 == 2 else []),
        *([_SHARD_MAP] if place % 8 == 0 else []),
    )


def _check_against_oracle(case: OpCase, implementation: OpImplementation, dtype: str) -> None:
    arrays = draw(case, dtype)
    compiled = jax.jit(_value_and_gradients(case, implementation)).lower(arrays).compile()
    _poison_memory_for(compiled)
    assert_close(compiled(arrays), _expected(case, dtype), TOLERANCES[dtype])


def _poison_memory_for(compiled: Any) -> None:
    """Fills freed device memory with NaN, so that a kernel that leaves a result or its scratch unwritten is noticed.

    The allocators of accelerators hand freed blocks of a size to the next request of this size.
    """
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(compiled.out_info)]
    temporary_bytes = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    # Bytes of ones are NaN in every floating dtype.
    freed = [jax.device_put(np.full(size, 0xFF, np.uint8)) for size in (*sizes, temporary_bytes)]
    jax.block_until_ready(freed)


def _check_transformations(case: OpCase, implementation: OpImplementation) -> None:
    """Checks each call of a jitted scan over a vmap against the oracle."""
    seeds = np.array([[0, 1], [1, 0]])
    stacked = jax.tree.map(lambda *calls: np.stack(calls)[seeds], *(draw(case, "float32", seed) for seed in (0, 1)))
    vmapped = jax.vmap(_value_and_gradients(case, implementation))
    scanned = jax.jit(lambda stacked: jax.lax.scan(lambda carry, arrays: (carry, vmapped(arrays)), (), stacked)[1])
    actual = jax.tree.map(np.asarray, scanned(stacked))
    for place, seed in np.ndenumerate(seeds):
        one = jax.tree.map(operator.itemgetter(place), actual)
        assert_close(one, _expected(case, "float32", int(seed)), TOLERANCES["float32"])


def _check_in_shard_map(case: OpCase, implementation: OpImplementation) -> None:
    """Checks a call inside `jax.shard_map`, with every other array replicated, against the oracle."""
    leaves, structure = jax.tree.flatten(draw(case, "float32"))
    varies = [place % 2 == 0 for place in range(len(leaves))]
    specs = tuple(PartitionSpec("part") if each else PartitionSpec() for each in varies)

    def local(*leaves: Any) -> Any:
        arrays = [x[0] if each else x for x, each in zip(leaves, varies, strict=True)]
        found = _value_and_gradients(case, implementation)(jax.tree.unflatten(structure, arrays))
        return jax.tree.map(lambda x: x[None], vary_alike(arrays[0], found)[1])

    mesh = jax.make_mesh((1,), ("part",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("part"))
    actual = jax.jit(mapped)(*(x[None] if each else x for x, each in zip(leaves, varies, strict=True)))
    one = jax.tree.map(operator.itemgetter(0), actual)
    assert_close(one, _expected(case, "float32"), TOLERANCES["float32"])


@functools.cache
def _expected(case: OpCase, dtype: str, seed: int = 0) -> Any:
    """Returns the oracle's (output, gradients) for the arrays of a case, rounded to a dtype."""
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, draw(case, dtype, seed)))
    floating = [place for place, leaf in enumerate(leaves) if _is_floating(leaf)]
    # Float64 is emulated on TPUs, and a chip under test is no judge of itself.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.default_device(_cpu()):
        exact = [leaves[place].astype(np.float64) for place in floating]
        return jax.tree.map(np.asarray, _oracle(case, seed, structure)(exact))


def _cpu() -> jax.Device | None:
    """Returns a CPU, or None for JAX's default device if JAX_PLATFORMS excludes CPUs."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@functools.cache
def _oracle(case: OpCase, seed: int, structure: Any) -> Callable[[list[Any]], Any]:
    """Returns the oracle as a function of the floating arrays, with the other arrays as constants."""
    constants = jax.tree.leaves(jax.tree.map(np.asarray, draw(case, "float32", seed)))

    def value_and_gradients(exact: list[Any]) -> Any:
        floating = iter(exact)
        leaves = [next(floating) if _is_floating(leaf) else leaf for leaf in constants]
        return _value_and_gradients(case, None)(jax.tree.unflatten(structure, leaves))

    return jax.jit(value_and_gradients, compiler_options=_QUICK_TO_COMPILE)


def _value_and_gradients(case: OpCase, implementation: OpImplementation | None) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function from the arrays to (output, gradients by leaf), of the oracle if `implementation` is None."""

    def call(arrays: Mapping[str, Any]) -> Any:
        if implementation is None:
            return suite_of(case.op).oracle(**arrays, **case.options)
        op = functools.partial(function_of(case.op), implementation=implementation)
        return case.call(op, arrays, case.options)

    def value_and_gradients(arrays: Mapping[str, Any]) -> Any:
        leaves, structure = jax.tree.flatten_with_path(dict(arrays))
        moving = {
            place: leaf
            for place, (path, leaf) in enumerate(leaves)
            if path[0].key not in case.fixed and _is_floating(leaf)
        }

        def with_values(moving: Mapping[int, Any]) -> Any:
            rest = [moving.get(place, leaf) for place, (_, leaf) in enumerate(leaves)]
            return call(jax.tree.unflatten(structure, rest))

        output, vjp = jax.vjp(with_values, moving)
        like_output = jax.tree.map(lambda x, of_one: vary_alike(x, of_one)[0], _cotangent(output), output)
        gradients = vjp(like_output)[0]
        return output, {jax.tree_util.keystr(leaves[place][0]): x for place, x in gradients.items()}

    return value_and_gradients


def _by_leaf(arrays: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the gradient of each leaf of the arrays by its path; None for a leaf that a backward pass left out."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        leaves, structure = jax.tree.flatten_with_path({name: array})
        given = gradients.get(name)
        of_leaves = [None] * len(leaves) if given is None else structure.flatten_up_to({name: given})
        found |= {jax.tree_util.keystr(path): x for (path, _), x in zip(leaves, of_leaves, strict=True)}
    return found


def _cotangent(output: Any) -> Any:
    """Returns an irregular cotangent that is the same in every call and exact in bf16."""

    def entries(x: Any) -> Any:
        return jnp.asarray(np.round(64 * np.cos(np.arange(1, x.size + 1))).reshape(x.shape) / 64, x.dtype)

    return jax.tree.map(entries, output)


def draw(case: OpCase, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Samples the arrays of a case, with floating arrays in a dtype."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{case.op}/{case.name}".encode())])
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if x.dtype == np.float64 else jnp.asarray(x), dict(case.arrays(rng))
    )


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Compares two pairs (output, gradients), pytrees of arrays.

    The largest error of each array may be `tolerance` times its largest finite entry, which counts as at least 1e-3.
    Infinities and NaN must agree.

    Raises:
      AssertionError: an array differs; the message names it and its error.
    """

    def compare(path: Any, a: Any, e: Any) -> None:
        what = ("output", "gradient")[path[0].idx] + jax.tree_util.keystr(path[1:])
        a, e = (x if x.dtype.itemsize >= 4 else x.astype(np.float32) for x in map(np.asarray, (a, e)))
        assert a.shape == e.shape, f"{what}: shape {a.shape}, expected {e.shape}"
        finite = np.isfinite(e)
        np.testing.assert_array_equal(np.isfinite(a), finite, err_msg=f"{what}: finite entries differ")
        np.testing.assert_array_equal(a[~finite], e[~finite], err_msg=f"{what}: infinities differ")
        if finite.any():
            error, allowed = np.abs(a[finite] - e[finite]).max(), tolerance * max(np.abs(e[finite]).max(), 1e-3)
            assert error <= allowed, f"{what}: off by {error:.3g}, {allowed:.3g} allowed"

    jax.tree.map_with_path(compare, actual, expected)
