"""Config keys in messages about sizes that a mesh does not divide."""

from typing import Any

import pytest

from stack_core.abi.errors import ShardingError
from stack_train.models.gemma4 import Gemma4Config
from stack_train.models.nemotron_h import NemotronHConfig
from stack_train.run.config import RunConfig
from stack_train.run.program import naming_sizes


@pytest.mark.parametrize(
    ("model", "axis", "keys"),
    [
        (Gemma4Config(global_kv_heads=1, kv_heads=2), "act_kv_heads", "model.kv_heads=2, model.global_kv_heads=1."),
        (NemotronHConfig(mamba_heads=3), "heads", "model.heads=8, model.mamba_heads=3."),
        (NemotronHConfig(), "act_mlp", "model.mlp=2048, model.expert_mlp=512, model.shared_mlp=1024."),
        (NemotronHConfig(), "vocab", "model.vocab_size=32000."),
    ],
)
def test_every_key_that_may_set_a_size_is_named(model: Any, axis: str, keys: str) -> None:
    config = RunConfig(output="run", model=model)
    with pytest.raises(ShardingError) as caught, naming_sizes(config):
        raise ShardingError("Indivisible.", logical_axes=[axis])
    assert str(caught.value) == f"Indivisible.\nSizes come from {keys}"
