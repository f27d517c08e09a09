"""Every key of `stack train` has a text, whichever package brings it."""

from stack_core.commands.config_keys import config_keys
from stack_train.run.config import RunConfig


def test_every_key_of_a_run_has_a_text():
    found = config_keys(RunConfig, "train")
    assert {"run.steps", "model.layers", "lora.rules[].rank", "profile.steps"} <= {key.name for key in found}
    assert [(key.name, key.selections) for key in found if not key.text] == []
