from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import InferenceError
from stack_serve.inference.tensors import datatype, from_bytes, from_values, to_values


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "uint32", "int64", "float16", "bfloat16", "float64"])
def test_bytes_become_arrays_without_a_copy(dtype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(jnp.dtype(dtype))
    content = array.tobytes()
    found = from_bytes("x", datatype(dtype), [2, 3], content)
    np.testing.assert_array_equal(found, array)
    assert found.ctypes.data == np.frombuffer(content, np.uint8).ctypes.data


@pytest.mark.parametrize(
    ("name", "shape", "values", "expected"),
    [
        ("FP32", [2, 2], [[1, 2.5], [3, 4]], [[1.0, 2.5], [3.0, 4.0]]),
        ("INT8", [3], [1, -128, 127], [1, -128, 127]),
        ("BOOL", [2], [True, False], [True, False]),
        ("UINT64", [1], [2**64 - 1], [2**64 - 1]),
        ("UINT64", [2], [1, 2**63], [1, 2**63]),
        ("UINT64", [2, 1], [[2**53 + 1], [2**64 - 1]], [[2**53 + 1], [2**64 - 1]]),
        ("INT64", [2], [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("FP32", [2], [3.4e38, -3.4e38], np.array([3.4e38, -3.4e38], "f4")),
        ("UINT64", [2**16 + 1], [*range(2**16), 2**63], [*range(2**16), 2**63]),
        ("INT32", [0, 2], [], np.zeros((0, 2))),
    ],
)
def test_json_values_become_arrays(name: str, shape: list[int], values: Any, expected: Any) -> None:
    np.testing.assert_array_equal(from_values("x", name, shape, values), expected)


@pytest.mark.parametrize(
    ("name", "shape", "values"),
    [
        ("FP32", [2], [1]),
        ("FP32", [1], ["1"]),
        ("FP32", [2, 2], [[1, 2], [3]]),
        ("INT8", [1], [128]),
        ("UINT8", [1], [-1]),
        ("UINT64", [2], [-1, 2**63]),
        ("UINT64", [2], [0.5, 2**63]),
        ("INT64", [2], [1, 2**63]),
        ("FP32", [1], [1e39]),
        ("FP32", [2**16], [0.0] * (2**16 - 1) + [-1e39]),
        ("FP32", [2**16], [0.0] * (2**16 - 1) + ["1"]),
        ("INT32", [1], [0.5]),
        ("BOOL", [1], [1]),
        ("BF16", [1], [1.0]),
        ("FP32", [-1], [1.0]),
        ("FP32", [1.0], [1.0]),
        ("BYTES", [1], ["a"]),
        ("FP31", [1], [1.0]),
        ("FP32", [1], {"a": 1}),
        ("FP32", [1], None),
    ],
)
def test_values_that_do_not_fit_are_refused_by_the_name_of_the_tensor(name: str, shape: Any, values: Any) -> None:
    with pytest.raises(InferenceError, match="'x'") as caught:
        from_values("x", name, shape, values)
    assert caught.value.parameter == "x"


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InferenceError, match=r"'x' has 7 bytes; FP32\[2\] needs 8"):
        from_bytes("x", "FP32", [2], b"1234567")
    with pytest.raises(InferenceError, match="neither 0 nor 1"):
        from_bytes("x", "BOOL", [2], b"\x01\x02")


def test_half_floats_are_written_as_floats() -> None:
    assert to_values(np.array([[1.5]], jnp.bfloat16)).tolist() == [1.5]
