import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_quant.packing import pack, stored_bytes, unpack
from stack_quant.qtypes import QTYPES


# Few counts, of every remainder of a byte's codes: each shape is compiled anew.
@settings(max_examples=25)
@given(bits=st.integers(2, 8), count=st.sampled_from([0, 1, 2, 7, 12, 19]), seed=st.integers(0, 99))
def test_codes_come_back(bits: int, count: int, seed: int) -> None:
    kind = QTYPES[f"int{bits}"]
    drawn = np.random.default_rng(seed).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), size=(3, count))
    codes = jnp.asarray(drawn, jnp.int8).astype(kind.code_dtype)
    planes = pack(codes, kind)
    assert planes[0].shape == codes.shape
    found = unpack(planes, kind)
    assert found.dtype == codes.dtype
    np.testing.assert_array_equal(found.astype(jnp.int8), drawn)


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_take_their_bits(bits: int) -> None:
    kind = QTYPES[f"int{bits}"]
    planes = pack(jnp.zeros((4, 64), kind.code_dtype), kind)
    assert sum(map(stored_bytes, planes)) == 4 * 64 * bits // 8


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint4", "float4_e2m1fn", "int8"])
def test_what_jax_stores_is_what_is_counted(dtype: str) -> None:
    array = jnp.zeros((64, 64), dtype)
    compiled = jax.jit(lambda x: x[0, 0]).lower(array).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == stored_bytes(array)
