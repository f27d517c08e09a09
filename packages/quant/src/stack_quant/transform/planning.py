"""Planning of each parameter's quantization from the rules and the uses of the parameters."""

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stack_core.abi.errors import ArgumentError, ShapeError
from stack_quant.algorithms import parse_algorithms
from stack_quant.errors import RuleError
from stack_quant.qtypes import qtype
from stack_quant.rules import Rule, unmatched
from stack_quant.spec import ArraySpec
from stack_quant.tiling import tile_sizes
from stack_quant.transform.interpreter import Use
from stack_quant.transform.provenance import Part
from stack_quant.transformed import InputSpec

__all__ = ["Plan", "plan"]


_MOST_SHOWN = 8


@dataclass(frozen=True)
class Plan:
    """The plan for the parameters of a program. All fields are by path.

    Attributes:
      of_path: index of the rule that applies to a parameter.
      specs: specification of each parameter that is quantized.
      left: reason why a parameter stays in float although a rule applies.
      tiles: number of entries that share a scale, if the rule's tile size does not divide the contracted axes.
      inputs: form of the transform of a parameter's inputs, by the rule's algorithm.
    """

    of_path: Mapping[str, int]
    specs: Mapping[str, ArraySpec] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    tiles: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, InputSpec] = field(default_factory=dict)

    def note(self, path: str) -> str:
        """Returns the report's note on a parameter whose tile size differs from its rule; else ""."""
        tile = self.tiles.get(path)
        if tile is None:
            return ""
        return f"{tile} entries share a scale: the tile_size of rule {self.of_path[path]} does not divide its axes"


def plan(
    rules: Sequence[Rule],
    shapes: Mapping[str, tuple[int, ...]],
    uses: Sequence[Use],
    ops: Sequence[str],
    stops: Mapping[str, Collection[str]],
) -> Plan:
    """Finds the rule of each parameter and the layout of its scales.

    Args:
      shapes: shapes of the floating parameters, by path.
      uses: uses of parameters, in the order of the program.
      ops: names of all operations to which rules may apply.
      stops: primitives whose results no longer count as the parameter, by path.

    Raises:
      RuleError: a rule that is not optional matches nothing, or quantizes none of its matches.
      ShapeError: a tile size does not divide its axis.
    """
    by_path: dict[str, list[Use]] = {path: [] for path in shapes}
    for use in uses:
        by_path[use.path].append(use)
    of_path = {path: number for path in shapes if (number := _first(rules, path, by_path[path])) is not None}
    _check_matches(rules, of_path, list(shapes), ops)
    specs: dict[str, ArraySpec] = {}
    left: dict[str, str] = {}
    tiles: dict[str, int] = {}
    inputs: dict[str, InputSpec] = {}
    for path, number in of_path.items():
        rule = rules[number]
        mine = [use for use in by_path[path] if rule.matches_op(use.op) and not use.mixed]
        if rule.weights is None:
            left[path] = f"rule {number} leaves it in float"
        elif not mine:
            left[path] = _reason(by_path[path], stops.get(path, ()))
        else:
            # A product decides before a lookup, and the parameter itself before a computed value; of equals, the first.
            first = min(mine, key=lambda use: (use.is_lookup, use.derived))
            specs[path], tile = _spec(path, rule, shapes[path], first)
            if rule.algorithm is not None and not first.is_lookup:
                transform = _input_spec(path, rule, shapes[path], first)
                inputs |= {} if transform is None else {path: transform}
            # A type with blocks prescribes the tile, so the report needs no note.
            if tile is not None and tile != rule.tiles[0] and qtype(rule.weights).block_size is None:
                tiles[path] = tile
    _check_quantizes(rules, of_path, left)
    return Plan(of_path, specs, left, tiles, inputs)


def _first(rules: Sequence[Rule], path: str, uses: Sequence[Use]) -> int | None:
    for number, rule in enumerate(rules):
        if rule.matches_path(path) and (rule.op is None or any(rule.matches_op(use.op) for use in uses)):
            return number
    return None


def _check_matches(rules: Sequence[Rule], of_path: Mapping[str, int], paths: Sequence[str], ops: Sequence[str]) -> None:
    taken = set(of_path.values())
    for number, rule in enumerate(rules):
        # A rule without a path may be for products of two activations.
        if rule.optional or number in taken or (rule.path is None and any(map(rule.matches_op, ops))):
            continue
        # Parameters of earlier rules are not suggested, because this rule cannot get any of these.
        free = [path for path in paths if of_path.get(path, number) >= number]
        raise RuleError(unmatched(rule, number, paths=free, ops=ops))


def _reason(uses: Sequence[Use], stops: Collection[str]) -> str:
    """Returns the reason why no product and no lookup uses a parameter itself."""
    mixed = dict.fromkeys(use.mixed for use in uses if use.mixed)
    if mixed:
        return f"products use only the result of {' and '.join(mixed)} on it"
    if stops:
        return f"no product and no lookup uses it, only {', '.join(stops)}"
    return "nothing uses it"


def _check_quantizes(rules: Sequence[Rule], of_path: Mapping[str, int], left: Mapping[str, str]) -> None:
    for number, rule in enumerate(rules):
        mine = [path for path, place in of_path.items() if place == number]
        if rule.weights is None or rule.optional or not mine or not all(path in left for path in mine):
            continue
        shown = "; ".join(f"{path}: {left[path]}" for path in mine[:_MOST_SHOWN])
        more = f"; and {len(mine) - _MOST_SHOWN} more" if len(mine) > _MOST_SHOWN else ""
        raise RuleError(
            f"Rule {number}, {rule}, quantizes none of the {len(mine)} parameters that it matches. {shown}{more}. "
            "Give it other parameters, change how the model uses them, or mark it optional=True."
        )


def _input_spec(path: str, rule: Rule, shape: tuple[int, ...], use: Use) -> InputSpec | None:
    """Returns the form of the transform of a parameter's inputs, or None for an algorithm without transform."""
    assert rule.algorithm is not None, "asked only of rules with one"
    steps = parse_algorithms(rule.algorithm)
    blocks = [(int(options["block"]), options["least"]) for step, options in steps if step.rotates]
    has_scale = any(step.input_scale is not None for step, _ in steps)
    if not blocks and not has_scale:
        return None
    kept, last = {part.axis for part in use.free}, use.contracted[-1]
    if kept & {part.axis for part in use.contracted} or last.size != shape[last.axis]:
        raise RuleError(
            f"{path}, of shape {list(shape)}: {rule.algorithm} cannot transform the inputs of {use.op}, which sums "
            "over a part of an axis. Give it a rule of its own with another algorithm."
        )
    # The largest power of two that divides the axis.
    (most, least), *_ = blocks or [(1, 1)]
    block = min(most, last.size & -last.size)
    if block < least:
        raise RuleError(
            f"{path}, of shape {list(shape)}: a rotation needs blocks of at least {least} inputs, a power of two that "
            f"divides its {last.size} inputs. Give it a rule of its own with another algorithm, or allow smaller "
            "blocks: hadamard,least=1."
        )
    scale_shape = tuple(1 if axis in kept else size for axis, size in enumerate(shape)) if has_scale else None
    return InputSpec(scale_shape, last.axis - len(shape), block)


def _spec(path: str, rule: Rule, shape: tuple[int, ...], first: Use) -> tuple[ArraySpec, int | None]:
    """Returns the specification of a parameter, and the number of entries that share a scale (None: all).

    Entries along the axes that the product `first` sums over share scales. Without a product, these are the axes of
    which a lookup takes all entries.
    """
    assert rule.weights is not None, "asked only for parameters that are quantized"
    reduced = {part.axis for part in first.contracted}
    tiles, tile = _fitting_tiles(path, rule, first.contracted, shape)
    free = [part for part in first.free if part.axis not in reduced]
    tiles |= _free_tiles(path, rule, free, shape)
    # nvfp4 has one unit for each matrix, like NVIDIA's kernels and checkpoints.
    is_nvfp4 = qtype(rule.weights).scale_dtype == "float8_e4m3fn"
    shared = sorted({part.axis for part in free} - tiles.keys()) if is_nvfp4 else ()
    try:
        spec = ArraySpec(
            type=rule.weights,
            channel_axes=tuple(axis for axis in range(len(shape)) if axis not in reduced and axis not in tiles),
            tiles=tiles,
            calibration=rule.weight_calibration,
            double_quantized=rule.double_quantized,
            range_ends=rule.range_ends if qtype(rule.weights).is_integer else "fitted",
            shared_unit_axes=tuple(shared),
        )
    except ArgumentError as error:
        raise RuleError(f"{path}, of shape {list(shape)}: {rule} does not fit it. {error}") from error
    return spec, tile


def _fitting_tiles(
    path: str, rule: Rule, contracted: Sequence[Part], shape: tuple[int, ...]
) -> tuple[dict[int, int], int | None]:
    """Returns the tiles of a parameter by axis, and their size, by the rule and its `smaller_tiles`."""
    assert rule.weights is not None, "asked only for parameters that are quantized"
    block = qtype(rule.weights).block_size
    wanted, _ = rule.tiles
    if block is None and wanted is not None and rule.smaller_tiles and contracted:
        for size in tile_sizes(math.prod(part.size for part in contracted), wanted):
            # A tile may divide the number of entries but none of the axes that make it up.
            with contextlib.suppress(ShapeError):
                return _tiles(path, contracted, shape, size), size
    tile = block or wanted
    return _tiles(path, contracted, shape, tile), tile


def _free_tiles(path: str, rule: Rule, free: Sequence[Part], shape: tuple[int, ...]) -> dict[int, int]:
    """Returns the number of entries that share a scale along each kept axis, filling the last axis first.

    A table that is used only in lookups does not have kept axes.
    """
    _, wanted = rule.tiles
    axes = list(dict.fromkeys(part.axis for part in reversed(free)))
    if wanted is None or not axes:
        return {}
    entries = math.prod(shape[axis] for axis in axes)
    for tile in tile_sizes(entries, wanted) if rule.smaller_tiles else [wanted]:
        tiles: dict[int, int] = {}
        for axis in axes:
            taken = math.prod(tiles.values())
            tiles[axis] = math.gcd(shape[axis], tile // taken)
            if tiles[axis] < shape[axis]:
                break
        if math.prod(tiles.values()) == tile:
            return tiles
    raise ShapeError(
        f"{path}: a tile of {wanted} outputs does not divide its kept axes {axes[::-1]}, of shape {list(shape)}. "
        "Choose a tile_size that does, allow smaller_tiles=True, or give this parameter a rule of its own."
    )


def _tiles(path: str, contracted: Sequence[Part], shape: tuple[int, ...], tile: int | None) -> dict[int, int]:
    """Returns the number of entries that share a scale, for the axes of which not all entries share one.

    The contracted axes are divided like a single flattened axis, starting from the last axis.
    """
    tiles: dict[int, int] = {}
    rest = tile
    for part in reversed(contracted):
        if part.stride > 1 or part.axis in tiles:
            continue  # the slower part of an axis, whose other parts are channels or also contracted
        if part.size < shape[part.axis] and not part.cut and not _is_fully_contracted(part, contracted, shape):
            tiles[part.axis] = part.size
        if rest is None:
            continue
        size = tiles.get(part.axis, shape[part.axis])
        if size % rest == 0:
            tiles[part.axis] = rest
            rest = 1
        elif rest % size == 0:
            rest //= size
        else:
            raise ShapeError(
                f"{path}: a tile of {tile} entries does not divide its contracted axis {part.axis}, of {size} entries "
                f"(shape {list(shape)}). Choose a tile_size that does, or give this parameter a rule of its own."
            )
    if rest is not None and rest > 1 and contracted:
        raise ShapeError(
            f"{path}: a tile of {tile} entries is longer than all its contracted axes, shape {list(shape)}."
        )
    return tiles


def _is_fully_contracted(part: Part, contracted: Sequence[Part], shape: tuple[int, ...]) -> bool:
    """Returns whether all parts of an axis are contracted."""
    size = 1
    for other in contracted:
        size *= other.size if other.axis == part.axis else 1
    return size == shape[part.axis]
