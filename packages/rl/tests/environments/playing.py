"""Episodes of an environment with a policy that answers in turn, in plain text or with a chat template."""

from collections.abc import Sequence
from typing import Any

from stack_rl.contracts import EnvironmentKind, Tasks, Trajectory
from stack_rl.episodes import Attempt, Player

from ..scripted import END, Letters, Policy, ScriptedEngine

__all__ = ["TEMPLATE", "play_episode", "policy"]

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\x00\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def policy(template: str | None = TEMPLATE) -> Any:
    return Policy(tokenizer=Letters(), chat_template=template)


def play_episode(
    config: Any, answers: Sequence[str], *, task: int = 0, held_out: bool = False, seed: int = 0, seq_tokens: int = 4000
) -> tuple[Tasks, Trajectory]:
    """One episode, after the checks of a run."""
    assert isinstance(config, EnvironmentKind)
    config.check(None)
    tasks = config.build(policy(), seq_tokens=seq_tokens, seed=seed)
    assert isinstance(tasks, Tasks)
    turns = iter(answers)
    engine = ScriptedEngine(lambda prompt: (*map(ord, next(turns)), END))
    player = Player(tasks, engine, seq_tokens=seq_tokens, on_failure="stop")
    (found,) = player.play([Attempt(0, task, held_out)], seed=(0,), greedy=False)
    assert found is not None
    return tasks, found
