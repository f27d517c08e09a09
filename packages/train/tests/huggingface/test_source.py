"""Copies of tensors into parameters."""

import ml_dtypes
import numpy as np
import pytest

from stack_train.huggingface.source import _copy


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_a_transposed_tensor_is_copied_in_blocks_to_the_last_row(dtype: type) -> None:
    tensor = np.arange(130 * 5).reshape(130, 5).astype(ml_dtypes.bfloat16)
    parameter = np.zeros((5, 130), dtype)
    _copy(parameter.T, tensor)
    np.testing.assert_array_equal(parameter, tensor.T.astype(dtype))
