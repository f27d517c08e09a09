"""Rules: which parameters and which products are quantized, and how. The first that matches wins."""

import dataclasses
import re
from collections.abc import Sequence

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import nearest
from stack_core.abi.tree_paths import path_matches
from stack_quant.calibration import calibration
from stack_quant.errors import RuleError
from stack_quant.qtypes import qtype
from stack_quant.spec import check_range_ends

__all__ = ["Rule", "unmatched"]


@config
class Rule:
    r"""What to quantize, and how. A rule that asks for nothing leaves what it matches in float.

        Rule(path=r"embedder", weights="int8")
        Rule(path=r"layers/.*/mlp", weights="int4", activations="int4", tile_size=128, weight_calibration="rms,7")
        Rule(op=r"attention", activations="fp8_e4m3")
        Rule(path=r"layers/(0|1)")                                      # left in float

    Attributes:
      path: a regular expression that covers one whole segment, or several in a row, of a parameter's path, which has
        "/" between its segments: "query" is in "blocks/query/kernel", "quer" is not.
      op: a regular expression found anywhere in the name of an operation: the named scopes around it, then its own
        name, with "/" between them: "blocks/attention/dot_general", "decoder/linear". Without a path the rule is for
        products of two activations; with one, the parameter is left in float in all other operations.
      weights: the type of the parameter, of `stack_quant.qtypes`.
      activations: that of what the parameter is multiplied with, quantized at run time; or of both operands.
      gradients: that of the gradients, in quantized training.
      tile_size: how many entries along the contracted axis share a scale; None is all of them. Of two numbers, such as
        (128, 128), the second is how many outputs of a weight share it, too: without one each has a scale of its own.
      smaller_tiles: where `tile_size` does not divide that axis, the largest tile below that does is taken, and the
        report says so; where that is less than an eighth of `tile_size`, the smallest one above. Otherwise it is an
        error.
      weight_calibration: how the range of a weight is found, of `stack_quant.calibration`.
      activation_calibration: how that of an activation is.
      static_ranges: ranges of activations are measured over a stream of batches before, and kept with the model: one of
        the whole activation, or of each tile, in each of the layers that a scan runs. An average that forgets,
        "moving,0.99", is always measured so. Otherwise each row of each call has a range of its own.
      double_quantized: scales of tiles are stored in 8 bits.
      range_ends: where integers put the ends of a range, of `stack_quant.spec.RANGE_ENDS`. Activations of 8 bits take
        "exact" in the place of "fitted", which takes three times as long to quantize for less than 1% of the error.
      optional: that nothing matches is no error.
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
    optional: bool = False

    def __post_init__(self) -> None:
        if self.path is None and self.op is None:
            raise RuleError(f"{self}: neither path nor op says what it is for. Give one; path='.*' is every parameter.")
        if self.path is None and self.weights is not None:
            raise RuleError(f"{self}: weights without a path. Say which: path='.*' is every parameter.")
        for name in ("path", "op"):
            _check_pattern(self, name)
        for kind in (self.weights, self.activations, self.gradients):
            if kind is not None:
                qtype(kind)
        if self.smaller_tiles and self.tile_size is None:
            raise RuleError(f"{self}: smaller tiles than none. Say how many entries share a scale: tile_size=128.")
        if calibration(self.weight_calibration).name == "moving":
            raise RuleError(f"{self}: a weight does not come in a stream to average over. Take absmax, or another.")
        calibration(self.activation_calibration)
        check_range_ends(self.range_ends, [kind for kind in (self.weights, self.activations) if kind is not None])
        if self.is_static and self.activations is None:
            raise RuleError(f"{self}: ranges of activations that stay in float. Say what activations become, too.")

    @property
    def is_static(self) -> bool:
        """Whether ranges of activations are measured over a stream of batches."""
        return self.static_ranges or calibration(self.activation_calibration).name == "moving"

    @property
    def tiles(self) -> tuple[int | None, int | None]:
        """How many entries share a scale along the contracted axes, None for all, and the kept ones, None for one."""
        return self.tile_size if isinstance(self.tile_size, tuple) else (self.tile_size, None)

    def __str__(self) -> str:
        given = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return f"Rule({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in given)})"

    def matches_path(self, path: str) -> bool:
        """Whether `path` has whole segments that the rule's path covers."""
        return self.path is not None and path_matches(self.path, path)

    def matches_op(self, name: str) -> bool:
        """Whether the rule is for the operation of that name; one without `op` is for all."""
        return self.op is None or re.search(self.op, name) is not None


def unmatched(rule: Rule, number: int, *, paths: Sequence[str], ops: Sequence[str]) -> str:
    """The message about a rule that matches nothing; names what is near.

    Args:
      number: the rule's place, from 0.
      paths: of the parameters that no earlier rule took.
      ops: the names of the operations.
    """
    lines = [f"Rule {number}, {rule}, matches nothing."]
    if rule.path is not None:
        close = nearest(rule.path, paths) or f" The parameters that are left: {_listed(paths)}."
        lines.append(f"No parameter that an earlier rule left has it in its path.{close}")
    if rule.op is not None:
        close = nearest(rule.op, ops) or f" The operations: {_listed(ops)}."
        lines.append(f"No operation that it could be for has it in its name.{close}")
    return " ".join([*lines, "Mend the rule, or mark it optional=True."])


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(sorted(set(names))[:most]) or "none"
    return f"{shown}, ..." if len(set(names)) > most else shown


def _check_pattern(rule: Rule, name: str) -> None:
    pattern = getattr(rule, name)
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise RuleError(f"{name}={pattern!r} is no regular expression: {error}.") from None
