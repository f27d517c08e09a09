"""What every benchmark writes beside its figures, and where."""

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "beside", "circumstances", "five_numbers", "spread", "table", "write"]

RESULTS = Path(__file__).parents[1] / "results"


def circumstances() -> dict[str, Any]:
    """The date and the machine, as the first keys of a record."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "machine": machine}


def write(folder: Path, name: str, record: Mapping[str, Any], text: str) -> None:
    """Writes the record and what people read of it, and prints the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = re.sub(r"\[[-+\s\d.,eE]+\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(record, indent=2))
    (folder / f"{name}.json").write_text(lines + "\n")
    (folder / f"{name}.md").write_text(text)
    print(text)


def five_numbers(samples: Sequence[float]) -> list[float]:
    """Least, lower quartile, median, upper quartile and most, to four digits."""
    quartiles = statistics.quantiles(samples, method="inclusive") if len(samples) > 1 else samples * 3
    return [float(f"{number:.4g}") for number in (min(samples), *quartiles, max(samples))]


def beside(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Summarizes the rounds of a contender, and our figures over its, within a round.

    Args:
      ours: what each round measured of us, such as `{"s": 0.1, "cpu_s": 0.2}`.
      theirs: the same of the contender, who may be ourselves.

    Returns:
      How many rounds it had, five numbers of each figure, and five of its ratio under `stack over it`.
    """
    names = list(theirs[0]) if theirs else []
    pairs = [] if theirs is ours else list(zip(ours, theirs, strict=False))
    return {
        "rounds": len(theirs),
        **{name: five_numbers([each[name] for each in theirs]) for name in names},
        "stack over it": {
            name: five_numbers([our[name] / their[name] for our, their in pairs]) for name in names if pairs
        },
    }


def spread(numbers: Sequence[float]) -> str:
    """The median of five numbers, with the least and the most."""
    return f"{numbers[2]:.2f} ({numbers[0]:.2f} to {numbers[-1]:.2f})"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown; columns after the first are aligned to the right."""
    ruler = ["---"] + ["---:"] * (len(heading) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (heading, ruler, *rows)]
