"""Arrays of 2, 4 and 8 bits that are no ordinary bytes, through a checkpoint and back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import CheckpointDamaged, CheckpointError
from stack_train.checkpoint import CheckpointStore
from stack_train.checkpoint.manifest import read_manifest
from stack_train.checkpoint.narrow import is_packed, packed, unpacked

BITS = {
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 8,
}
CASES = [(dtype, shape) for dtype in BITS for shape in ((), (1,), (3, 5), (2, 3, 16), (0, 4))]


def array_of(dtype: str, shape: tuple[int, ...]) -> jax.Array:
    """Every bit pattern that the dtype has, if there is room."""
    codes = np.arange(np.prod(shape, dtype=int)).reshape(shape) * 7 % 2 ** BITS[dtype]
    return jax.lax.bitcast_convert_type(jnp.asarray(codes, f"uint{BITS[dtype]}"), jnp.dtype(dtype))


def codes_of(array: jax.Array) -> np.ndarray:
    return np.asarray(jax.lax.bitcast_convert_type(array, f"uint{BITS[array.dtype.name]}").astype(jnp.uint8))


def narrow_arrays() -> dict[str, jax.Array]:
    return {f"{dtype}_{len(shape)}_{np.prod(shape, dtype=int)}": array_of(dtype, shape) for dtype, shape in CASES}


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_bytes_hold_what_went_in_and_no_more(dtype: str, shape: tuple[int, ...]) -> None:
    array = array_of(dtype, shape)
    content = packed(array)
    assert is_packed(dtype) and content.dtype == jnp.uint8
    *leading, entries = shape or (1,)
    assert content.shape == (*leading, -(-entries * BITS[dtype] // 8))
    back = unpacked(content, shape, dtype)
    assert (back.dtype, back.shape) == (array.dtype, shape)
    np.testing.assert_array_equal(codes_of(back), codes_of(array))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float16", "bfloat16", "int32"])
def test_ordinary_arrays_are_stored_as_they_are(dtype: str) -> None:
    assert not is_packed(dtype)


def test_a_checkpoint_gives_back_narrow_arrays_bit_by_bit(tmp_path: Path) -> None:
    arrays = {name: array for name, array in narrow_arrays().items() if array.size}
    with CheckpointStore(tmp_path) as store:
        store.save_weights(arrays.items(), "")
        manifest = read_manifest(store.path(0))
        abstract = jax.eval_shape(lambda: arrays)
        restored = store.restore_params(abstract).state
        store.save(1, {"params": arrays}, None, "")
        store.wait()
        again = store.restore_params(abstract, 1).state
    assert str(manifest.leaves["params/int4_2_15"].spec) == "int4[3, 5]"
    for name, array in arrays.items():
        for found in (restored[name], again[name]):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(codes_of(found), codes_of(array), err_msg=name)


def test_another_narrow_dtype_is_another_leaf(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save_weights([("codes", array_of("int4", (4,)))], "")
        wanted = {"codes": jax.ShapeDtypeStruct((4,), jnp.dtype("float4_e2m1fn"))}
        with pytest.raises(
            CheckpointError, match=r"int4\[4\] in the checkpoint, float4_e2m1fn\[4\] in this run"
        ) as caught:
            store.restore_params(wanted)
    assert not isinstance(caught.value, CheckpointDamaged)


def test_narrow_arrays_come_to_the_sharding_that_is_asked_for(tmp_path: Path) -> None:
    array = array_of("int4", (2, 16))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    with CheckpointStore(tmp_path) as store:
        store.save_weights([("codes", array)], "")
        wanted = {"codes": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)}
        found = store.restore_params(wanted).state["codes"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(codes_of(found), codes_of(array))
