"""`scheduler_config.json` of a diffusers directory: the noise schedule of the training, and the sampler.

Every key of a supported class is read or refused by name. As in diffusers, a class ignores keys that only other
classes have; published files carry them over from the scheduler that they replaced.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.diffusion.denoiser import TIMESTEPS
from stack_train.diffusion.noise import DynamicShift, NoiseConfig
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig, VConfig
from stack_train.diffusion.samplers import LCM_STEPS, SamplerConfig
from stack_train.models.reader import Reader, Setting

__all__ = ["Scheduler", "read_scheduler", "scheduler_class", "write_scheduler"]

_FILE = "scheduler_config.json"
_FLOW, _UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
_LCM, _FLOW_LCM = "LCMScheduler", "FlowMatchLCMScheduler"
_FLOWS = {_FLOW: "euler", _FLOW_LCM: "lcm"}
_DYNAMIC = (
    Setting("base_shift", ("base_shift",), 0.5),
    Setting("max_shift", ("max_shift",), 1.15),
    Setting("base_tokens", ("base_image_seq_len",), 256),
    Setting("max_tokens", ("max_image_seq_len",), 4096),
    Setting("curve", ("time_shift_type",), "exponential"),
)
_BETAS = {"linear": "linear", "scaled_linear": "scaled_linear", "squaredcos_cap_v2": "cosine"}
_FINAL = {"zero": "zero", "sigma_min": "min"}
_SPACINGS = {"use_karras_sigmas": "karras", "use_exponential_sigmas": "exponential", "use_beta_sigmas": "beta"}
_LU = {"use_lu_lambdas": "lu"}
_DPMPP = {
    (2, "dpmsolver++"): "dpmpp_2m",
    (3, "dpmsolver++"): "dpmpp_3m",
    (2, "sde-dpmsolver++"): "dpmpp_2m_sde",
    (3, "sde-dpmsolver++"): "dpmpp_3m_sde",
}
_SAMPLERS = {
    "DDIMScheduler": "ddim",
    "PNDMScheduler": "plms",
    "EulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
    "HeunDiscreteScheduler": "heun",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    _UNIPC: "unipc",
    _LCM: "lcm",
}
_COMMON = {
    *("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type"),
    *("timestep_spacing", "steps_offset"),
}
_THRESHOLDS = {"thresholding", "dynamic_thresholding_ratio", "sample_max_value"}
_OWN = {
    "DDIMScheduler": {"clip_sample", "clip_sample_range", "set_alpha_to_one", "rescale_betas_zero_snr"} | _THRESHOLDS,
    "PNDMScheduler": {"skip_prk_steps", "set_alpha_to_one"},
    "EulerDiscreteScheduler": {"interpolation_type", "sigma_min", "sigma_max", "timestep_type", *_SPACINGS}
    | {"rescale_betas_zero_snr", "final_sigmas_type"},
    "EulerAncestralDiscreteScheduler": {"rescale_betas_zero_snr"},
    "HeunDiscreteScheduler": {"clip_sample", "clip_sample_range", *_SPACINGS},
    "DPMSolverMultistepScheduler": {"solver_order", "algorithm_type", "solver_type", "lower_order_final", *_LU}
    | {"euler_at_final", "use_flow_sigmas", "flow_shift", "final_sigmas_type", "lambda_min_clipped", "variance_type"}
    | {"rescale_betas_zero_snr", "use_dynamic_shifting", "time_shift_type", *_SPACINGS, *_THRESHOLDS},
    _UNIPC: {"solver_order", "solver_type", "lower_order_final", "predict_x0", "disable_corrector", "solver_p"}
    | {"use_flow_sigmas", "flow_shift", "shift_terminal", "final_sigmas_type", "sigma_min", "sigma_max"}
    | {"rescale_betas_zero_snr", "use_dynamic_shifting", "time_shift_type", *_SPACINGS, *_THRESHOLDS},
    _LCM: {"original_inference_steps", "timestep_scaling", "clip_sample", "clip_sample_range", "set_alpha_to_one"}
    | {"rescale_betas_zero_snr"}
    | _THRESHOLDS,
}
"""Keys of each class, in addition to `_COMMON`."""

Objective: TypeAlias = FlowMatchingConfig | EpsilonConfig | VConfig


@dataclass(frozen=True)
class Scheduler:
    """The noise schedule by which a denoiser was trained, as an objective, and the sampler of its images."""

    objective: Objective
    sampler: SamplerConfig


def read_scheduler(directory: Path) -> Scheduler:
    """Reads the scheduler of a pipeline.

    Raises:
      ConversionError: it is another class, or has a setting that samplers here do not follow; names each.
    """
    path = directory / _FILE
    try:
        mapping = json.loads(path.read_bytes())
        name = mapping.get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}. It has the noise schedule of the denoiser.") from error
    if name not in _FLOWS and name not in _SAMPLERS:
        raise ConversionError(f"{path} is a {name}; {', '.join((*_FLOWS, *_SAMPLERS))} are read.")
    reader = Reader(mapping)
    if name == _UNIPC and mapping.get("use_flow_sigmas"):
        objective, settings, sampler = _read_unipc_flow(reader)
    else:
        objective, settings, sampler = _read_flow(reader, name) if name in _FLOWS else _read_discrete(reader, name)
    if wrong := [*reader.problems, *reader.unread()]:
        raise ConversionError(
            f"{path} has settings that the samplers here do not follow: {'; '.join(wrong)}. The images would be others "
            "than those of diffusers; sample there, or set these keys to false or null if that is what you want."
        )
    try:
        return Scheduler(parse(objective, settings), parse(SamplerConfig, sampler))
    except ConfigError as error:
        raise ConversionError(f"{path} has no valid schedule: {error}") from error


def _read_flow(reader: Reader, name: str) -> tuple[type[Objective], dict[str, Any], dict[str, Any]]:
    reader.expect("num_train_timesteps", int(TIMESTEPS))
    shift = reader.get("shift", default=1.0)
    dynamic = {setting.ours: reader.get(*setting.names, default=setting.default) for setting in _DYNAMIC}
    if reader.get("use_dynamic_shifting"):  # in this mode diffusers ignores `shift`, and otherwise the remaining keys
        shift = dynamic
    sampler = {"sigmas": _sigmas(reader, _SPACINGS), "terminal": reader.get("shift_terminal") or None}
    sampler["name"] = _FLOWS[name]
    if name == _FLOW_LCM:
        reader.expect("scale_factors", None)
        reader.get("upscale_mode")  # read only with the former
        # diffusers bounds the steps of flows only by the number of timesteps.
        sampler |= {"steps": LCM_STEPS, "solver_steps": int(TIMESTEPS)}
    return FlowMatchingConfig, {"shift": shift}, sampler


def _read_unipc_flow(reader: Reader) -> tuple[type[Objective], dict[str, Any], dict[str, Any]]:
    reader.get(*_COMMON, *(set().union(*_OWN.values()) - _OWN[_UNIPC]))  # ignored as in diffusers
    reader.get("rescale_betas_zero_snr")  # a setting of betas
    reader.expect("num_train_timesteps", int(TIMESTEPS))
    reader.expect("use_flow_sigmas", True)
    reader.expect("final_sigmas_type", "zero")
    for key in _SPACINGS:
        reader.expect(key, False)
    if (given := reader.get("prediction_type", default="epsilon")) != "flow_prediction":
        reader.problems.append(f"prediction_type={given!r}, not 'flow_prediction'")
    sampler = {"name": "unipc", "terminal": reader.get("shift_terminal") or None, **_read_unipc(reader, {})}
    return FlowMatchingConfig, {"shift": reader.get("flow_shift", default=1.0)}, sampler


def _read_discrete(reader: Reader, name: str) -> tuple[type[Objective], dict[str, Any], dict[str, Any]]:
    own = _COMMON | _OWN[name]
    reader.get(*(set().union(*_OWN.values()) - own))  # ignored as in diffusers
    is_scaled = name == _LCM
    first, last = (0.00085, 0.012) if is_scaled or name == "HeunDiscreteScheduler" else (0.0001, 0.02)
    betas = _choice(reader, "beta_schedule", "scaled_linear" if is_scaled else "linear", _BETAS)
    ends = {
        "beta_start": reader.get("beta_start", default=first),
        "beta_end": reader.get("beta_end", default=last),
    }
    noise = {"steps": reader.get("num_train_timesteps", default=1000), "betas": betas}
    noise |= {} if betas == "cosine" else ends
    if "rescale_betas_zero_snr" in own:
        noise["zero_snr"] = bool(reader.get("rescale_betas_zero_snr", default=False))
    objective = _choice(reader, "prediction_type", "epsilon", {"epsilon": EpsilonConfig, "v_prediction": VConfig})
    whole = "set_alpha_to_one" in own and name != _LCM
    spacing = reader.get("timestep_spacing", default="leading" if whole else "linspace")
    offset = reader.get("steps_offset", default=0)
    if name == _LCM:
        # As in diffusers, its steps depend only on the solver, and it ends without noise.
        reader.get("set_alpha_to_one")
        spacing = None
    sampler = {"name": _SAMPLERS[name], "spacing": spacing, "steps_offset": offset if spacing == "leading" else 0}
    if whole:
        to_one = reader.get("set_alpha_to_one", default=name == "DDIMScheduler")
        sampler["final"] = "zero" if to_one else "min"
    if "final_sigmas_type" in own:
        sampler["final"] = _choice(reader, "final_sigmas_type", "zero", _FINAL)
    if "use_karras_sigmas" in own:
        sampler["sigmas"] = _sigmas(reader, _SPACINGS | (_LU if "use_lu_lambdas" in own else {}))
    for key, default in (("clip_sample", name == "DDIMScheduler"), ("thresholding", False)):
        if key in own and reader.get(key, default=default):
            reader.problems.append(f"{key}=True, not False")
    # Read only together with the former two.
    reader.get("clip_sample_range", "dynamic_thresholding_ratio")
    reader.get("sample_max_value")
    sampler |= _OTHERS.get(name, _nothing)(reader, sampler)
    return objective, {"noise": noise}, sampler


def _nothing(reader: Reader, sampler: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _read_pndm(reader: Reader, sampler: Mapping[str, Any]) -> dict[str, Any]:
    if not reader.get("skip_prk_steps", default=False):
        reader.problems.append("skip_prk_steps=False, not True")
    return {}


def _read_euler(reader: Reader, sampler: Mapping[str, Any]) -> dict[str, Any]:
    reader.expect("interpolation_type", "linear")
    reader.expect("timestep_type", "discrete")
    bounds = {name: reader.get(name) for name in ("sigma_min", "sigma_max")}
    return bounds if sampler["sigmas"] else {}  # only spacings of noise levels read the bounds


def _read_dpmpp(reader: Reader, sampler: Mapping[str, Any]) -> dict[str, Any]:
    order, algorithm = reader.get("solver_order", default=2), reader.get("algorithm_type", default="dpmsolver++")
    name = _DPMPP.get((order, algorithm))
    if name is None:
        known = " or ".join(f"{order} and {algorithm!r}" for order, algorithm in _DPMPP)
        reader.problems.append(f"solver_order={order!r} and algorithm_type={algorithm!r}, not {known}")
    if (clipped := reader.get("lambda_min_clipped", default="-inf")) is not None and float(clipped) != -float("inf"):
        reader.problems.append(f"lambda_min_clipped={clipped!r}, not -Infinity")
    for key in ("use_flow_sigmas", "use_dynamic_shifting"):
        reader.expect(key, False)
    reader.get("flow_shift", "time_shift_type")  # read only with the former two
    return {
        "name": name or "dpmpp_2m",
        "correction": reader.get("solver_type", default="midpoint"),
        "lower_order_final": reader.get("lower_order_final", default=True),
        "euler_at_final": reader.get("euler_at_final", default=False),
    }


def _read_unipc(reader: Reader, sampler: Mapping[str, Any]) -> dict[str, Any]:
    reader.expect("solver_order", 2)
    reader.expect("predict_x0", True)
    reader.expect("disable_corrector", [])
    reader.expect("solver_p", None)
    reader.expect("use_dynamic_shifting", False)  # not supported by diffusers' WanPipeline
    reader.expect("thresholding", False)
    reader.get("time_shift_type", "dynamic_thresholding_ratio", "sample_max_value")  # read only with the former two
    # diffusers replaces the names of other solvers by bh2.
    if (solver := reader.get("solver_type", default="bh2")) not in ("bh2", "midpoint", "heun", "logrho"):
        reader.problems.append(f"solver_type={solver!r}, not 'bh2'")
    found = {"lower_order_final": reader.get("lower_order_final", default=True)}
    bounds = {name: reader.get(name) for name in ("sigma_min", "sigma_max")}
    if not sampler:  # a flow
        return found
    reader.expect("use_flow_sigmas", False)
    reader.expect("shift_terminal", None)
    reader.get("flow_shift")
    return found | (bounds if sampler["sigmas"] else {})


def _read_lcm(reader: Reader, sampler: Mapping[str, Any]) -> dict[str, Any]:
    solver_steps = reader.get("original_inference_steps", default=50)
    return {
        "steps": min(LCM_STEPS, solver_steps) if isinstance(solver_steps, int) else LCM_STEPS,
        "solver_steps": solver_steps,
        "timestep_scaling": reader.get("timestep_scaling", default=10.0),
    }


_OTHERS = {
    _LCM: _read_lcm,
    _UNIPC: _read_unipc,
    "PNDMScheduler": _read_pndm,
    "EulerDiscreteScheduler": _read_euler,
    "DPMSolverMultistepScheduler": _read_dpmpp,
}


def _choice(reader: Reader, key: str, default: str, choices: Mapping[str, Any]) -> Any:
    given = reader.get(key, default=default)
    if given not in choices:
        reader.problems.append(f"{key}={given!r}, not {' or '.join(map(repr, choices))}")
    return choices.get(given, choices[default])


def _sigmas(reader: Reader, keys: Mapping[str, str]) -> str | None:
    chosen = [(key, name) for key, name in keys.items() if reader.get(key)]
    if len(chosen) > 1:
        reader.problems.append(f"{'; '.join(f'{key}=True' for key, _ in chosen)}, of which one can act")
    return chosen[0][1] if chosen else None


def scheduler_class(scheduler: Scheduler) -> str:
    """Returns the class of diffusers that samples alike."""
    name = scheduler.sampler.name
    if isinstance(scheduler.objective, FlowMatchingConfig):
        return {"unipc": _UNIPC, "lcm": _FLOW_LCM}.get(name, _FLOW)
    return next((each for each, ours in _SAMPLERS.items() if ours == name), "DPMSolverMultistepScheduler")


def write_scheduler(directory: Path, scheduler: Scheduler) -> None:
    """Writes the scheduler of a pipeline."""
    name = scheduler_class(scheduler)
    is_flow = isinstance(scheduler.objective, FlowMatchingConfig)
    settings = _write_flow(scheduler, name) if is_flow else _write_discrete(scheduler, name)
    directory.mkdir()
    text = json.dumps({"_class_name": name, **settings}, indent=2) + "\n"
    (directory / _FILE).write_text(text, encoding="utf-8")


def _write_flow(scheduler: Scheduler, name: str) -> dict[str, Any]:
    shift, sampler = scheduler.objective.shift, scheduler.sampler  # pyrefly: ignore[missing-attribute]
    if name == _UNIPC:
        if isinstance(shift, DynamicShift):
            raise ConversionError("diffusers' unipc shifts no flow by the size of images. Choose the sampler euler.")
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
        return {
            "num_train_timesteps": int(TIMESTEPS),
            **flow,
            "shift_terminal": sampler.terminal,
            "solver_order": 2,
            "solver_type": "bh2",
            "lower_order_final": sampler.lower_order_final,
        }
    settings: dict[str, Any] = {"num_train_timesteps": int(TIMESTEPS), "shift_terminal": sampler.terminal}
    settings |= {key: True for key, name in _SPACINGS.items() if name == sampler.sigmas}
    if not isinstance(shift, DynamicShift):
        return settings | {"shift": shift, "use_dynamic_shifting": False}
    return settings | {"use_dynamic_shifting": True, **{each.names[0]: getattr(shift, each.ours) for each in _DYNAMIC}}


def _write_discrete(scheduler: Scheduler, name: str) -> dict[str, Any]:
    noise: NoiseConfig = scheduler.objective.noise  # pyrefly: ignore[missing-attribute]
    sampler, own = scheduler.sampler, _COMMON | _OWN[name]
    solver = {ours: key for key, ours in _DPMPP.items()}.get(sampler.name, (2, "dpmsolver++"))
    settings = {
        "num_train_timesteps": noise.steps,
        "beta_schedule": next(theirs for theirs, ours in _BETAS.items() if ours == noise.betas),
        "beta_start": noise.beta_start,
        "beta_end": noise.beta_end,
        "rescale_betas_zero_snr": noise.zero_snr,
        "prediction_type": "v_prediction" if isinstance(scheduler.objective, VConfig) else "epsilon",
        "timestep_spacing": sampler.spacing or "linspace",
        "steps_offset": sampler.steps_offset,
        "set_alpha_to_one": sampler.final == "zero",
        "final_sigmas_type": next(theirs for theirs, ours in _FINAL.items() if ours == sampler.final),
        "clip_sample": False,
        "skip_prk_steps": True,
        "sigma_min": sampler.sigma_min,
        "sigma_max": sampler.sigma_max,
        "solver_order": solver[0],
        "algorithm_type": solver[1],
        "solver_type": "bh2" if name == _UNIPC else sampler.correction,
        "lower_order_final": sampler.lower_order_final,
        "euler_at_final": sampler.euler_at_final,
        "original_inference_steps": sampler.solver_steps,
        "timestep_scaling": sampler.timestep_scaling,
        **{key: True for key, ours in (_SPACINGS | _LU).items() if ours == sampler.sigmas},
    }
    return {key: value for key, value in settings.items() if key in own}
