"""Registrations of stack-rl."""

from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_objectives(registry: Registrar) -> None:
    registry.add("dpo", "stack_rl.objectives.preference:DPOConfig")
    registry.add("ipo", "stack_rl.objectives.preference:IPOConfig")
    registry.add("orpo", "stack_rl.objectives.preference:ORPOConfig")
    registry.add("simpo", "stack_rl.objectives.preference:SimPOConfig")
    registry.add("kto", "stack_rl.objectives.kto:KTOConfig")
    registry.add("diffusion_dpo", "stack_rl.objectives.image_preference:DiffusionDPOConfig")
    registry.add("flow_grpo", "stack_rl.objectives.flow_grpo:FlowGRPOConfig")
    registry.add("reward_model", "stack_rl.objectives.reward_model:RewardModelConfig")
    registry.add("grpo", "stack_rl.objectives.presets:GRPOConfig")
    registry.add("dr_grpo", "stack_rl.objectives.presets:DrGRPOConfig")
    registry.add("dapo", "stack_rl.objectives.presets:DAPOConfig")
    registry.add("gspo", "stack_rl.objectives.presets:GSPOConfig")
    registry.add("cispo", "stack_rl.objectives.presets:CISPOConfig")
    registry.add("rloo", "stack_rl.objectives.presets:RLOOConfig")
    registry.add("ppo", "stack_rl.objectives.ppo:PPOConfig")
    registry.add("reinforce_pp", "stack_rl.objectives.presets:ReinforceConfig")
    registry.add("distill", "stack_rl.objectives.presets:DistillConfig")
    registry.add("logit_distill", "stack_rl.objectives.distillation:LogitDistillConfig")


@hookimpl
def stack_register_checks(registry: Registrar) -> None:
    registry.add("sandbox", "stack_rl.checks:check_sandbox")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "rl list",
        "stack_rl.commands.list_objectives:list_objectives",
        help="List the algorithms of post-training with their equations and papers.",
    )
    registry.add("rl audit", "stack_rl.commands.audit:audit", help="Compare a recipe with the algorithm that it names.")
    registry.add(
        "rl evaluate",
        "stack_rl.commands.evaluate:evaluate",
        help="Play the held-out tasks of a recipe with a model.",
    )
    registry.add(
        "rl serve",
        "stack_rl.commands.serve:serve",
        help="Train and sample adapters of a model for clients of the Tinker API.",
    )


@hookimpl
def stack_register_data(registry: Registrar) -> None:
    registry.add("rollouts", "stack_rl.rollouts:RolloutData")


@hookimpl
def stack_register_environments(registry: Registrar) -> None:
    registry.add("cell", "stack_rl.environments.cell:CellConfig")
    registry.add("sorting", "stack_rl.environments.sorting:SortingConfig")
    registry.add("prompts", "stack_rl.environments.prompts:PromptsConfig")
    registry.add("count_shapes", "stack_rl.environments.count_shapes:CountShapesConfig")
    registry.add("tools", "stack_rl.environments.tools:ToolsConfig")
    registry.add("gymnasium", "stack_rl.environments.gymnasium:GymnasiumConfig")
    registry.add("agent", "stack_rl.environments.agent:AgentConfig")
    registry.add("reasoning_gym", "stack_rl.environments.reasoning_gym:ReasoningGymConfig")
    registry.add("verifiers", "stack_rl.environments.verifiers:VerifiersConfig")
    registry.add("openenv", "stack_rl.environments.openenv:OpenEnvConfig")
    registry.add("mix", "stack_rl.environments.mix:MixConfig")


@hookimpl
def stack_register_rewards(registry: Registrar) -> None:
    registry.add("exact", "stack_rl.rewards.functions:exact")
    registry.add("characters", "stack_rl.rewards.functions:characters")
    registry.add("math", "stack_rl.rewards.math:MathConfig")
    registry.add("code", "stack_rl.rewards.code:CodeConfig")
    registry.add("model", "stack_rl.rewards.model:ModelRewardConfig")
    registry.add("judge", "stack_rl.rewards.judge:JudgeConfig")
    registry.add("pairwise", "stack_rl.rewards.pairwise:PairwiseConfig")
    registry.add("rubric", "stack_rl.rewards.rubric:RubricConfig")


@hookimpl
def stack_register_panels(registry: Registrar) -> None:
    registry.add("episodes", "stack_rl.panels.episodes:episodes", order=30)
