"""Parameters split over eight devices; `test_format.py` runs this in a process that has them.

Its arguments are a Hugging Face checkpoint, and a run of the same model that computes in bfloat16.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.huggingface import FORMAT
from stack_train.variables.trained_model import RUN_FORMAT


def check(checkpoint):
    whole = checkpoint.load_params()
    shardings = checkpoint.shardings(make_mesh(MeshConfig(fsdp=1, tensor=8)))
    with jax.transfer_guard_device_to_device("disallow_explicit"):  # as from the default device to the others
        params = checkpoint.load_params(shardings)
    query = params["blocks"][0][0]["attention"]["query"]["kernel"]
    assert query.addressable_shards[0].data.nbytes * 8 == query.nbytes
    for array, sharding, expected in zip(*map(jax.tree.leaves, (params, shardings, whole)), strict=True):
        assert (array.sharding, array.dtype) == (sharding, expected.dtype)
        np.testing.assert_array_equal(array, expected)


assert jax.device_count() == 8
source, run = map(Path, sys.argv[1:])
check(FORMAT.open_for_generation(source))
check(RUN_FORMAT.open_for_generation(run))
assert RUN_FORMAT.open_for_generation(run).parameters["lm_head"].dtype == "bfloat16"
