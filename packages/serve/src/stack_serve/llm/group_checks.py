"""Validation of the settings and the model of an engine over several processes."""

from dataclasses import replace
from typing import Any

from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.text.images import image_reader_of
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.limits import Limits
from stack_serve.llm.lockstep import ProcessGroup
from stack_serve.llm.new_weights import leaves_by_path

__all__ = ["agreed_limits", "check_config", "refusal_over_hosts"]


def refusal_over_hosts(feature: str) -> str:
    """Returns the message for a call that an engine over several hosts does not support."""
    return f"{feature}: not available on an engine over several hosts (--hosts). Serve the model on one host."


def check_config(config: EngineConfig, hosts: int) -> None:
    """Raises a ConfigError for settings that an engine over several hosts does not support."""
    if config.tensor * config.expert % hosts:
        raise ConfigError(
            f"tensor={config.tensor} x expert={config.expert} devices cannot be divided evenly among hosts={hosts}. "
            f"Use a multiple of {hosts}, such as tensor={hosts} (--tensor {hosts})."
        )
    speculation = config.speculation
    problems = {
        "adapters": config.adapters,
        "embeddings": config.embeddings,
        f"speculation {speculation and speculation.method}": speculation and speculation.method != "ngram",
    }
    if refused := [name for name, is_used in problems.items() if is_used]:
        raise ConfigError(
            f"{', '.join(refused)}: not available on an engine over hosts={hosts} hosts. Leave it out, or serve the "
            "model on one host."
        )


def agreed_limits(
    group: ProcessGroup, checkpoint: GenerativeCheckpoint, config: EngineConfig, limits: Limits
) -> Limits:
    """Returns the limits of an engine with the pages that fit on every host; a collective of the group.

    Raises:
      ConfigError: the engine cannot be divided over processes, or they have different models.
    """
    check_config(config, group.count)
    if image_reader_of(checkpoint) is not None:
        raise ConfigError(
            f"Model {checkpoint.name!r} reads images, which an engine over several hosts does not. Serve it on one "
            "host, or a model of text."
        )
    shapes = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_by_path(checkpoint.parameters).items()}
    model: dict[str, Any] = {"name": checkpoint.name, "max_tokens": limits.max_tokens, **shapes}
    group.check_alike("model", model)
    return replace(limits, pages=group.minimum("pages", limits.pages))
