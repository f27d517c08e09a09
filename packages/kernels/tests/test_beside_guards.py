import subprocess
import sys
from pathlib import Path

import pytest

from stack_kernels.jit_cpu import host


@pytest.mark.parametrize("kernels", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_no_kernel_steps_outside_of_its_buffers(kernels: str) -> None:
    if host.this_processor() is None:
        pytest.skip("kernels are not written for this processor")
    script = Path(__file__).with_name("kernels_beside_guards.py")
    ran = subprocess.run([sys.executable, script, kernels], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-200:]}\n{ran.stderr[-3000:]}"
