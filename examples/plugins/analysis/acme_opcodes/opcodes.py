"""`stack profile opcodes TRACE`: device time by opcode."""

from collections import Counter
from dataclasses import dataclass

from stack_core.report.plots import bars
from stack_profile.answer import Answer


@dataclass(frozen=True)
class OpcodeRow:
    opcode: str
    self_s: float
    busy_share: float


def opcodes(trace, *, least_share: float = 0.0):
    """Show device time by opcode, such as "dot" or "fusion".

    Args:
      least_share: omit opcodes below this fraction of the busy time.
    """
    sums = Counter()
    for device in trace.devices:
        for operation, self_s, _ in device.totals():
            sums[operation.opcode] += self_s
    busy_s = sum(sums.values())
    rows = tuple(OpcodeRow(name, self_s, self_s / busy_s) for name, self_s in sums.most_common() if self_s > 0)
    kept = tuple(row for row in rows if row.busy_share >= least_share)
    plot = bars("Self time by opcode", kept, "self_s", label="opcode")
    return Answer("opcodes", {"busy_s": busy_s}, OpcodeRow, kept, plots=(plot,))
