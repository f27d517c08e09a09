"""PPO with a reward model and a reference, each on a separate mesh; run with eight host devices."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from test_learning import SMALL, run
from test_rollouts import records

from stack_core.abi.config import apply_overrides, load_yaml
from stack_rl.reference import Reference
from stack_rl.rewards.model import ModelReward
from stack_train import build, start
from stack_train.run.resolve import parse_run

EXAMPLES = Path(__file__).parents[1] / "examples"
FEW = ("run.steps=3", "run.evaluate_every_steps=0", "data.groups=4", "data.group_size=4", "mesh.fsdp=8")
ONE = ("data.environment.rewards=[{reward: 'run:runs/tiny-reward'}]", "objective.reference=run:runs/tiny")
OWN = (
    "data.environment.rewards=[{reward: {name: model, source: runs/tiny-reward, mesh: {fsdp: 1, tensor: 2}}}]",
    "objective.reference=data",
    "data.reference={source: 'run:runs/tiny', mesh: {fsdp: 4}}",
    "data.engine_mesh={fsdp: 2, tensor: 2}",
)


def main() -> None:
    """The run whose models lie apart is that of one mesh, up to rounding."""
    os.chdir(sys.argv[1])
    places = noted_places()
    run("letters_chat.yaml", *SMALL, "run.steps=4", "output=runs/tiny")
    start_of = ("run.init_from=runs/tiny", "run.steps=4", "run.evaluate_every_steps=0", "data.batch_size=8")
    run("letters_reward.yaml", *start_of, "output=runs/tiny-reward")
    one, own = (played(name, overrides) for name, overrides in {"one": ONE, "own": OWN}.items())
    assert places == {"reference": [4, 5, 6, 7], "reward": [6, 7]}, places
    for name in ("reward", "action_tokens", "value", "value_loss", "kl", "loss", "logprob"):
        ours, theirs = ([each[name] for each in found] for found in (own, one))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    assert own[-1]["kl"] > 1e-6
    sys.stdout.write("roles ok\n")


def played(name: str, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    settings = ("run.init_from=runs/tiny", "objective.critic_warmup_steps=0", f"output=runs/{name}", *FEW, *overrides)
    mapping = apply_overrides(load_yaml(EXAMPLES / "letters_ppo.yaml"), list(settings))
    start(build(parse_run(mapping)))
    return records(Path("runs") / name, "train")


def noted_places() -> dict[str, list[int]]:
    """On which devices the parameters of the reference and of the reward model lie, once they are made."""
    places = dict[str, list[int]]()

    def note(kind: type, name: str) -> None:
        make = kind.__init__

        def made(self: Any, *given: Any) -> None:
            make(self, *given)
            leaves = jax.tree.leaves(self._params)
            places[name] = sorted({device.id for leaf in leaves for device in leaf.sharding.device_set})

        kind.__init__ = made  # type: ignore[method-assign]

    note(Reference, "reference")
    note(ModelReward, "reward")
    return places


if __name__ == "__main__":
    main()
