"""The contract of the ragged all-to-all, which needs eight devices; `test_ragged_all_to_all.py` runs it.

python ragged_all_to_all_on_eight_devices.py covering | all
"""

import sys

from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.testing import op_checks
from stack_kernels.exchange.ragged_all_to_all import ragged_all_to_all

COVERING = (
    "send_all_over_4",
    "return_all_over_4",
    "send_cut_off_over_2",
    "return_cut_off_over_2",
    "more_in_groups_than_rows_over_2",
)

if __name__ == "__main__":
    with use_chip(registries.chips["v6e"]):
        for check in op_checks("exchange"):
            chosen = check.aspect == "float32" and check.case.name.endswith(COVERING)
            if chosen or sys.argv[1] == "all":
                check(ragged_all_to_all(interpret=True))
