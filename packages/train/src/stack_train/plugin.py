"""Registrations of stack-train."""

from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.registry import Registrar

STACK_ABI_MINOR = 0


_LANGUAGE_MODELS = (
    "llama",
    "llama4",
    "mistral",
    "mistral3",
    "mixtral",
    "minimax",
    "minimax_m2",
    "pixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma2",
    "gemma3",
    "gemma3_vision",
    "gemma4",
    "gemma4_vision",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "arcee",
    "cwm",
    "ernie4_5",
    "glm4",
    "exaone4",
    "phi3",
    "granite",
    "granite_moe",
    "granite_moe_hybrid",
    "bamba",
    "nemotron_h",
    "seed_oss",
    "ministral3",
    "smollm3",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v2",
    "glm4_moe",
    "glm_moe_dsa",
    "bert",
    "roberta",
    "xlm_roberta",
    "modernbert",
    "t5",
    "mt5",
    "umt5",
)
"""Families of language models, each in the module of `stack_train.models` with its name."""


@hookimpl
def stack_register_models(registry: Registrar) -> None:
    for name in _LANGUAGE_MODELS:
        registry.add(name, f"stack_train.models.{name}:FAMILY")
    registry.add("dit", "stack_train.diffusion.dit:FAMILY")
    registry.add("flux", "stack_train.diffusion.flux:FAMILY")
    registry.add("sd3", "stack_train.diffusion.sd3:FAMILY")
    registry.add("unet", "stack_train.diffusion.unet:FAMILY")
    registry.add("wan", "stack_train.diffusion.wan:FAMILY")
    registry.add("autoencoder_kl", "stack_train.diffusion.autoencoder_kl:FAMILY")
    registry.add("siglip", "stack_train.contrastive.siglip:FAMILY")
    registry.add("clip", "stack_train.contrastive.clip:FAMILY")
    registry.add("ltx", "stack_train.diffusion.ltx:FAMILY")
    registry.add("autoencoder_kl_ltx", "stack_train.diffusion.autoencoder_kl_ltx:FAMILY")
    registry.add("autoencoder_kl_wan", "stack_train.diffusion.autoencoder_kl_wan:FAMILY")


@hookimpl
def stack_register_data_sources(registry: Registrar) -> None:
    registry.add("stdlib", "stack_train.data.stdlib:StdlibSource")
    registry.add("text", "stack_train.data.text:TextSource")
    registry.add("jsonl", "stack_train.data.jsonl:JsonlSource")
    registry.add("parquet", "stack_train.data.parquet:ParquetSource")
    registry.add("arrayrecord", "stack_train.data.array_record:ArrayRecordSource")
    registry.add("prepared", "stack_train.data.prepared.source:PreparedSource")
    registry.add("tar", "stack_train.data.tar:TarSource")
    registry.add("datasets", "stack_train.data.hf_datasets:DatasetsSource")
    registry.add("stream", "stack_train.data.streamed:StreamSource")


@hookimpl
def stack_register_data(registry: Registrar) -> None:
    registry.add("text", "stack_train.data.kinds.text:TextData")
    registry.add("chat", "stack_train.data.kinds.chat:ChatData")
    registry.add("image_chat", "stack_train.data.kinds.image_chat:ImageChatData")
    registry.add("pairs", "stack_train.data.kinds.pairs:PairData")
    registry.add("spans", "stack_train.data.kinds.spans:SpanData")
    registry.add("preferences", "stack_train.data.kinds.preferences:PreferenceData")
    registry.add("judged", "stack_train.data.kinds.judged:JudgedData")
    registry.add("arrays", "stack_train.data.kinds.arrays:ArraysData")
    registry.add("images", "stack_train.data.kinds.images:ImagesData")
    registry.add("digits", "stack_train.data.kinds.digits:DigitsData")
    registry.add("captioned", "stack_train.data.kinds.captioned:CaptionedData")
    registry.add("image_pairs", "stack_train.data.kinds.image_pairs:ImagePairsData")
    registry.add("image_rollouts", "stack_train.data.kinds.image_rollouts:ImageRolloutsData")
    registry.add("image_texts", "stack_train.data.kinds.image_texts:ImageTextsData")
    registry.add("videos", "stack_train.data.kinds.videos:VideosData")


@hookimpl
def stack_register_objectives(registry: Registrar) -> None:
    registry.add("causal_lm", "stack_train.objectives:CausalLMConfig")
    registry.add("epsilon", "stack_train.diffusion.objectives:EpsilonConfig")
    registry.add("flow_matching", "stack_train.diffusion.objectives:FlowMatchingConfig")
    registry.add("v", "stack_train.diffusion.objectives:VConfig")
    registry.add("consistency_distill", "stack_train.diffusion.consistency:ConsistencyDistillConfig")
    registry.add("reconstruction", "stack_train.diffusion.reconstruction:ReconstructionConfig")
    registry.add("softmax_contrastive", "stack_train.contrastive.objectives:SoftmaxContrastiveConfig")
    registry.add("sigmoid_contrastive", "stack_train.contrastive.objectives:SigmoidContrastiveConfig")


@hookimpl
def stack_register_optimizers(registry: Registrar) -> None:
    registry.add("adafactor", "stack_train.optim:AdafactorConfig")
    registry.add("adamw", "stack_train.optim:AdamWConfig")
    registry.add("lion", "stack_train.optim:LionConfig")
    registry.add("muon", "stack_train.optim:MuonConfig")
    registry.add("schedule_free", "stack_train.optim:ScheduleFreeConfig")
    registry.add("sgd", "stack_train.optim:SgdConfig")


@hookimpl
def stack_register_engines(registry: Registrar) -> None:
    registry.add("static", "stack_train.generation.static_engine:StaticEngine")


@hookimpl
def stack_register_model_formats(registry: Registrar) -> None:
    registry.add("gguf", "stack_train.gguf:FORMAT")
    registry.add("hf", "stack_train.huggingface:FORMAT")
    registry.add("peft", "stack_train.peft:FORMAT")
    registry.add("run", "stack_train.variables.trained_model:RUN_FORMAT")


@hookimpl
def stack_register_observers(registry: Registrar) -> None:
    registry.add("terminal", "stack_train.observers.terminal:terminal_observer")
    registry.add("jsonl", "stack_train.observers.jsonl:jsonl_observer")
    registry.add("goodput", "stack_train.observers.goodput:goodput_observer")
    registry.add("history", "stack_train.observers.history:history_observer")
    registry.add("report", "stack_train.observers.report:report_observer")
    registry.add("tensorboard", "stack_train.observers.tensorboard:tensorboard_observer")
    registry.add("wandb", "stack_train.observers.wandb:wandb_tracker")
    registry.add("mlflow", "stack_train.observers.mlflow:mlflow_tracker")


@hookimpl
def stack_register_sections(registry: Registrar) -> None:
    registry.add("wandb", "stack_train.observers.wandb:WandbConfig")
    registry.add("mlflow", "stack_train.observers.mlflow:MlflowConfig")
    registry.add("controlnet", "stack_train.diffusion.controlnet:ControlNetSection")


@hookimpl
def stack_register_transforms(registry: Registrar) -> None:
    registry.add("controlnet", "stack_train.diffusion.controlnet:ControlNetTraining")


@hookimpl
def stack_register_panels(registry: Registrar) -> None:
    registry.add("summary", "stack_train.panels.summary:summary", order=10)
    registry.add("curves", "stack_train.panels.curves:curves", order=20)
    registry.add("samples", "stack_train.panels.samples:samples", order=15)
    registry.add("goodput", "stack_train.panels.goodput:goodput", order=30)


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "train",
        "stack_train.commands.train:train",
        help="Train a model from a config file.",
        huge_pages=True,
        config="stack_train.run.config:RunConfig",
        parse="stack_train.run.resolve:parse_run",
        function="stack_train.run.session:train",
    )
    registry.add("init", "stack_train.commands.init:init", help="Write a commented config file for a first run.")
    registry.add(
        "compile",
        "stack_train.commands.compile:compile_run",
        help="Compile a train step for hardware that need not be there.",
    )
    registry.add(
        "checkpoint ls", "stack_train.commands.checkpoint:list_checkpoints", help="List the checkpoints of a run."
    )
    registry.add("checkpoint verify", "stack_train.commands.checkpoint:verify", help="Verify every digest.")
    registry.add("checkpoint diff", "stack_train.commands.checkpoint:diff", help="Compare two checkpoints.")
    registry.add("checkpoint average", "stack_train.commands.checkpoint:average", help="Average parameters into a run.")
    registry.add(
        "checkpoint gc", "stack_train.commands.checkpoint:collect_garbage", help="Delete partial and old checkpoints."
    )
    registry.add(
        "data prepare",
        "stack_train.commands.data:prepare_data",
        help="Tokenize documents once, in parallel, for runs of many processes.",
    )
    registry.add("data verify", "stack_train.commands.data:verify_data", help="Check the files of a prepared set.")
    registry.add("models", "stack_train.commands.models:models", help="List the families of models.")
    registry.add("report", "stack_train.commands.report:report", help="Write the report of a run again.")
    registry.add(
        "generate",
        "stack_train.commands.generate:generate",
        help="Generate text with a trained model.",
        huge_pages=True,
    )
    registry.add(
        "sample",
        "stack_train.commands.sample:sample",
        help="Sample images of a diffusion or flow model.",
        huge_pages=True,
    )
    registry.add(
        "convert", "stack_train.commands.convert:convert", help="Convert to and from Hugging Face checkpoints."
    )
