"""Body of a request for images."""

from typing import Annotated, Literal

from pydantic import Field

from stack_serve.openai.schemas import Body

__all__ = ["ImageBody", "OutputFormat"]

OutputFormat = Literal["png", "jpeg", "webp"]


class ImageBody(Body):
    """Body of `/v1/images/generations`: OpenAI's fields, and settings of the sampler.

    Attributes:
      n: number of images. Image i depends on the seed and on i.
      size: WIDTHxHEIGHT in pixels, or "auto" for the model's.
      output_compression: quality of jpeg and webp, 0 to 100.
      partial_images: number of estimates that a stream contains before each image.
      seed: seed of the noise; random by default, and returned.
      negative_prompt: prompt for the unwanted contents; needs guidance.
      guidance: scale of classifier-free guidance.
      embedded_guidance: guidance scale that is an input of guidance-distilled models.
      steps: number of sampling steps.
      user: has no effect.
    """

    prompt: Annotated[str, Field(max_length=32_000)]
    n: Annotated[int, Field(ge=1)] = 1
    size: Annotated[str, Field(pattern=r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$")] = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: OutputFormat = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    negative_prompt: Annotated[str, Field(max_length=32_000)] | None = None
    guidance: Annotated[float, Field(ge=0.0)] | None = None
    embedded_guidance: Annotated[float, Field(ge=0.0)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
