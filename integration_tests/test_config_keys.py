"""Every key of `stack train` has a text, whichever package brings it."""

import re

from stack_core.cli import main
from stack_core.commands.config_keys import config_keys
from stack_train.run.config import RunConfig


def test_every_key_of_a_run_has_a_text():
    found = config_keys(RunConfig, "train")
    assert {"run.steps", "model.layers", "lora.rules[].rank", "profile.steps"} <= {key.name for key in found}
    assert [(key.name, key.selections) for key in found if not key.text] == []
    # `stack config explain` shows this text alone, not the class that it would send a reader to.
    assert [key.name for key in found if re.search(r"\bsee `", key.text)] == []


def test_the_help_of_training_ends_with_keys_that_exist(capsys):
    main(["train", "--help"])
    panel = capsys.readouterr().out.rpartition("─ Keys ─")[2]
    named = [key for line in re.findall(r"• ([^:]+):", panel) for key in line.split(", ")]
    keys = {key.name for key in config_keys(RunConfig, "train")}
    assert named[:2] == ["output", "run.steps"] and len(named) == 14
    assert [name for name in named if name not in keys] == []
