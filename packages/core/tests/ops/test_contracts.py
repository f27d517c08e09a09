import dataclasses
import importlib
import types
import unittest
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from similar_cases import SIMILAR

from stack_core.ops.definitions.attention import REFERENCE as ATTENTION
from stack_core.ops.references import attention_tiles
from stack_core.testing import OpCheck, Quantized, accelerator_checks, op_checks
from stack_core.testing.op_contract import _poison_memory_for, draw

OPS = (
    "attention",
    "gated_linear_unit",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "low_rank",
    "norm",
    "paged_attention",
    "ragged_dot",
    "rope",
    "state_space",
)  # those that need several devices: test_collective_matmul.py, test_exchange.py, test_ring_attention.py


def _contracts() -> Iterator[Any]:
    """Yields all checks; those of sizes for accelerators are slow."""
    for op in OPS:
        yield from (pytest.param(check, id=f"{op}-{check}") for check in op_checks(op))
        yield from (pytest.param(check, id=f"{op}-{check}", marks=pytest.mark.slow) for check in accelerator_checks(op))


@pytest.mark.parametrize("op", SIMILAR)
def test_cases_that_are_left_out_by_default_exist(op: str) -> None:
    assert {check.case.name for check in op_checks(op)} > SIMILAR[op]


@pytest.mark.covering
@pytest.mark.parametrize("check", list(_contracts()))
def test_reference_keeps_its_contract(check: OpCheck) -> None:
    check(importlib.import_module(f"stack_core.ops.definitions.{check.case.op}").REFERENCE)


def _in_chunks(op: str, *names: str) -> list[OpCheck]:
    return [
        c
        for c in op_checks(op)
        if c.case.name in names and (c.aspect == "float32" or c.case.name.startswith("everything"))
    ]


IN_MANY_TILES = (
    "odd_sizes",
    "more_queries_than_keys",
    "window",
    "broadcast_bias",
    "segment_pair",
    "sinks_and_empty_rows",
    "everything",
)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check.aspect == "float32" and name in IN_MANY_TILES else pytest.mark.slow)
        for name in (*IN_MANY_TILES, "left_window", "mask", "kv_lengths", "narrow_values")
        for check in _in_chunks("attention", name)
    ],
    ids=str,
)
def test_attention_in_many_tiles(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "_TILE_BYTES", 1)
    monkeypatch.setattr(attention_tiles, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(attention_tiles, "_FEWEST_KEYS", 3)
    check(ATTENTION)


@pytest.mark.covering
@pytest.mark.parametrize(
    "check",
    _in_chunks("linear_cross_entropy", "plain", "none", "ignored", "bias", "everything_that_heads_have"),
    ids=str,
)
@pytest.mark.parametrize("chunk_bytes", [1, 700])
def test_linear_cross_entropy_in_many_chunks(check: OpCheck, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cross_entropy = importlib.import_module("stack_core.ops.definitions.linear_cross_entropy")
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", chunk_bytes)
    check(cross_entropy.REFERENCE)


class Broken:
    """Ways to be wrong that a contract suite must notice."""

    @staticmethod
    def drops_the_window(**arguments: Any) -> Any:
        return ATTENTION.forward(**{**arguments, "window": None})

    @staticmethod
    def wrong_gradient(*args: Any, **arguments: Any) -> Any:
        assert ATTENTION.backward is not None
        return {**ATTENTION.backward(*args, **arguments), "key": None}


@pytest.mark.parametrize(
    ("functions", "case"),
    [({"forward": Broken.drops_the_window}, "window"), ({"backward": Broken.wrong_gradient}, "plain")],
)
def test_a_wrong_implementation_is_noticed(functions: Any, case: str) -> None:
    broken = dataclasses.replace(ATTENTION, name="broken", **functions)
    for check in op_checks("attention"):
        if check.case.name == case:
            with pytest.raises(AssertionError, match="off by"):
                check(broken)


@pytest.mark.parametrize("wrong", [False, True])
def test_an_implementation_alone_is_held_to_the_gradient_of_a_scale(wrong: bool) -> None:
    linear = importlib.import_module("stack_core.ops.definitions.linear").REFERENCE
    (check, *_) = [
        check
        for check in op_checks("linear")
        if check.aspect == "float32" and isinstance(draw(check.case, "float32").get("weight"), Quantized)
    ]

    def backward(*args: Any, **arguments: Any) -> Any:
        found = linear.backward(*args, **arguments)
        return {**found, "weight": jax.tree.map(lambda x: 2 * x, found["weight"])}

    if wrong:
        with pytest.raises(AssertionError, match=r"gradient\[.*scales.* off by"):
            check.isolated(dataclasses.replace(linear, backward=backward))
    else:
        check.isolated(linear)


def test_an_implementation_that_says_no_is_skipped_with_its_reason() -> None:
    refuses = dataclasses.replace(ATTENTION, name="refuses", supports=lambda call, chip, config: "no such tile")
    with pytest.raises(unittest.SkipTest, match="no such tile"):
        op_checks("attention")[0](refuses)


def test_an_implementation_of_the_forward_pass_alone_keeps_the_contract() -> None:
    forward = dataclasses.replace(
        ATTENTION, name="forward", supports=lambda call, chip, config: call.direction == "forward"
    )
    op_checks("attention")[0](forward)


@pytest.mark.parametrize("op", OPS)
def test_every_check_has_its_own_name(op: str) -> None:
    names = [str(check) for check in (*op_checks(op), *accelerator_checks(op))]
    assert len(accelerator_checks(op)) >= 8
    assert len(set(names)) == len(names)


def test_memory_of_the_size_of_results_and_scratch_is_nan_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []
    monkeypatch.setattr(jax, "device_put", lambda x: freed.append(x) or x)
    compiled = types.SimpleNamespace(
        out_info=(jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), {"x": jax.ShapeDtypeStruct((5,), jnp.float32)}),
        memory_analysis=lambda: types.SimpleNamespace(temp_size_in_bytes=64),
    )
    _poison_memory_for(compiled)
    assert [x.nbytes for x in freed] == [24, 20, 64]
    assert all(np.isnan(x.view(dtype)).all() for x in freed for dtype in (jnp.bfloat16, np.float16, np.float32))
