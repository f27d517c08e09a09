"""Comparison of two sides of captures: changes of matched operations and groups of operations."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from stack_profile.comparisons.lines import Lines
from stack_profile.comparisons.matching import match
from stack_profile.comparisons.samples import Side
from stack_profile.comparisons.significance import Difference, adjusted, against_peers, difference

__all__ = ["TRIM", "Comparison", "DiffGrouping", "Group", "Place", "grouped_difference"]

DiffGrouping = Literal["op", "line", "layer", "module", "category"]

TRIM: Final = 0.2  # share of the steps trimmed at either end
# Measured on a busy machine: with 0.95, 20 pairs of equal captures raised no alarm, and a layer that was a tenth larger
# came first in all 21 pairs.
_PEERS: Final = 0.95  # share of the total time; shorter operations do not show how operations change


@dataclass(frozen=True)
class Group:
    """Columns of both sides that make up a row.

    Attributes:
      before, after: columns of each side.
      matched: how the operations were matched; several values are joined by commas.
      pairs: indices of the matched pairs in the group.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    matched: str
    pairs: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Both sides, with the change of each pair of matched operations.

    Attributes:
      before, after: sides of the comparison.
      pairs: matched operations, one group per match.
      lines: alignment of the Python lines.
      each: difference of each pair.
    """

    before: Side
    after: Side
    pairs: tuple[Group, ...]
    lines: Lines
    each: Difference

    @classmethod
    def of(cls, before: Side, after: Side) -> "Comparison":
        matches = enumerate(match(before.sites, after.sites))
        pairs = tuple(Group(found.before, found.after, found.how, (place,)) for place, found in matches)
        lines = Lines.of(before.operations, after.operations)
        return cls(before, after, pairs, lines, grouped_difference(before, after, pairs, trim=TRIM))

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.before, self.after

    @property
    def busy(self) -> Difference:
        return difference(*([samples.sum(axis=1, keepdims=True) for samples in side.self_s] for side in self.sides))

    @property
    def step(self) -> Difference:
        return difference(*([samples[:, None] for samples in side.step_s] for side in self.sides))

    @property
    def peers(self) -> np.ndarray:
        """Pairs that show how operations change in general: the heaviest ones, which exist on both sides."""
        order = np.argsort(-self.each.before, kind="stable")
        earlier_s = np.cumsum(self.each.before[order]) - self.each.before[order]
        heavy = order[earlier_s < _PEERS * self.each.before.sum()]
        return np.sort(heavy[(self.each.before[heavy] > 0) & (self.each.after[heavy] > 0)])

    def rest(self, rows: Difference) -> Difference:
        """Returns the busy time of the steps beyond the trimmed means of the rows."""
        busy = self.busy
        return dataclasses.replace(busy, before=busy.before - rows.before.sum(), after=busy.after - rows.after.sum())

    @property
    def edited(self) -> tuple[Group, ...]:
        """Pairs that the two programs do not share: operations that appeared, disappeared or changed."""
        return tuple(pair for pair in self.pairs if pair.matched not in ("alike", "moved"))

    def groups(self, by: DiffGrouping, pairs: tuple[Group, ...] | None = None) -> tuple[Group, ...]:
        """Groups the pairs (all by default) by the line, layer, module or category of their heaviest operation."""
        pairs = self.pairs if pairs is None else pairs
        if by == "op":
            return pairs
        members: dict[str, list[Group]] = {}
        for pair in pairs:
            members.setdefault(getattr(Place.of(self, pair), by), []).append(pair)
        return tuple(map(_joined, members.values()))

    def net_changes(self, found: Difference, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
        """Returns each group's own change, and its p-value corrected for the number of groups.

        Groups that appeared or disappeared have p = 0: the programs differ, which is not chance.
        """
        own, p = self._net_changes(found, groups)
        whole = np.array([not (group.before and group.after) for group in groups], bool)
        # NaN excludes these groups from the correction of the p-values.
        p = np.where(whole, np.nan, p)
        return np.where(whole, found.change, own), np.where(whole, 0.0, adjusted(p))

    def _net_changes(self, found: Difference, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
        if found.of_captures:
            return found.change, found.p()
        peers = self.peers
        pairs = [self.pairs[peer] for peer in peers.tolist()]
        # With one capture on a side, a busy machine slows entire steps, which is divided out first.
        before, after = (
            side.evened([column for pair in pairs for column in getattr(pair, name)])
            for name, side in zip(("before", "after"), self.sides, strict=True)
        )
        even, of_peers = (grouped_difference(before, after, each, trim=TRIM) for each in (groups, pairs))
        parts = [np.flatnonzero(np.isin(peers, group.pairs)).tolist() for group in groups]
        return against_peers(even, of_peers, parts)


def _joined(groups: Sequence[Group]) -> Group:
    before, after, pairs = (
        tuple(place for group in groups for place in getattr(group, side)) for side in ("before", "after", "pairs")
    )
    return Group(before, after, ", ".join(dict.fromkeys(group.matched for group in groups)), pairs)


def grouped_difference(before: Side, after: Side, groups: Sequence[Group], *, trim: float = 0.0) -> Difference:
    """Computes the differences of groups of columns."""
    sums = before.sums([group.before for group in groups]), after.sums([group.after for group in groups])
    return difference(*sums, trim=trim)


@dataclass(frozen=True)
class Place:
    """Labels of a group, taken from its heaviest operation, after or else before."""

    op: str
    category: str
    layer: str
    line: str
    package_line: str
    module: str

    @classmethod
    def of(cls, comparison: Comparison, group: Group) -> "Place":
        names = []
        lines = comparison.lines.before, comparison.lines.after
        for side, members, line in zip(comparison.sides, (group.before, group.after), lines, strict=True):
            if members:
                heaviest = max(members, key=lambda place: sum(samples[:, place].mean() for samples in side.self_s))
                names.append((side.operations[heaviest], side.sites[heaviest], len(members), line))
        operation, site, _, line = names[-1]
        described = dict.fromkeys(
            f"{each.name}{f' and {count - 1} more' if count > 1 else ''}" for each, _, count, _ in names
        )
        package_line = operation.instruction.package_source if operation.instruction else None
        return cls(
            op=f"{operation.module}: {' -> '.join(described)}",
            category=site.category,
            layer=site.layer,
            line=line(operation),
            package_line=str(package_line or ""),
            module=operation.module,
        )
