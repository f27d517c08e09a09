"""The registrations of stack-core."""

from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.registry import Registrar

STACK_ABI_MINOR = 0

# (target, *device kinds as JAX reports them) by row. Partitioned GPUs (MIG) report other kinds.
_CHIPS = {
    "cpu": ("measure:measured_cpu", "cpu"),
    "v4": ("tpus:V4", "TPU v4"),
    "v5e": ("tpus:V5E", "TPU v5 lite", "TPU v5e"),
    "v5p": ("tpus:V5P", "TPU v5", "TPU v5p"),
    "v6e": ("tpus:V6E", "TPU v6 lite", "TPU v6e"),
    "v7x": ("tpus:V7X", "TPU7x"),
    "a100-40gb": ("gpus:A100_40GB", "NVIDIA A100-SXM4-40GB"),
    "a100-80gb": ("gpus:A100_80GB", "NVIDIA A100-SXM4-80GB"),
    "a100-pcie-40gb": ("gpus:A100_PCIE_40GB", "NVIDIA A100-PCIE-40GB"),
    "a100-pcie-80gb": ("gpus:A100_PCIE_80GB", "NVIDIA A100 80GB PCIe"),
    "h100": ("gpus:H100", "NVIDIA H100 80GB HBM3"),
    "h100-pcie": ("gpus:H100_PCIE", "NVIDIA H100 PCIe"),
    "h200": ("gpus:H200", "NVIDIA H200", "NVIDIA H200 141GB HBM3e"),
    "b200": ("gpus:B200", "NVIDIA B200"),
}
_OPS = (
    "attention",
    "collective_matmul",
    "exchange",
    "gated_linear_unit",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "low_rank",
    "norm",
    "paged_attention",
    "ragged_dot",
    "ring_attention",
    "rope",
    "state_space",
)


@hookimpl
def stack_register_op_definitions(registry: Registrar) -> None:
    for op in _OPS:
        suite = f"stack_core.testing.op_suites.{op}:SUITE"
        registry.add(op, f"stack_core.ops.definitions.{op}:OP", function=f"stack_core.ops:{op}", suite=suite)


@hookimpl
def stack_register_ops(registry: Registrar) -> None:
    for op in _OPS:
        registry.add(f"{op}/reference", f"stack_core.ops.definitions.{op}:REFERENCE")


@hookimpl
def stack_register_chips(registry: Registrar) -> None:
    for name, (target, *device_kinds) in _CHIPS.items():
        registry.add(name, f"stack_core.chips.{target}", device_kinds=tuple(device_kinds))


@hookimpl
def stack_register_tool_parsers(registry: Registrar) -> None:
    registry.add("deepseek_v3", "stack_core.text.parsers.deepseek:DeepSeekV3Parser")
    registry.add("deepseek_v32", "stack_core.text.parsers.deepseek:DeepSeekV32Parser")
    registry.add("gpt_oss", "stack_core.text.parsers.harmony:HarmonyParser")
    registry.add("hermes", "stack_core.text.parsers.hermes:HermesParser")
    registry.add("llama3_json", "stack_core.text.parsers.llama3:Llama3Parser")
    registry.add("mistral", "stack_core.text.parsers.mistral:MistralParser")
    registry.add("pythonic", "stack_core.text.parsers.pythonic:PythonicParser")
    registry.add("qwen3", "stack_core.text.parsers.hermes:HermesParser")
    registry.add("qwen3_coder", "stack_core.text.parsers.qwen3_coder:Qwen3CoderParser")


@hookimpl
def stack_register_reasoning_parsers(registry: Registrar) -> None:
    registry.add("deepseek_r1", "stack_core.text.parsers.think:ThinkParser")
    registry.add("gpt_oss", "stack_core.text.parsers.harmony:HarmonyReasoningParser")
    registry.add("mistral", "stack_core.text.parsers.mistral:MistralReasoningParser")
    registry.add("qwen3", "stack_core.text.parsers.think:ThinkParser")


@hookimpl
def stack_register_launchers(registry: Registrar) -> None:
    registry.add("joined", "stack_core.runtime.launchers.joined:JoinedLauncher")
    registry.add("processes", "stack_core.runtime.launchers.processes:ProcessesLauncher")
    registry.add("ray", "stack_core.runtime.launchers.ray:RayLauncher")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "chips", "stack_core.commands.chips:chips", help="List chips with their peaks; mark the chips of this machine."
    )
    registry.add("cluster events", "stack_core.commands.cluster:events", help="List the events of a run's cluster.")
    registry.add("cluster join", "stack_core.commands.cluster:join", help="Join this host to a run's cluster.")
    registry.add("cluster logs", "stack_core.commands.cluster:logs", help="Print the output of a run's workers.")
    registry.add(
        "cluster status", "stack_core.commands.cluster:status", help="Show a run's hosts, workers and failures."
    )
    registry.add(
        "config explain", "stack_core.commands.config:explain", help="Explain a config key: text, type, default."
    )
    registry.add("config keys", "stack_core.commands.config:keys", help="List the keys that a config file accepts.")
    registry.add(
        "config show", "stack_core.commands.config_show:show", help="Show a resolved config, with the origin of values."
    )
    registry.add(
        "config schema", "stack_core.commands.config_schema:schema", help="Print a JSON schema of config files."
    )
    registry.add("doctor", "stack_core.commands.doctor:doctor", help="Check this installation and suggest fixes.")
    registry.add("plugins", "stack_core.commands.plugins:plugins", help="List plugins and what they register.")
