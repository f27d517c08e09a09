"""Prints what the tests compare of the trace of decoding, as JSON.

The trace has a program of 18,000 instructions: reading it in a process without checks of types is ten times faster.
"""

import json
import lzma
import sys
from pathlib import Path

from stack_profile.analyses.advice import advice
from stack_profile.analyses.idle import idle
from stack_profile.analyses.ops import ops
from stack_profile.analyses.overview import overview
from stack_profile.traces.trace import trace_of
from stack_profile.traces.xplane import read_space


def main() -> None:
    data = lzma.decompress(Path(__file__).with_name("decode.xplane.pb.xz").read_bytes())
    trace = trace_of([read_space(data)])
    (device,) = trace.devices
    rows = [
        {
            "name": each.name,
            "kernel": each.kernel,
            "opcode": each.instruction and each.instruction.opcode,
            "count": count,
        }
        for each, _, count in device.totals()
    ]
    found = {
        "problems": trace.problems,
        "rows": rows,
        "ops": ops(trace).facts,
        "categories": {row.name: row.occurrences for row in ops(trace, by="category").rows},
        "advice": [[row.cause, row.line, row.gain_s, row.evidence] for row in advice(trace).rows],
        "idle": [[row.cause, row.line, row.gaps, row.idle_s] for row in idle(trace).rows],
        "overview": [[row.kernels, row.host_copies] for row in overview(trace).rows],
        "layers": [row.name for row in ops(trace, by="layer").rows],
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
