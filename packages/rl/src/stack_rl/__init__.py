"""Post-training on JAX: preference and reinforcement-learning objectives, rewards, environments.

Train a run or a checkpoint against a reward of your own, as `stack train` would::

    import json
    from pathlib import Path

    import stack_rl

    def brief(completion: stack_rl.Completion) -> float:
        return -float(len(completion.text))

    Path("prompts.jsonl").write_text(json.dumps({"prompt": "one two"}))
    settings = {"data": {"groups": 2, "group_size": 4, "seq_tokens": 16}, "run": {"steps": 2}}
    print(stack_rl.train("runs/small", "prompts.jsonl", brief, "grpo", output="runs/brief", **settings))
"""

from typing import TYPE_CHECKING

from stack_core.exports import lazy_exports

if TYPE_CHECKING:
    from stack_rl.contracts import Action as Action
    from stack_rl.contracts import Completion as Completion
    from stack_rl.contracts import Environment as Environment
    from stack_rl.contracts import EnvironmentKind as EnvironmentKind
    from stack_rl.contracts import Observation as Observation
    from stack_rl.contracts import Reward as Reward
    from stack_rl.contracts import Score as Score
    from stack_rl.contracts import StepResult as StepResult
    from stack_rl.contracts import Tasks as Tasks
    from stack_rl.environments.prompts import PromptsConfig as PromptsConfig
    from stack_rl.environments.tools import ToolsConfig as ToolsConfig
    from stack_rl.objectives.kto import KTOConfig as KTOConfig
    from stack_rl.objectives.ppo import PPOConfig as PPOConfig
    from stack_rl.objectives.preference import DPOConfig as DPOConfig
    from stack_rl.objectives.preference import IPOConfig as IPOConfig
    from stack_rl.objectives.preference import ORPOConfig as ORPOConfig
    from stack_rl.objectives.preference import SimPOConfig as SimPOConfig
    from stack_rl.objectives.presets import CISPOConfig as CISPOConfig
    from stack_rl.objectives.presets import DAPOConfig as DAPOConfig
    from stack_rl.objectives.presets import DistillConfig as DistillConfig
    from stack_rl.objectives.presets import DrGRPOConfig as DrGRPOConfig
    from stack_rl.objectives.presets import GRPOConfig as GRPOConfig
    from stack_rl.objectives.presets import GSPOConfig as GSPOConfig
    from stack_rl.objectives.presets import ReinforceConfig as ReinforceConfig
    from stack_rl.objectives.presets import RLOOConfig as RLOOConfig
    from stack_rl.objectives.reward_model import RewardModelConfig as RewardModelConfig
    from stack_rl.rollouts import RolloutData as RolloutData
    from stack_rl.tinker.datums import Datum as Datum
    from stack_rl.tinker.local import LocalClient as LocalClient
    from stack_rl.tinker.training import AdamParams as AdamParams
    from stack_rl.training import train as train

    __version__: str
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stack_rl.contracts": [
                "Action",
                "Completion",
                "Environment",
                "EnvironmentKind",
                "Observation",
                "Reward",
                "Score",
                "StepResult",
                "Tasks",
            ],
            "stack_rl.environments.prompts": ["PromptsConfig"],
            "stack_rl.environments.tools": ["ToolsConfig"],
            "stack_rl.objectives.kto": ["KTOConfig"],
            "stack_rl.objectives.ppo": ["PPOConfig"],
            "stack_rl.objectives.preference": ["DPOConfig", "IPOConfig", "ORPOConfig", "SimPOConfig"],
            "stack_rl.objectives.presets": [
                "CISPOConfig",
                "DAPOConfig",
                "DistillConfig",
                "DrGRPOConfig",
                "GRPOConfig",
                "GSPOConfig",
                "RLOOConfig",
                "ReinforceConfig",
            ],
            "stack_rl.objectives.reward_model": ["RewardModelConfig"],
            "stack_rl.rollouts": ["RolloutData"],
            "stack_rl.tinker.datums": ["Datum"],
            "stack_rl.tinker.local": ["LocalClient"],
            "stack_rl.tinker.training": ["AdamParams"],
            "stack_rl.training": ["train"],
        },
    )
