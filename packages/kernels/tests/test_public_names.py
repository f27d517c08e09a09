import subprocess
import sys

import stack_kernels


def test_the_public_names():
    assert stack_kernels.__all__ == ["expected", "implementation", "tune", "tuned", "untyped"]
    assert all(callable(getattr(stack_kernels, name)) for name in stack_kernels.__all__)


def test_importing_brings_no_jax():
    code = "import sys, stack_kernels, stack_kernels.plugin; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
