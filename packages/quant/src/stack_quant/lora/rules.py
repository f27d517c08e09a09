"""Rules for adapters: which parameters have them, and of which rank. The first matching rule applies."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat

from stack_core.abi.config import config, parse
from stack_core.abi.errors import nearest
from stack_core.runtime.tree_paths import path_matches
from stack_quant.errors import RuleError
from stack_quant.transform.adapted import Adapter
from stack_quant.transform.interpreter import Use
from stack_quant.transform.provenance import Part

__all__ = ["AdapterRule", "AdapterRules", "as_adapter_rules", "plan_adapters"]


@config
class AdapterRule:
    r"""A rule that gives parameters an adapter.

        AdapterRule(path=r"attention")                          # every matrix of attention, rank 8
        AdapterRule(path=r"(query|value)/kernel", rank=64, alpha=64, rank_stabilized=True)

    Products with a matched parameter W become x W + s (x D) U, where s = alpha / rank. Parameters that are not in a
    product, such as biases and norms, are not changed.

    Attributes:
      path: regular expression that must match one or several consecutive segments of a parameter's path completely, and
        for a tower of images its first segments, as in "vision/.*(query|value)/kernel".
      rank: rank of the factors D and U; 0 excludes the matched parameters from later rules and gives them no adapter.
      alpha: numerator of the scale s.
      rank_stabilized: use s = alpha / sqrt(rank) (rsLoRA) instead of alpha / rank.
      magnitude: train the norms of the weights of each output separately from their directions (DoRA). Products then
        compute the full adapted parameter, layer by layer.

    Source: Hu et al., LoRA, 2021 (arXiv:2106.09685); Kalajdzievski, rsLoRA, 2023 (arXiv:2312.03732); Liu et al., DoRA,
    2024 (arXiv:2402.09353).
    """

    path: str
    rank: NonNegativeInt = 8
    alpha: PositiveFloat = 16.0
    rank_stabilized: bool = False
    magnitude: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.path)
        except re.error as error:
            raise RuleError(f"path={self.path!r} is not a regular expression: {error}.") from None

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


AdapterRules = AdapterRule | Mapping[str, Any] | Sequence[AdapterRule | Mapping[str, Any]]
"""One rule or several, as `AdapterRule`s or mappings of their fields."""


def as_adapter_rules(rules: Any, *, path: str = "rules") -> tuple[AdapterRule, ...]:
    """Parses one or several rules, given as `AdapterRule`s or mappings.

    Args:
      path: path of the rules in a config, for error messages.

    Raises:
      RuleError: `rules` has neither form, or is empty.
      ConfigError: a rule has an unknown key.
    """
    if isinstance(rules, AdapterRule) or isinstance(rules, Mapping):  # noqa: SIM101 (a union of both loses their types)
        rules = [rules]
    if not isinstance(rules, Sequence) or isinstance(rules, str) or not rules:
        raise RuleError(
            f"{path} is {rules!r}, neither an adapter rule nor a list of them. Give {{path: attention, rank: 8}}."
        )
    return tuple(_rule(rule, f"{path}.{place}") for place, rule in enumerate(rules))


def _rule(rule: Any, path: str) -> AdapterRule:
    if isinstance(rule, AdapterRule):
        return rule
    try:
        return parse(AdapterRule, rule, path=path)
    except RuleError as error:
        raise RuleError(f"{path}.{error}") from None


def plan_adapters(
    rules: Sequence[AdapterRule],
    shapes: Mapping[str, tuple[int, ...]],
    uses: Sequence[Use],
    of_images: Sequence[Use] = (),
) -> dict[str, Adapter]:
    """Returns the adapters by the path of their parameter.

    Args:
      shapes: shapes of the floating parameters, by path.
      uses: uses of parameters, in the order of the program.
      of_images: uses in a call with images. Parameters that only such a call uses need a rule whose match begins with
        the first segment of their path, so that "query/kernel" stays the name of the decoder's queries.

    Raises:
      RuleError: a rule matches no parameter in a product, or a matched product sums over a part of an axis, or all
        matching rules have rank 0.
    """
    first = _first_products(uses)
    of_decoder = set(first)
    first |= {path: use for path, use in _first_products(of_images).items() if path not in first}
    found: dict[str, Adapter] = {}
    taken = set()
    for path, use in first.items():
        # Products also use arrays other than parameters, such as buffers.
        if path not in shapes:
            continue
        matches = path_matches if path in of_decoder else _matches_start
        number = next((number for number, rule in enumerate(rules) if matches(rule.path, path)), None)
        if number is None:
            continue
        taken.add(number)
        if rules[number].rank:
            found[path] = _adapter(path, rules[number], shapes[path], use)
    for number, rule in enumerate(rules):
        if number not in taken:
            near = nearest(rule.path, first) or f" There are: {', '.join(sorted(first))}."
            raise RuleError(
                f"Rule {number} of lora, path={rule.path!r}, matches no parameter in a product, except those of "
                f"earlier rules.{near}"
            )
    if not found:
        raise RuleError(
            "The rules of lora give no parameter an adapter, so nothing would be trained: all that match have rank 0, "
            "which excludes a parameter. Give one of them a rank of 1 or more, such as 8."
        )
    return found


def _first_products(uses: Sequence[Use]) -> dict[str, Use]:
    """Returns the first product of each parameter, which decides the summed axes, as for quantization."""
    found: dict[str, Use] = {}
    for use in uses:
        if use.contracted and use.free and not (use.is_lookup or use.derived or use.mixed):
            found.setdefault(use.path, use)
    return found


def _matches_start(pattern: str, path: str) -> bool:
    """Returns whether a regular expression matches the first segments of a path."""
    return re.fullmatch(rf"(?:{pattern})(/.*)?", path) is not None


def _adapter(path: str, rule: AdapterRule, shape: tuple[int, ...], use: Use) -> Adapter:
    contracted, free = (_complete_axes(path, parts, shape) for parts in (use.contracted, use.free))
    lead = tuple(axis for axis in range(len(shape)) if axis not in {*contracted, *free})
    return Adapter(shape, lead, contracted, rule.rank, rule.scale, rule.magnitude)


def _complete_axes(path: str, parts: Sequence[Part], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes that parts make up; raises RuleError if they cover an axis only partly."""
    axes = tuple(dict.fromkeys(part.axis for part in parts))
    for axis in axes:
        if math.prod(part.size for part in parts if part.axis == axis) != shape[axis]:
            raise RuleError(
                f"{path}, of shape {list(shape)}: a product uses only a part of axis {axis}, so the parameter cannot "
                "have an adapter. Exclude it by an earlier rule of rank 0."
            )
    return axes
