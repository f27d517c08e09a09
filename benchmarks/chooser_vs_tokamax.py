"""How far ops that are chosen by Tokamax's published timings are from the fastest, beside Tokamax's fixed order.

Whole model shapes are held out in turn: the timings of other models, on the same chip, choose for them. Only calls
that two or more implementations were timed on count, on seven chips. The script measures nothing: it reads the timings
that stack-kernels ships.

    nox -s bench -- chooser_vs_tokamax
"""

import argparse
import collections
from collections.abc import Iterator, Sequence
from pathlib import Path

from stack_kernels.tuning.held_out import ChoiceRatios, distance_of, ratios, seconds_off
from stack_kernels.tuning.published import read

RESULTS = Path(__file__).parent / "results" / "chooser_vs_tokamax.md"
AIM = 0.9


def table(found: Sequence[ChoiceRatios]) -> Iterator[str]:
    """A row a chip and op, and one of all."""
    ways = [f"{way}: within 5% | mean | worst" for way in ("timings", "fixed order")]
    yield f"| chip | op | calls | {' | '.join(ways)} | seconds off: median | 90% |"
    yield f"|{' --- |' * 11}"
    rows: dict[tuple[str, str], list[ChoiceRatios]] = collections.defaultdict(list)
    for each in found:
        rows[each.chip, f"{each.op}, {each.direction}"].append(each)
    for (chip, op), of_row in [*sorted(rows.items()), (("all", ""), list(found))]:
        ours, theirs = (distance_of(of_row, of) for of in (lambda each: each.chosen, lambda each: each.in_order))
        off = (
            " | ".join(f"x {factor:.2f}" for factor in seconds_off(of_row))
            if any(x.estimated for x in of_row)
            else " | "
        )
        yield (
            f"| {chip} | {op} | {ours.calls} | {ours.within:.0%} | {ours.mean:.3f} | {ours.worst:.2f} | "
            f"{theirs.within:.0%} | {theirs.mean:.3f} | {theirs.worst:.2f} | {off} |"
        )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = list(ratios(read()))
    text = (
        f"# Chooser beside Tokamax's fixed order\n\n{__doc__.partition('    nox')[0]}\n"
        + "\n".join(table(found))
        + "\n"
    )
    print(text)
    RESULTS.write_text(text)
    within = distance_of(found, lambda each: each.chosen).within
    if within < AIM:
        raise SystemExit(f"{within:.1%} of calls are within 5% of the fastest; expected {AIM:.0%}")


if __name__ == "__main__":
    main()
