"""Bases of axes: which axes of a program's values are rotated together, and which cannot be rotated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Axis", "Basis", "fix", "join", "merged", "parts_of"]


@dataclass(eq=False)
class Basis:
    """The basis of an axis, or of a part of an axis. Bases that must be equal are joined (union-find).

    Attributes:
      size: number of entries.
      joined: basis that replaces this one, or None.
      parts: bases of the parts that make up the axis, the slowest first; () if it is not split.
      fixed: operation that distinguishes the entries; they cannot be rotated; else "".
    """

    size: int
    joined: "Basis | None" = None
    parts: "tuple[Basis, ...]" = ()
    fixed: str = ""


Axis = tuple[Basis, ...] | None
"""The bases of the parts of an axis, the slowest first; None for an axis along which all entries are equal."""


def parts_of(axis: Axis) -> list[Basis]:
    """Returns the current bases of an axis. Omits parts of one entry."""
    return list(_parts(axis or ()))


def _parts(bases: Sequence[Basis]) -> Iterator[Basis]:
    for basis in map(_representative, bases):
        if basis.parts:
            yield from _parts(basis.parts)
        elif basis.size > 1:
            yield basis


def _representative(basis: Basis) -> Basis:
    while basis.joined is not None:
        basis = basis.joined
    return basis


def fix(axis: Axis, reason: str) -> None:
    """Excludes the parts of an axis from rotations. Keeps the first reason."""
    for basis in parts_of(axis):
        basis.fixed = basis.fixed or reason


def join(first: Axis, second: Axis, reason: str) -> None:
    """Makes two axes with the same number of entries have one basis. Splits a part if the other axis has smaller parts.

    Args:
      reason: reason for which the parts are fixed if their sizes do not divide each other.
    """
    left, right = parts_of(first), parts_of(second)
    while left and right:
        one, other = left[0], right[0]
        if one is other:
            del left[0], right[0]
        elif one.size == other.size:
            one.fixed = one.fixed or other.fixed
            other.joined = one
        elif max(one.size, other.size) % min(one.size, other.size):
            fix((*left, *right), reason)
            return
        else:
            larger, smaller = (one, other) if one.size > other.size else (other, one)
            sizes = (smaller.size, larger.size // smaller.size)
            larger.parts = tuple(Basis(size, fixed=larger.fixed) for size in sizes)
        # A join or a split may also concern later parts of either axis.
        left, right = parts_of(tuple(left)), parts_of(tuple(right))


def merged(axes: Sequence[Axis], reason: str) -> Axis:
    """Joins axes of terms. Equal entries differ after a rotation, so they fix the remaining axes."""
    found = [axis for axis in axes if axis is not None]
    if len(found) < len(axes):
        for axis in found:
            fix(axis, reason)
    for axis in found[1:]:
        join(found[0], axis, reason)
    return found[0] if found else None
