"""Config checks that run before anything is built: consistent sections, and a starting point that fits the model."""

import warnings
from pathlib import Path

from stack_core.abi.adapters import AdaptsModels
from stack_core.abi.errors import ConfigError
from stack_train.objectives import as_objective, check_inputs
from stack_train.run.config import RunConfig, run_config
from stack_train.run.start import check_same_start, open_published
from stack_train.run.transforms import recipe_differences, transform_names, transform_of

__all__ = ["check_run", "check_start"]


def check_run(config: RunConfig) -> None:
    """Raises a ConfigError if sections contradict each other."""
    config.data.check(config.model)
    shapes = config.data.spec(config.model)
    check_inputs(as_objective(config.objective.build()), shapes)
    batch_size = next(iter(shapes.values())).shape[0]
    if batch_size % config.run.accumulation_steps:
        raise ConfigError(
            f"data.batch_size {batch_size} is not a multiple of run.accumulation_steps {config.run.accumulation_steps}."
        )


def check_start(config: RunConfig, allow: tuple[str, ...] = ()) -> None:
    """Checks that a run can start from `run.init_from`; warns if the source has transforms that the run lacks.

    Raises:
      ConfigError: adapters have no base model; or the source is neither a run nor a checkpoint, or has a different
        model, tokenizer or recipe of transforms.
    """
    if config.run.adapters_from is not None and transform_of(config).adapting is None:
        raise ConfigError(
            "run.adapters_from needs a section that adds adapters, such as lora. Add one, or leave it out."
        )
    source = config.run.init_from
    if source is None:
        _check_base(config)
        return
    if (published := open_published(source)) is not None:
        check_same_start(config, published.config, allow)
        return
    saved = run_config(Path(source))
    check_same_start(config, saved.model, allow)
    if missing := [name for name in transform_names(saved) if name not in transform_names(config)]:
        warnings.warn(
            f"The model of {source} is transformed by section {' and '.join(missing)} of its config, which this run's "
            "does not have: it starts from the floats that the parameters of the family's model stand for.",
            stacklevel=3,
        )
    if lines := recipe_differences(config, saved):
        listing = "\n  ".join(lines)
        raise ConfigError(
            f"The model of {source} is transformed by another recipe; here is this run's, not that one's:\n"
            f"  {listing}\nStart from the run that it was made from, or use the same recipe."
        )


def _check_base(config: RunConfig) -> None:
    """Raises a ConfigError if a randomly initialized run trains only adapters."""
    members = zip(transform_names(config), transform_of(config).members, strict=True)
    if names := [name for name, member in members if isinstance(member, AdaptsModels)]:
        raise ConfigError(
            f"Section {names[0]} trains adapters of a frozen model, and this run's model would stay random: "
            "run.init_from is not set. Set it to a run or hf:DIR, or leave the section out to train all parameters."
        )
