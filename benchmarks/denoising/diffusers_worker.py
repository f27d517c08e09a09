"""Measures sampling and training of diffusers' denoisers on PyTorch, in an environment that has both."""

import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from work import BETAS, CHANNELS, CLASSES, GUIDANCE, LEARNING_RATE, ROWS, SHAPES, SHIFT, STEPS, TEXT_DIM, serve
from work import conditions as drawn_conditions
from work import noise as drawn_noise


def build(name: str) -> tuple[Any, Any]:
    """Returns a model with random weights, and its scheduler."""
    torch.manual_seed(0)
    if name == "wan":
        model = diffusers.WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=64,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_DIM,
            ffn_dim=1024,
            num_layers=6,
        )
        return model, diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False, steps_offset=1)
    if name == "dit":
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=6,
            attention_head_dim=64,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=8,
            sample_size=SHAPES[name][0],
            num_embeds_ada_norm=CLASSES,
        ), scheduler
    return diffusers.UNet2DConditionModel(
        sample_size=SHAPES[name][0],
        block_out_channels=(64, 128, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_DIM,
        layers_per_block=1,
    ), scheduler


def predicted(name: str, model: Any, x: torch.Tensor, timesteps: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    if name == "dit":
        return model(x, timestep=timesteps, class_labels=condition).sample
    return model(x, timestep=timesteps, encoder_hidden_states=condition).sample


def sample(name: str, model: Any, scheduler: Any, noise: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """The loop of diffusers' pipelines: both predictions of guidance in one call."""
    scheduler.set_timesteps(STEPS)
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    with torch.inference_mode():
        for timestep in scheduler.timesteps:
            doubled = torch.cat([x, x])
            doubled = scheduler.scale_model_input(doubled, timestep) if name != "wan" else doubled
            given, without = predicted(name, model, doubled, timestep.expand(2 * ROWS), both).chunk(2)
            x = scheduler.step(without + GUIDANCE * (given - without), timestep, x, return_dict=False)[0]
    return x


class Training:
    """The loop of diffusers' training scripts: noise, mean squared error, clipped gradients, AdamW."""

    def __init__(self, name: str, model: Any, scheduler: Any, latents: torch.Tensor, condition: torch.Tensor) -> None:
        self.name, self.model, self.scheduler = name, model.train(), scheduler
        self.latents, self.condition = latents, condition
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def __call__(self) -> None:
        noise, rows = torch.randn_like(self.latents), len(self.latents)
        if self.name == "wan":
            times = torch.sigmoid(torch.randn(rows))
            times = SHIFT * times / (1 + (SHIFT - 1) * times)
            each = times.reshape(-1, 1, 1, 1, 1)
            noisy, target, timesteps = (1 - each) * self.latents + each * noise, noise - self.latents, 1000 * times
        else:
            timesteps = torch.randint(0, 1000, (rows,))
            noisy, target = self.scheduler.add_noise(self.latents, noise, timesteps), noise
        loss = torch.nn.functional.mse_loss(predicted(self.name, self.model, noisy, timesteps, self.condition), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert torch.isfinite(loss)


def main() -> None:
    name, task, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    model, scheduler = build(name)
    model.save_pretrained(folder / "model")
    scheduler.save_pretrained(folder / "scheduler")
    noise = torch.from_numpy(np.moveaxis(drawn_noise(name), -1, 1).copy())
    condition, negative = (torch.from_numpy(each) for each in drawn_conditions(name).values())
    model.eval()
    if task == "step":
        serve(Training(name, model, scheduler, noise, condition), None, folder, "diffusers")
        return
    both = torch.cat([condition, negative])
    found = sample(name, model, scheduler, noise, both).numpy()
    serve(lambda: sample(name, model, scheduler, noise, both), np.moveaxis(found, 1, -1), folder, "diffusers")


if __name__ == "__main__":
    main()
