"""Formatting of field names and values for people.

The suffix of a field's name is its unit: `_s` seconds, `_per_s` a rate, `_bytes`, `_flops`, `_share` a fraction of the
quantity named by the preceding word: `busy_share` is a share of the busy time, `idle_step_share` the idle part of a
step. `mfu` is a share as well. None means "unknown", which differs from 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

__all__ = ["number", "title"]


def title(name: str) -> str:
    """Returns the heading of a field, such as "idle % of step" for `idle_step_share`."""
    if name.endswith("_share"):
        *part, whole = name.removesuffix("_share").split("_")
        return " ".join([*part, "% of", whole])
    for suffix, form in _TITLES.items():
        if name.endswith(suffix):
            return form.format(name.removesuffix(suffix).strip("_").replace("_", " ")).strip()
    return name.replace("_", " ")


_TITLES: Final = {
    "_flops_s": "{} FLOP/s",
    "_bytes_s": "{} B/s",
    "flops": "{} FLOPs",
    "_bytes": "{}",
    "_per_s": "{}/s",
    "_s": "{}",
}
_DASH: Final = "-"


def number(name: str, value: object) -> str:
    """Formats a value of the field `name` with three digits and a unit; "-" means unknown."""
    if value is None or value == "":
        return _DASH if value is None else "(none)"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(name, each)}" for key, each in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return (
            ", ".join(number(name, each) for each in value)
            if isinstance(value, Sequence) and not isinstance(value, str)
            else str(value)
        )
    form = next((form for suffix, form in _FORMS.items() if name.endswith(suffix)), None)
    if form is not None:
        return form(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def _scaled(value: int | float, base: int, units: Sequence[str]) -> str:
    scaled, unit = float(value), 0
    while abs(scaled) >= base and unit + 1 < len(units):
        scaled, unit = scaled / base, unit + 1
    return f"{scaled:.3g} {units[unit]}".strip() if scaled < 1000 else f"{scaled:.0f} {units[unit]}".strip()


def _seconds(value: int | float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 else f"{value:,.0f} s"
    return "0" if value == 0 else f"{value / 1e-9:.3g} ns"


def _share(value: int | float) -> str:
    return f"{value:.1%}" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.2g}%"


def _flops(value: int | float) -> str:
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P", "E"))


def _rate(value: int | float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _bytes(value: int | float) -> str:
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


# Longer suffixes first: "_bytes_s" and "_per_s" are not times.
_FORMS: Final[Mapping[str, Callable[[int | float], str]]] = {
    "_share": _share,
    "_flops_s": _flops,
    "flops": _flops,
    "_bytes_s": _bytes,
    "_bytes": _bytes,
    "mfu": _share,
    "_per_s": _rate,
    "_s": _seconds,
}
