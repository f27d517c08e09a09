"""Rules: which parameters and products are quantized, and how. The first matching rule applies."""

import dataclasses
import re
from collections.abc import Sequence

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import nearest
from stack_core.runtime.tree_paths import path_matches
from stack_quant.algorithms import parse_algorithms
from stack_quant.calibration import calibration
from stack_quant.errors import RuleError
from stack_quant.qtypes import qtype
from stack_quant.spec import check_range_ends

__all__ = ["Rule", "unmatched"]


@config
class Rule:
    r"""A rule for parameters or products. A rule without types leaves its matches in float.

        Rule(path=r"embedder", weights="int8")
        Rule(path=r"layers/.*/mlp", weights="int4", activations="int4", tile_size=128, weight_calibration="rms,7")
        Rule(op=r"attention", activations="fp8_e4m3")
        Rule(path=r"layers/(0|1)")                                      # left in float

    Attributes:
      path: regular expression that must match one or several consecutive segments of a parameter's path completely.
        Segments are separated by "/": "query" matches "blocks/query/kernel", "quer" does not. None applies the rule to
        products of two activations.
      op: regular expression that is searched in the name of an operation. The name consists of the enclosing named
        scopes and the operation, separated by "/": "blocks/attention/dot_general", "decoder/linear". With a path, the
        parameter stays in float in operations that do not match. None matches all operations.
      weights: type of the parameter, a name of `stack_quant.qtypes`; None leaves the parameter in float.
      activations: type of the operand that is multiplied with the parameter, or of both operands of a product of
        activations. Activations are quantized at run time; None leaves them in float.
      gradients: type of the cotangents in quantized training (method "qt"); None leaves cotangents in float.
      tile_size: number of entries along the contracted axis that share a scale; None shares it among all entries. The
        second number of a pair, such as (128, 128), is the number of outputs of a weight that share a scale; without
        it, each output has a separate scale.
      smaller_tiles: if `tile_size` does not divide the axis, use the largest divisor below it and note this in the
        report. If this divisor is less than an eighth of `tile_size`, use the smallest divisor above. By default a
        `tile_size` that does not divide the axis is an error.
      weight_calibration: method of finding the range of a weight, from `stack_quant.calibration`.
      activation_calibration: method of finding the range of an activation. "moving,0.99" implies static ranges.
      static_ranges: measure the ranges of activations in advance over a stream of batches and store them with the
        model. Each activation, or each of its tiles, has one range per layer of a scan. By default each row of each
        call has a separate range.
      double_quantized: store the scales of tiles in 8 bits.
      range_ends: position of the ends of a range among integer codes, a name of `stack_quant.spec.RANGE_ENDS`. For
        8-bit activations "fitted" means "exact": fitting takes three times as long and saves less than 1% of the error.
      algorithm: method of choosing the codes of the weights, of the registry `algorithms`, with its options: "gptq",
        "gptq,damp=0.02", "autoround", "hqq"; to correct the weights for errors of earlier layers: "qep"; or to make a
        product easier to round by transforming its inputs: "awq", "smoothquant", "hadamard". "+" combines them:
        "hadamard+gptq". None rounds each entry to the nearest code.
      optional: allow the rule to match, or to quantize, nothing. By default this is an error.
    """

    path: str | None = None
    op: str | None = None
    weights: str | None = None
    activations: str | None = None
    gradients: str | None = None
    tile_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    smaller_tiles: bool = False
    weight_calibration: str = "absmax"
    activation_calibration: str = "absmax"
    static_ranges: bool = False
    double_quantized: bool = False
    range_ends: str = "fitted"
    algorithm: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.path is None and self.op is None:
            raise RuleError(f"{self}: neither path nor op is set. Set one; path='.*' matches every parameter.")
        if self.path is None and self.weights is not None:
            raise RuleError(f"{self}: weights without a path. Set a path; path='.*' matches every parameter.")
        for name in ("path", "op"):
            _check_pattern(self, name)
        for kind in (self.weights, self.activations, self.gradients):
            if kind is not None:
                qtype(kind)
        if self.smaller_tiles and self.tile_size is None:
            raise RuleError(f"{self}: smaller_tiles needs a tile_size, such as tile_size=128.")
        if calibration(self.weight_calibration).name == "moving":
            raise RuleError(
                f"{self}: weight_calibration='moving' averages over a stream of batches, and a weight has only one "
                "value. Use another calibration, such as absmax."
            )
        calibration(self.activation_calibration)
        check_range_ends(self.range_ends, [kind for kind in (self.weights, self.activations) if kind is not None])
        _check_algorithm(self)
        if self.is_static and self.activations is None:
            raise RuleError(f"{self}: static ranges of activations that stay in float. Set `activations` to a type.")

    @property
    def is_static(self) -> bool:
        """True if the ranges of activations are measured over a stream of batches."""
        return self.static_ranges or calibration(self.activation_calibration).name == "moving"

    @property
    def tiles(self) -> tuple[int | None, int | None]:
        """Entries that share a scale along the contracted axes (None: all) and along the kept axes (None: one)."""
        return self.tile_size if isinstance(self.tile_size, tuple) else (self.tile_size, None)

    def __str__(self) -> str:
        given = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return f"Rule({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in given)})"

    def matches_path(self, path: str) -> bool:
        """Returns True if the rule's path matches complete segments of `path`."""
        return self.path is not None and path_matches(self.path, path)

    def matches_op(self, name: str) -> bool:
        """Returns whether the rule applies to an operation; a rule without `op` applies to all."""
        return self.op is None or re.search(self.op, name) is not None


def unmatched(rule: Rule, number: int, *, paths: Sequence[str], ops: Sequence[str]) -> str:
    """Formats the error message for a rule that matches nothing, with the nearest names.

    Args:
      number: index of the rule, from 0.
      paths: paths of the parameters that no earlier rule matched.
      ops: names of the operations.
    """
    lines = [f"Rule {number}, {rule}, matches nothing."]
    if rule.path is not None:
        close = nearest(rule.path, paths) or f" The remaining parameters: {_listed(paths)}."
        lines.append(f"Its path matches no parameter, except those of earlier rules.{close}")
    if rule.op is not None:
        close = nearest(rule.op, ops) or f" The operations: {_listed(ops)}."
        lines.append(f"Its op matches no operation.{close}")
    return " ".join([*lines, "Correct the rule, or mark it optional=True."])


def _listed(names: Sequence[str], limit: int = 12) -> str:
    shown = ", ".join(sorted(set(names))[:limit]) or "none"
    return f"{shown}, ..." if len(set(names)) > limit else shown


def _check_algorithm(rule: Rule) -> None:
    if rule.algorithm is None:
        return
    steps = parse_algorithms(rule.algorithm)  # raises for an unknown name or option
    if rule.weights is None:
        raise RuleError(f"{rule}: an algorithm chooses the codes of weights. Set `weights`, or leave it out.")
    if rule.is_static and any(step.input_scale or step.rotates for step, _ in steps):
        raise RuleError(
            f"{rule}: static ranges are measured on inputs without transform. Leave out static_ranges, or use an "
            "algorithm that only chooses codes, such as gptq."
        )


def _check_pattern(rule: Rule, name: str) -> None:
    pattern = getattr(rule, name)
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise RuleError(f"{name}={pattern!r} is not a regular expression: {error}.") from None
