"""Weights & Biases as tracker of a run: the section `wandb:` of a config."""

from collections.abc import Mapping
from typing import Any, Literal

from stack_core.abi.config import config, to_mapping
from stack_core.abi.event_bus import ObserverContext
from stack_train.observers.tracker import Tracker, require

__all__ = ["WandbConfig", "WandbTracker", "wandb_tracker"]

_INIT_TIMEOUT_S = 45.0  # below the event bus's limit, so the warning names an unreachable server


@config
class WandbConfig:
    """The `wandb:` section of a run. Needs the extra `wandb`.

    Attributes:
      project: project of the run.
      entity: user or team; None is the default of the account.
      name: name of the run; None is the name of its directory.
      group: group of the run, such as a sweep.
      tags: tags of the run.
      mode: "online" sends to the server as the run goes; "offline" writes to `wandb/` of the run's directory, for
        `wandb sync`.
    """

    project: str = "stack"
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"


def wandb_tracker(context: ObserverContext) -> "WandbTracker | None":
    """Builds the tracker of a run; returns None without a `wandb:` section.

    Raises:
      ConfigError: the package `wandb` is not installed.
    """
    section = getattr(context.config, "sections", {}).get("wandb")
    if section is None:
        return None
    require(context, "wandb", "wandb")
    return WandbTracker(context, section)


class WandbTracker(Tracker):
    """Observer that logs to Weights & Biases, with the run's config. The x axis is `step`."""

    def __init__(self, context: ObserverContext, section: WandbConfig) -> None:
        super().__init__(context.directory)
        self._config = to_mapping(context.config)
        self._section = section
        self._run: Any = None

    def open(self, run_id: str | None) -> str:
        import wandb

        section = self._section
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or self.directory.resolve().name,
            group=section.group,
            tags=section.tags,
            mode=section.mode,
            id=run_id,
            resume=None if run_id is None else "allow",
            dir=str(self.directory),
            config=self._config,
            reinit="create_new",
            settings=wandb.Settings(console="off", init_timeout=_INIT_TIMEOUT_S, silent=True),
        )
        # W&B's own step only grows, so it would drop the steps that a resumed session repeats.
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def end(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))
