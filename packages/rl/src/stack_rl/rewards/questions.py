"""Templates of the questions that rewards ask a model."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from stack_core.abi.errors import ConfigError, EnvironmentFailed

__all__ = ["check_question", "fill_question"]


def check_question(question: str, *, reward: str, required: Mapping[str, str]) -> None:
    """Checks a template.

    Args:
      question: the template, with named placeholders.
      reward: name of the reward, for messages.
      required: meaning of each required placeholder, by name.

    Raises:
      ConfigError: the question is not a valid template or lacks a required placeholder.
    """
    try:
        names = {str(name) for _, name, _, _ in Formatter().parse(question) if name is not None}
    except ValueError as error:
        raise ConfigError(f"The question of {reward!r} cannot be filled in: {error}. Write braces twice.") from error
    if "" in names or not set(required) <= names:
        expected = " and ".join(f"{{{name}}}" for name in required)
        meanings = "".join(f"{{{name}}} is {meaning}, " for name, meaning in required.items())
        raise ConfigError(
            f"The question of {reward!r} has the placeholders {sorted(names)}; required: {expected}. All need a name. "
            f"{meanings}{{answer}} the record's field."
        )


def fill_question(question: str, *, reward: str, record: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Fills in a template with the fields of a record and with the reward's own values.

    Raises:
      EnvironmentFailed: the record lacks a field, or has a field with the name of one of the values.
    """
    if reserved := [name for name in values if name in record]:
        raise EnvironmentFailed(
            f"the record's field {reserved[0]!r} has a name that the question of {reward!r} uses; rename it"
        )
    try:
        return question.format_map({**record, **values})
    except (LookupError, AttributeError, ValueError) as error:
        fields = ", ".join(map(repr, record)) or "none"
        raise EnvironmentFailed(
            f"the question of {reward!r} cannot be filled in: {type(error).__name__}: {error}; the record's fields: "
            f"{fields}"
        ) from error
