import subprocess
import sys

from stack_core.abi.plugins import plugins

WITHOUT_LLVM = """
import sys
sys.modules["llvmlite"] = None  # what importing it finds where it is not installed
import jax, jax.numpy as jnp
from stack_core import ops
from stack_core.abi.plugins import registries
for entry in registries.ops.entries():
    if entry.provider == "kernels" and "/jit_" not in entry.name:
        registries.ops[entry.name]
(decision,) = ops.explain(ops.linear, jnp.ones((3, 64)), jnp.ones((64, 32)))
assert decision.forward.implementation.name == "xla_cpu", decision
print(dict(decision.forward.refused)["jit_x86"])
from stack_kernels import expected
from stack_kernels.burn_in.checks import choice_order
from stack_kernels.laboratory.table import count_supported
rows = expected("linear", {"x": (3, 64), "weight": (64, 32)}, "h100")
(row,) = (row for row in rows if row.implementation == "jit_x86")
assert row.refusal.startswith("its backend is not installed: "), row
assert {"reference", "xla_cpu"} == {name for name in choice_order("linear", "cpu") if "quantized" not in name}
assert count_supported("linear/jit_x86", "cpu")[1] == dict(decision.forward.refused)["jit_x86"]
"""


def test_core_loads_and_lists_the_plugin() -> None:
    (report,) = (report for report in plugins.reports() if report.name == "kernels")
    assert (report.distribution, report.status, report.problems) == ("stack-kernels", "loaded", [])


def test_xla_forms_do_without_llvm() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LLVM], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("its backend is not installed: "), done.stdout
