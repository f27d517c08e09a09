import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_core.runtime import digest as module
from stack_core.runtime.digest import array_digests


def digest(array: object) -> str:
    return array_digests({"array": array})["array"]


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "complex64",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "int8",
        "uint8",
        "int16",
        "int32",
        "uint32",
        "bool",
    ],
)
def test_every_dtype_has_the_same_digest_on_host_and_device(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
    small = digest(array)
    assert small == digest(np.asarray(array)) != digest(array[::-1])
    monkeypatch.setattr(module, "_MAX_HOST_SIZE", 0)  # a compiled program, as for large arrays
    assert small == digest(array) == digest(np.asarray(array))


def test_is_that_of_its_definition() -> None:
    words = np.array([[7, 2**31], [0, 2**32 - 1]], np.uint32)
    first = second = 0
    for index, word in enumerate(words.ravel().tolist()):
        key = (index * 0x9E3779B9 + 0x7F4A7C15) % 2**32
        mixed = word ^ key
        mixed = (mixed ^ mixed >> 16) * 0x7FEB352D % 2**32
        mixed = (mixed ^ mixed >> 15) * 0x846CA68B % 2**32
        mixed ^= mixed >> 16
        first, second = (first + mixed) % 2**32, (second + mixed * (key | 1)) % 2**32
    assert digest(words) == f"{first:08x}{second:08x}"


@settings(deadline=None, max_examples=50)
@given(index=st.integers(0, 63), bit=st.integers(0, 31))
def test_every_flipped_bit_changes_it(index: int, bit: int) -> None:
    words = np.zeros((4, 16), np.uint32)
    before = digest(words)
    words.flat[index] ^= np.uint32(1 << bit)
    assert digest(words) != before


def test_an_even_number_of_flipped_signs_changes_it() -> None:
    array = np.linspace(1.0, 2.0, 64, dtype=np.float32)
    assert digest(np.where(np.arange(64) % 2, array, -array)) != digest(array)


def test_order_changes_it() -> None:
    array = np.arange(64, dtype=np.float32)
    assert digest(array[::-1].copy()) != digest(array)


def test_long_host_integers_count_in_full() -> None:
    assert digest(np.array([1], np.int64)) != digest(np.array([1 + 2**32], np.int64))
    assert digest(5) != digest(5 + 2**32)


def test_special_values_are_told_apart_by_their_bits() -> None:
    assert digest(jnp.float32(0.0)) != digest(jnp.float32(-0.0))
    nan = digest(jnp.float32(jnp.nan))
    assert nan == digest(np.float32(np.nan))


def test_empty_and_scalar_arrays_have_one() -> None:
    assert digest(jnp.zeros((0, 4))) == "0" * 16
    assert digest(jax.random.key_data(jax.random.key(0))) != digest(jax.random.key_data(jax.random.key(1)))
