"""Encoders for the examples of text to image and text to video: random text encoders, and autoencoders of pixels.

    python examples/encoders.py [DIRECTORY]

writes the diffusers directories `sdxl`, `sd3` and `wan`, without denoisers. Text encoders with random weights
distinguish a dozen captions. The autoencoders need no training: their latents are the pixels. Real images need a
published directory in their place.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion import autoencoder_kl, autoencoder_kl_wan, clip, t5
from stack_train.diffusion.pipeline import Encoders, save_encoders
from stack_train.diffusion.pipeline_classes import PIPELINES
from stack_train.diffusion.prompts import PromptTokenizer, TextEncoder, TextEncoders

WORDS = ["<pad>", "<end>", "a", "red", "green", "blue", "yellow", "square", "circle", "triangle"]
WORDS += ["moves", "left", "right", "up", "down"]
WIDTH, TOKENS = 32, 6
SIDE, VIDEO_SIDE, FRAMES = 16, 6, 10
LARGE = 100.0
FLOATS: dict[str, Any] = {"dtype": "float32", "param_dtype": "float32"}


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/encoders")
    images, videos = image_autoencoder(), video_autoencoder()
    for name, pipeline, autoencoder in (
        ("sdxl", "StableDiffusionXLPipeline", images),
        ("sd3", "StableDiffusion3Pipeline", images),
        ("wan", "WanPipeline", videos),
    ):
        if not (root / name).exists():
            save_encoders(root / name, encoders(root / name, pipeline, autoencoder))


def encoders(directory: Path, name: str, autoencoder: Any) -> Encoders:
    """Returns the encoders of a pipeline of diffusers, with random text encoders."""
    (pipeline,) = [each for each in PIPELINES if each.name == name]
    tokenizer, text = word_tokenizer(), {}
    for number, (folder, (component, _)) in enumerate(pipeline.text.items()):
        config = text_config(component, width=2 * WIDTH if pipeline.joins_tokens else WIDTH)
        model = component.family.build(config, key=jax.random.key(number))
        text[folder] = TextEncoder(model, PromptTokenizer(tokenizer, folder, TOKENS, WORDS.index("<pad>")))
    return Encoders(directory, autoencoder, TextEncoders(text, pipeline.condition, pipeline.clean), pipeline)


def text_config(component: Any, *, width: int) -> Any:
    """Returns the config of a text encoder of one layer.

    Args:
      width: features of the tokens of T5. The tokens of a CLIP have WIDTH.
    """
    if component in (t5.COMPONENT, t5.UMT5):
        sizes = {"embed": width, "mlp": width, "layers": 1, "heads": 2, "head_dim": 16, "buckets": 8, "max_distance": 8}
        own = {"layer_biases": True, "pad_id": 0} if component is t5.UMT5 else {}
        return t5.T5EncoderConfig(vocab_size=len(WORDS), **sizes, **own, **FLOATS)
    sizes = {"embed": WIDTH, "mlp": WIDTH, "layers": 1, "heads": 2, "max_positions": TOKENS, "projection": WIDTH}
    own = {"projects": component is clip.PROJECTED, "end": WORDS.index("<end>"), "initializer_std": 0.3}
    return clip.ClipTextConfig(vocab_size=len(WORDS), **sizes, **own, **FLOATS)


def word_tokenizer() -> HuggingFaceTokenizer:
    """Returns a tokenizer whose tokens are the words of the captions."""
    built = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(WORDS[:2])
    built.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    names = b'{"eos_token": "<end>", "pad_token": "<pad>"}'
    return HuggingFaceTokenizer({"tokenizer.json": built.to_str().encode(), "tokenizer_config.json": names}, "words")


def image_autoencoder() -> Any:
    """Returns an autoencoder of colored pictures."""
    sizes: dict[str, Any] = {"image_size": SIDE, "channels": 3, "latent_channels": 3, "widths": (8,)}
    options: dict[str, Any] = {"groups": 1, "attends": False, "quantizes": False, "blocks_per_level": 1}
    scale: dict[str, Any] = {"shift_factor": -0.7, "scaling_factor": 2.0}  # mean and deviation of the pictures
    config = autoencoder_kl.AutoencoderKlConfig(**sizes, **options, **scale, **FLOATS)
    model = zeros(autoencoder_kl.FAMILY, config)
    return copying(model, model.encoder.conv_norm_out.scale, model.decoder.conv_norm_out.scale)


def video_autoencoder() -> Any:
    """Returns an autoencoder of grey videos."""
    sizes: dict[str, Any] = {"image_size": VIDEO_SIDE, "frames": FRAMES, "channels": 1, "latent_channels": 1}
    options: dict[str, Any] = {"width": 4, "multipliers": (1,), "blocks_per_level": 1, "halves_frames": ()}
    scale: dict[str, Any] = {"latents_mean": (-0.55,), "latents_std": (0.78,)}  # of the pixels of examples/squares.py
    config = autoencoder_kl_wan.AutoencoderKlWanConfig(**sizes, **options, **scale, **FLOATS)
    model = zeros(autoencoder_kl_wan.FAMILY, config)
    copying(model, model.encoder.norm_out.gamma, model.decoder.norm_out.gamma)
    model.quant_conv.kernel[...] = jnp.eye(2)[None, None, None]
    model.post_quant_conv.kernel[...] = jnp.ones((1, 1, 1, 1, 1))
    return model


def zeros(family: Any, config: Any) -> Any:
    """Returns a model whose parameters are 0."""
    model = nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0)))
    nnx.update(model, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nnx.state(model)))
    return model


def copying(model: Any, *norms: Any) -> Any:
    """Sets the weights of an autoencoder of zeros to copy pixels, up to 0.02%.

    Residual blocks and attention stay 0. The first layer writes v and -v of each channel, and two large constants
    b and -b, which the norm divides by about b. The last layer computes silu(x) - silu(-x) = x.
    """
    channels = model.config.channels
    signs = np.kron(np.eye(channels), [1.0, -1.0])  # [channels, 2 channels]
    for half, norm in zip((model.encoder, model.decoder), norms, strict=True):
        leaves = half.conv_in.kernel, half.conv_in.bias, half.conv_out.kernel
        first, bias, last = values = [np.array(leaf[...]) for leaf in leaves]
        middle = (-1, 1, 1)[2 - first.ndim :]  # the middle pixel, in videos of the last frame
        first[middle][:channels, : 2 * channels] = signs
        last[middle][: 2 * channels, :channels] = LARGE / (channels + 1) ** 0.5 * signs.T
        bias[-2:] = LARGE, -LARGE
        for leaf, value in zip(leaves, values, strict=True):
            leaf[...] = jnp.asarray(value)
        norm[...] = jnp.ones_like(norm[...])
    return model


if __name__ == "__main__":
    main()
