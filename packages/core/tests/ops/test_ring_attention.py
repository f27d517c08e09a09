"""Tests `ring_attention` on one device, and its errors; `test_on_eight_devices.py` tests it on several."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName
from stack_core.ops.definitions.ring_attention import REFERENCE
from stack_core.testing import OpCheck, op_checks

FEW = ("causal_over_1-bfloat16", "contiguous_over_1-transformed")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if str(check) in FEW else pytest.mark.slow)
        for check in op_checks("ring_attention")
        if check.case.name.endswith("_over_1")
    ],
    ids=str,
)
def test_the_contract_on_one_device(check: OpCheck) -> None:
    check(REFERENCE)


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Lets the calls through to the op's own checks, as for a user, who has no type checker on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"seq": 5}, ShapeError, "q_seq is 5 and kv_seq 5 on each device; zigzag .* a multiple of 8"),
        ({"order": "striped"}, UnknownName, "zigzag, contiguous"),
        ({"window": (1, -1)}, ArgumentError, "window is"),
        ({"kv_heads": 3}, ShapeError, "4 heads and key has 3 kv_heads"),
        ({"segment_ids": (jnp.zeros((1, 4), jnp.int32),) * 3}, ArgumentError, "segment_ids has 3 arrays; .* the pair"),
        (
            {"segment_ids": jnp.zeros((1, 5), jnp.int32)},
            ShapeError,
            r"'q_seq' is 5 in segment_ids\[0\]",
        ),
        ({"axis_name": "contexts"}, ArgumentError, "axis_name is 'contexts'.* bound by jax.shard_map: 'context'"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], kind: type[Exception], expected: str) -> None:
    given = {"axis_name": "context", "seq": 4, "kv_heads": 2, **changes}
    seq, kv_heads = given.pop("seq"), given.pop("kv_heads")
    mesh = AbstractMesh((4,), ("context",), (AxisType.Auto,))
    query, key = jnp.zeros((1, seq, 4, 8)), jnp.zeros((1, seq, kv_heads, 8))

    def attend(query: Any, key: Any) -> Any:
        return ops.ring_attention(query, key, key, **given)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    with pytest.raises(kind, match=expected):
        jax.eval_shape(sharded, query, key)
