import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_train.gguf.quantized import FORMS, convert, matrix_struct
from stack_train.gguf.reader import StoredTensor
from stack_train.nn.quantized import QuantizedMatrix, empty_arrays, writable_arrays

from .random_blocks import random_blocks

ROWS, COLUMNS = 6, 512


def stored(kind: str, seed: int = 0) -> StoredTensor:
    type_ = gguf.GGMLQuantizationType[kind]
    return StoredTensor((ROWS, COLUMNS), type_, random_blocks(kind, (ROWS, COLUMNS), np.random.default_rng(seed)))


def matrix_of(tensors: list[StoredTensor], *, is_transposed: bool = False) -> QuantizedMatrix:
    forms = [FORMS[each.tensor_type.name] for each in tensors]
    shape = (len(tensors), ROWS, COLUMNS)
    matrix = matrix_struct(forms, shape, in_rows=is_transposed, is_transposed=is_transposed)
    filled = empty_arrays(matrix)
    for layer, tensor in enumerate(tensors):
        for part, array in zip(writable_arrays(filled), convert(gguf, tensor, matrix), strict=True):
            part[layer] = array
    return jax.device_put(filled)


def values(matrix: QuantizedMatrix) -> np.ndarray:
    codes, scale = np.asarray(matrix.codes, np.float32), np.asarray(matrix.scale)

    def spread(tiles):
        for axis in (-1, -2):
            tiles = np.repeat(tiles, codes.shape[axis] // tiles.shape[axis], axis)
        return tiles

    result = (codes - (0 if matrix.zero_point is None else spread(np.asarray(matrix.zero_point)))) * spread(scale)
    return result.swapaxes(-1, -2) if matrix.is_transposed else result


def expected(tensor: StoredTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape)


@pytest.mark.parametrize("kind", FORMS)
def test_a_matrix_stands_for_the_numbers_of_the_file(kind):
    tensor = stored(kind)
    matrix = matrix_of([tensor])
    found, wanted = values(matrix)[0], expected(tensor)
    assert wanted.std() > 0 and matrix.codes.dtype == (jnp.int4 if kind[1] in "234" else jnp.int8)
    if matrix.zero_point is None:
        np.testing.assert_array_equal(found, wanted)
    else:  # a zero point is a rounded quotient
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q4_1"), ("Q3_K", "Q4_0"), ("Q8_0", "Q2_K")])
def test_layers_of_several_types_get_a_form_that_holds_them(kinds):
    tensors = [stored(kind, seed) for seed, kind in enumerate(kinds)]
    matrix = matrix_of(tensors)
    assert matrix.type == "+".join(sorted(kinds))
    found = values(matrix)
    for layer, tensor in enumerate(tensors):
        wanted = expected(tensor)
        np.testing.assert_allclose(found[layer], wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_tiles_without_a_scale_are_constant(kind):
    tensor = stored(kind)
    blocks = tensor.data.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])
    blocks[::2, :2] = 0
    found, wanted = values(matrix_of([tensor]))[0], expected(tensor)
    assert len(np.unique(wanted[0, :32])) == 1 and wanted[0, 0] != 0
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-7 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_rows_are_those_of_the_whole_matrix(kind, is_transposed):
    tensor = stored(kind)
    stack = matrix_of([tensor], is_transposed=is_transposed)
    zero_point = None if stack.zero_point is None else stack.zero_point[0]
    matrix = QuantizedMatrix(stack.codes[0], stack.scale[0], zero_point, stack.type, is_transposed)
    back = matrix.T.T
    assert matrix.shape == back.shape == (ROWS, COLUMNS) and matrix.T.shape == (COLUMNS, ROWS)
    assert back.codes is matrix.codes and back.is_transposed == matrix.is_transposed
    whole = np.asarray(ops.dequantize(matrix, jnp.float32))
    np.testing.assert_allclose(whole, expected(tensor), rtol=0, atol=3e-7 * np.abs(whole).max())
    np.testing.assert_array_equal(np.asarray(ops.dequantize(matrix.T, jnp.float32)), whole.T)
    places = jnp.array([[0, 5, 2], [2, 1, 9]])
    np.testing.assert_array_equal(matrix.rows(places, jnp.float32), whole[np.array([[0, 5, 2], [2, 1, 5]])])
