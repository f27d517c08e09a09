"""What every benchmark writes beside its figures, and where."""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "circumstances", "table", "write"]

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
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / f"{name}.md").write_text(text)
    print(text)


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown; columns after the first are aligned to the right."""
    ruler = ["---"] + ["---:"] * (len(heading) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (heading, ruler, *rows)]
