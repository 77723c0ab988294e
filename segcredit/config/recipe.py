"""The settings of a run. Each field is described below it; unknown keys are refused."""

from inspect import signature
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from segcredit.algorithms import ALGORITHMS, make_algorithm
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.config.checks import method_problems, recipe_problems
from segcredit.data.worlds import make_world
from segcredit.models import FAMILIES
from segcredit.models.template import check_template
from segcredit.registry import names_code, nearest
from segcredit.rewards import make_reward
from segcredit.rollout.engines import DEFAULT_PROMPT_TOKENS, ENGINES, EngineSettings
from segcredit.runlog.trackers import TRACKERS
from segcredit.types import Algorithm, Sampling


def _refuse_bool(x: Any) -> Any:
    if isinstance(x, bool):
        raise ValueError(f"expected a number; got {str(x).lower()}")
    return x


def _checked_device(name: str, expected: str) -> str:
    """Return the name of a device if torch can read it."""
    try:
        torch.device(name)
    except RuntimeError:
        raise ValueError(f"expected {expected}; got {name!r}") from None
    return name


Whole = Annotated[int, BeforeValidator(_refuse_bool)]
Number = Annotated[float, BeforeValidator(_refuse_bool)]
Schedule = Literal["constant", "linear", "cosine"]


class Settings(BaseModel):
    """Base class of all settings: immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class LoraSettings(Settings):
    """Low-rank adapters that are trained instead of the weights (LoRA)."""

    rank: Whole = Field(32, ge=1)
    """Rank r of an adapter: a weight W becomes W + alpha / r · B A, where B has r columns."""
    alpha: Number = Field(32.0, gt=0)
    """Scale of the adapters; the product B A is multiplied by alpha / rank."""
    targets: str | list[str] = "language"
    """Layers that get an adapter. language: all linear layers of the language model. all-linear:
    also those of the vision tower, unless model.freeze_vision. Or a list of layer names, such as
    [q_proj, v_proj]. The output head never gets one."""


class ModelSettings(Settings):
    """The model to train: a checkpoint, or a tiny model with random weights."""

    path: str | None = None
    """Hugging Face folder or hub id, such as Qwen/Qwen2.5-VL-3B-Instruct."""
    tiny: str | None = None
    """Architecture of a tiny model with random weights, instead of path: qwen2, llama, qwen2_5_vl
    or qwen3_vl, or the name of model.family. Its vocabulary is that of data.world."""
    family: str | None = None
    """Model family: a built-in name, or one of your own as file.py:Name. None: chosen by model_type
    in the model's config.json."""
    hidden: Whole = Field(96, ge=8)
    """Hidden size of a tiny model."""
    layers: Whole = Field(2, ge=1)
    """Number of layers of a tiny model."""
    heads: Whole = Field(4, ge=1)
    """Number of attention heads of a tiny model."""
    kv_heads: Whole | None = Field(None, ge=1)
    """Number of key-value heads of a tiny model. None: half of heads, or heads if that is odd."""
    vision_layers: Whole = Field(1, ge=1)
    """Number of layers of a tiny model's vision tower."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights. The optimizer keeps fp32 master weights for bfloat16."""
    attention: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation. packed: sequences are packed without padding, and all images of a
    batch go through the vision tower together. auto: packed on a GPU in bfloat16, otherwise sdpa
    with grouped-query attention that does not copy shared keys."""
    compile: bool = False
    """Whether scoring and update use torch.compile: faster on a GPU after one or two minutes."""
    freeze_vision: bool = False
    """Whether the vision tower stays frozen."""
    critic: str | None = None
    """Folder of a saved critic to start from: RUN/checkpoints/step-…/critic. None: the critic
    starts from the policy's weights, with V = 0."""
    lora: LoraSettings | None = None
    """LoRA adapters to train instead of all weights; {} uses the defaults. None: train all
    weights."""
    device: str = "auto"
    """Device to train on: cpu, cuda or cuda:0. auto: the GPU if there is one."""
    trust_remote_code: bool = False
    """Whether Python code in the model's repository may run."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of a tiny model."""
        return self.model_dump(include={"hidden", "layers", "heads", "kv_heads", "vision_layers"})

    @field_validator("family")
    @classmethod
    def _known_family(cls, name: str | None) -> str | None:
        return None if name is None else FAMILIES.check_name(name)

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        return name if name == "auto" else _checked_device(name, "auto, cpu, cuda or cuda:0 …")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSettings":
        if (self.path is None) == (self.tiny is None):
            raise ValueError(
                "give exactly one of path (a folder or hub id) and tiny (a model with random "
                "weights)"
            )
        return self


class DataSettings(Settings):
    """The prompts: files of rows, or a world that generates them."""

    train: list[str] = Field(default_factory=list)
    """Training prompts: files (parquet, arrow, jsonl, json, csv, tsv) or datasets on the Hub
    (hub:OWNER/NAME/CONFIG:SPLIT); one name or a list."""
    test: list[str] = Field(default_factory=list)
    """Held-out prompts for evaluation: files or datasets on the Hub; one name or a list."""
    suffix: str | None = None
    """Text that is appended to the last user message, after a space."""
    system: str | None = Field(None, min_length=1)
    """System prompt: a message before those of the row. A row with its own system prompt is a bad
    row.
    None: only what the rows and the model's chat template contain."""
    template: str | None = None
    """Prompt for a base model without a chat template; {question} is replaced by the question."""
    max_prompt_tokens: Whole | None = Field(None, ge=1)
    """Maximum length of a prompt in tokens; rows with a longer one are bad rows. None: only the
    model's context window limits it."""
    allow_outside: bool = False
    """Whether rows may name images outside the folder of their data file."""
    skip_bad_rows: bool = False
    """Whether bad rows are skipped. Otherwise they are listed and training does not start."""
    world: str | None = None
    """World that generates prompts, instead of train: shape_grid, derived_variables, ledger,
    tile_tour, or file.py:Name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the world, such as its difficulty."""
    size: Whole | None = Field(None, ge=1)
    """Number of distinct training prompts of a world. None: prompts never repeat."""
    curriculum: bool = False
    """Whether optimization samples training prompts by their success rate so far, instead of in
    passes over the data; prompts that are solved half of the time are sampled most often."""

    @field_validator("train", "test", mode="before")
    @classmethod
    def _as_list(cls, names: object) -> object:
        return [names] if isinstance(names, str) else names

    @field_validator("template")
    @classmethod
    def _one_question(cls, template: str | None) -> str | None:
        return template if template is None else check_template(template)

    @model_validator(mode="after")
    def _one_source(self) -> "DataSettings":
        if bool(self.train) == (self.world is not None):
            raise ValueError("give exactly one of train (files of prompts) and world (generated)")
        if self.settings and self.world is None:
            raise ValueError("settings belong to a world: set world, or remove settings")
        if self.system is not None and self.world is not None:
            raise ValueError("system is for rows; a world writes its own prompts: remove system")
        if self.system is not None and self.template is not None:
            raise ValueError(
                "system is a chat message, and template replaces the chat template: write the "
                "system prompt into template, before {question}, and remove system"
            )
        if self.world is not None:
            try:
                make_world(self.world, **self.settings)
            except TypeError as error:
                raise ValueError(f"a setting of {self.world} has the wrong type: {error}") from None
        return self


class VllmSettings(Settings):
    """Settings of rollout.engine=vllm."""

    memory: Number = Field(0.4, gt=0, lt=1)
    """Fraction of the GPU memory that vLLM uses while it samples; it releases it for training."""
    eager: bool = False
    """Whether vLLM runs without CUDA graphs: starts faster, samples at half the speed."""


class TreeSettings(Settings):
    """Shape of the response trees of spo_tree."""

    branching: list[Annotated[Whole, Field(ge=2)]] = Field([6, 6, 6], min_length=1)
    """Number of branches per node, level by level: from the prompt, from the end of each of these
    branches, and so on."""
    tokens: Whole = Field(100, ge=1)
    """Length of a branch in tokens, after which it branches again. Branches of the last level end
    with their responses."""


MismatchUnits = Literal["token", "segment", "response"]
"""Units over which the ratio of trainer to sampler is taken."""


RefillBy = Literal["auto", "correct", "reward"]
"""What must differ within a group that dynamic sampling keeps."""


class RolloutSettings(Settings):
    """How responses are sampled in a step."""

    prompts: Whole = Field(128, ge=1)
    """Number of distinct prompts per step; at most the number of training prompts."""
    samples: Whole = Field(1, ge=1)
    """Responses per prompt; group methods (grpo, gspo, rloo) need at least 2."""
    max_tokens: Whole = Field(2048, ge=1)
    """Maximum length of a response in tokens."""
    temperature: Number = Field(1.0, gt=0)
    """Sampling temperature of training responses."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Top-p of training responses: sample from the most probable tokens with this total
    probability. Log-probabilities and ratios are those of the whole policy, as in TRL and verl, so
    below 1 the gradient is biased; a run warns once."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Stop strings, such as ["\\n\\n"]: a response ends with the token that completes one of
    them, also in evaluations. The text is part of the response."""
    prefixes: Whole | None = Field(None, ge=1)
    """Maximum number of distinct prefixes that are continued in a step (vineppo, spo_chain, dvo).
    The first segments of all responses come first; segments beyond the limit get no value and no
    credit. None: all prefixes."""
    tree: TreeSettings | None = None
    """Shape of the trees of spo_tree, in which the responses to a prompt are branches, such as
    {branching: [6, 6, 6]}. None: responses are independent."""
    rows: Whole = Field(256, ge=1)
    """Maximum number of responses that are sampled at once; affects only speed and memory."""
    engine: str = "hf"
    """Sampling engine. hf: transformers, on any device. vllm: several times faster on a GPU, in
    the same process. Or one of your own: file.py:Name."""
    graphs: Literal[True, False, "auto"] = "auto"
    """Whether the hf engine samples with CUDA graphs, which speeds up small models, whose kernels
    take longer to launch than to run; the KV cache then keeps its memory. auto: on a GPU, for
    models below 1 B parameters."""
    vllm: VllmSettings = VllmSettings()
    """Settings of the vllm engine."""
    old_logp: Literal["auto", "sampler", "recompute"] = "auto"
    """Source of log π_old and entropy. sampler: as sampled. recompute: a forward pass of the
    trained model. auto: sampler for hf in float32; recompute in bfloat16, where sampling and
    scoring round differently, and for vllm, which returns no entropies."""
    mismatch_cap: Number | None = Field(None, ge=1)
    """Weight each token's policy loss by π_old / π_sampler, truncated at this value, such as 2.
    This corrects for numerical differences between sampler and trainer. None: only log the
    ratio."""
    mismatch_over: MismatchUnits = "token"
    """Unit of that ratio. token: each token. segment: the method's segments of credit. response:
    the product over the response, which is exact but has the highest variance."""
    mismatch_mask: bool = False
    """Whether tokens with a ratio above mismatch_cap (or below mismatch_floor) get weight 0 instead
    of a truncated one."""
    mismatch_floor: Number | None = Field(None, gt=0, le=1)
    """Lower bound of the ratio, such as 0.5 (IcePop). None: no lower bound."""
    refills: Whole = Field(0, ge=0)
    """Dynamic sampling (DAPO): maximum number of additional batches of prompts per step, whose
    responses replace the responses to prompts that are answered all correctly or all incorrectly,
    since group methods learn nothing from them. DAPO's code: 10. 0: off."""
    refill_by: RefillBy = "auto"
    """How the responses to a prompt must differ for dynamic sampling to keep it. correct: some are
    correct and some are not, as in DAPO, so that a difference in length penalty is not enough.
    reward: by their rewards. auto: correct, or reward if the reward does not say which responses
    are correct."""
    ahead: Whole = Field(0, ge=0, le=1)
    """Number of updates by which sampling may be ahead. 1: while a step's update runs, a copy of
    the policy with the weights before that update samples the next step's responses
    (docs/training.md). 0: responses come from the current policy."""
    device: str | None = None
    """Device of the copy that samples with rollout.ahead: cpu, cuda or cuda:1. None: the device
    that trains."""

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, name: str) -> str:
        return ENGINES.check_name(name)

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str | None) -> str | None:
        return name if name is None else _checked_device(name, "cpu, cuda or cuda:1 …")

    def sampling(self, max_tokens: int | None = None, temperature: float | None = None) -> Sampling:
        """Return the sampling parameters of training; other limits and temperatures on request."""
        return Sampling(
            self.max_tokens if max_tokens is None else max_tokens,
            self.temperature if temperature is None else temperature,
            self.top_p,
            stop=tuple(self.stop),
        )

    def engine_settings(
        self,
        max_prompt_tokens: int | None = None,
        repeats_prompts: bool = False,
        needs_logp: bool = False,
    ) -> EngineSettings:
        """Return the engine's settings; ``repeats_prompts``: prompts repeat even for one sample."""
        return EngineSettings(
            rows=self.rows,
            max_tokens=self.max_tokens,
            max_prompt_tokens=max_prompt_tokens or DEFAULT_PROMPT_TOKENS,
            repeats_prompts=self.samples > 1 or repeats_prompts,
            needs_logp=needs_logp,
            graphs=self.graphs,
            vllm_memory=self.vllm.memory,
            vllm_eager=self.vllm.eager,
        )

    @model_validator(mode="after")
    def _tree_fits(self) -> "RolloutSettings":
        if self.tree is None:
            return self
        inner = (len(self.tree.branching) - 1) * self.tree.tokens
        if inner >= self.max_tokens:
            raise ValueError(
                f"tree: all levels but the last need {inner} tokens (tree.tokens × levels), which "
                f"leaves none of max_tokens={self.max_tokens}: set a smaller "
                f"tree.tokens, or fewer levels"
            )
        if self.samples != 1:
            raise ValueError(
                f"tree.branching sets the number of responses per prompt: set samples to 1; got "
                f"{self.samples}"
            )
        return self


class UpdateSettings(Settings):
    """How a batch of rollouts becomes gradient steps."""

    minibatches: Whole = Field(4, ge=1)
    """Number of mini-batches of a batch: gradient steps per epoch."""
    epochs: Whole = Field(1, ge=1)
    """Number of passes over a batch."""
    tokens_per_micro: Whole = Field(16_384, ge=1)
    """Maximum number of tokens per forward pass, prompts, responses and padding together; affects
    only memory."""
    mask_truncated: bool = False
    """Whether truncated responses are left out of the policy loss, KL, entropy bonus and their
    denominators (DAPO's over-long filtering). They still count in group statistics and in the value
    loss."""
    entropy_coef: Number = Field(0.0, ge=0)
    """Coefficient of an entropy bonus: the loss has −entropy_coef · H(π_θ), averaged over response
    tokens as the policy loss. For every policy-gradient method; 0: no bonus."""


class MemorySettings(Settings):
    """Ways to save memory on the device; results stay the same."""

    recompute_activations: bool = False
    """Whether to use gradient checkpointing: keep one activation per layer and recompute the rest
    in the backward pass. It needs a third more computation, and a fraction of the memory."""
    offload_optimizer: Literal[True, False, "stream"] = False
    """Whether the optimizer's moments and fp32 master weights are offloaded to CPU memory while
    they are not needed. stream: even during a gradient step only parts of them are on the GPU,
    which leaves memory for forward and backward passes; costs seconds per gradient step for a model
    of a few billion parameters."""
    shard: bool = False
    """Whether weights, gradients and optimizer state are sharded over the processes (FSDP2)
    instead of replicated; no effect for a single process."""


class OptimizerSettings(Settings):
    """AdamW and its learning rate schedule."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer. adamw_8bit: moments in 8 bits by bitsandbytes, a quarter of their memory; results
    differ slightly."""
    lr: Number = Field(1e-6, gt=0)
    """Learning rate of the policy."""
    critic_lr: Number = Field(2e-6, gt=0)
    """Learning rate of the critic."""
    beta1: Number = Field(0.9, ge=0, lt=1)
    """AdamW's β₁, decay of the first moment."""
    beta2: Number = Field(0.999, ge=0, lt=1)
    """AdamW's β₂, decay of the second moment."""
    eps: Number = Field(1e-8, gt=0)
    """AdamW's ε, added to the denominator."""
    weight_decay: Number = Field(0.0, ge=0)
    """Weight decay of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: Number = Field(1.0, gt=0)
    """Maximum norm of the gradient; a larger gradient is scaled down to it."""
    schedule: Schedule = "constant"
    """How the learning rates decay over the steps of the optimize stage."""
    warmup_steps: Whole = Field(0, ge=0)
    """Number of rollout batches over which the learning rates rise from 0."""
    min_lr_ratio: Number = Field(0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a fraction of lr."""


class WarmStart(Settings):
    """Supervised training on demonstrations: those of a world, or rows with a response."""

    kind: Literal["warm_start"] = "warm_start"
    """Kind of the stage."""
    steps: Whole = Field(ge=1)
    """Number of gradient steps."""
    batch: Whole = Field(32, ge=1)
    """Demonstrations per step."""
    lr: Number = Field(2e-3, gt=0)
    """Learning rate of this stage."""
    phase: str = "solve"
    """Which of the world's kinds of demonstrations to imitate."""
    schedule: Schedule = "linear"
    """How the learning rate decays."""
    warmup_steps: Whole = Field(20, ge=0)
    """Number of steps over which the learning rate rises from 0."""
    min_lr_ratio: Number = Field(0.05, ge=0, le=1)
    """Final learning rate of linear and cosine, as a fraction of lr."""
    hold: Number = Field(0.0, ge=0, lt=1)
    """Fraction of the steps after which linear and cosine begin to decay. Some skills are learned
    late and suddenly, and not at a low learning rate."""
    beta2: Number = Field(0.95, ge=0, lt=1)
    """AdamW's β₂ in this stage."""


class PretrainCritic(Settings):
    """Training of only the critic, on the frozen policy's rollouts and full returns (VC-PPO)."""

    kind: Literal["pretrain_critic"] = "pretrain_critic"
    """Kind of the stage."""
    steps: Whole = Field(ge=1)
    """Number of rollout batches."""
    lr: Number | None = Field(None, gt=0)
    """Learning rate of the critic in this stage. None: optimizer.critic_lr."""
    schedule: Schedule = "constant"
    """How the learning rate decays. Decay to 0 averages out the noise of single outcomes; with a
    constant rate, V keeps that noise."""
    epochs: Whole = Field(1, ge=1)
    """Number of passes over a batch."""
    prompts: Whole | None = Field(None, ge=1)
    """Number of prompts per batch, with rollout.samples responses each. None: rollout.prompts."""
    minibatches: Whole | None = Field(None, ge=1)
    """Gradient steps per epoch. None: update.minibatches."""


class Optimize(Settings):
    """Reinforcement learning with the recipe's algorithm."""

    kind: Literal["optimize"] = "optimize"
    """Kind of the stage."""
    steps: Whole = Field(ge=1)
    """Number of steps: rollout batches, each followed by an update."""


Stage = Annotated[WarmStart | PretrainCritic | Optimize, Field(discriminator="kind")]
KINDS = tuple(str(x.model_fields["kind"].default) for x in (WarmStart, PretrainCritic, Optimize))


class EvaluationSettings(Settings):
    """Held-out accuracy during training."""

    every: Whole = Field(10, ge=0)
    """Number of optimization steps between evaluations. 0: only before and after training."""
    prompts: Whole = Field(256, ge=1)
    """Number of held-out prompts per evaluation."""
    samples: Whole = Field(1, ge=1)
    """Sampled responses per prompt, in addition to the greedy one."""
    greedy: bool = True
    """Whether a greedy response is evaluated, too."""
    temperature: Number = Field(1.0, gt=0)
    """Sampling temperature of evaluation responses."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Top-p of evaluation responses: sample from the most probable tokens with this total
    probability."""
    watch: Whole = Field(4, ge=0)
    """Number of held-out prompts whose responses are recorded with per-token credit at every
    evaluation. They are always the same prompts, so that changes are visible."""
    metric: Literal["auto", "sampled", "greedy", "reward", "greedy_reward"] = "auto"
    """Held-out result that save.best and patience compare: accuracy (sampled, greedy) or mean
    reward (reward, greedy_reward). auto: sampled, or reward if the reward does not say which
    responses are correct."""
    patience: Whole | None = Field(None, ge=1)
    """Early stopping: end the run after this number of evaluations in a row without a gain, as
    early_stopping_patience of transformers. Evaluations before optimization do not count. None:
    off."""
    min_gain: Number = Field(0.0, ge=0)
    """Minimum increase of the metric, compared with the last gain, that counts as a gain for
    patience. 0: any increase."""


class SaveSettings(Settings):
    """What a run saves."""

    every: Whole = Field(20, ge=1)
    """Number of steps between checkpoints."""
    keep: Whole = Field(2, ge=1)
    """Number of checkpoints to keep; the final one is always kept."""
    best: bool = False
    """Whether to keep the checkpoint with the best held-out result (evaluation.metric), too. It is
    saved right after the evaluation, named in best.json, and chosen by segcredit evaluate
    --best."""
    rollouts_every: Whole = Field(10, ge=0)
    """Number of steps between files of recorded rollouts. 0: record none."""
    rollouts: Whole = Field(16, ge=1)
    """Number of responses per file of recorded rollouts."""
    trackers: list[str] = Field(default_factory=list)
    """Experiment trackers in addition to TensorBoard: wandb, trackio, mlflow."""

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: list[str]) -> list[str]:
        others = [name for name in TRACKERS if name != "tensorboard"]
        for name in names:
            if name not in others:
                raise ValueError(
                    f"expected names of {', '.join(others)}; got {name!r}.{nearest(name, others)}"
                )
        return names


class Recipe(Settings):
    """The complete settings of a run; running them again repeats it."""

    name: str = Field("run", min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run; used for its directory."""
    seed: Whole = Field(0, ge=0)
    """Seed of all random numbers."""
    threads: Whole | None = Field(None, ge=1)
    """Number of CPU threads of PyTorch. None: its default."""
    model: ModelSettings
    """The model to train."""
    data: DataSettings
    """The prompts."""
    reward: str | dict[str, Any] | list[str | dict[str, Any]] = "math"
    """Reward: math, geo3k, gsm8k, exact, judge, server, or file.py:function; with settings as
    {name: …, …}.
    Several with weights: [{name: math, weight: 0.9}, {name: file.py:function, weight: 0.1}]; the
    method learns from their sum, and each is logged as reward/LABEL (label: LABEL; by default its
    name)."""
    algorithm: str | dict[str, Any] = "sapo"
    """Name of the method; with settings as {name: sapo, lam: 0.95, partition: newline}."""
    stages: list[Stage] = Field(min_length=1)
    """Stages of the run, in order: warm_start, pretrain_critic, optimize."""
    rollout: RolloutSettings = RolloutSettings()
    """How responses are sampled."""
    update: UpdateSettings = UpdateSettings()
    """How a batch becomes gradient steps."""
    memory: MemorySettings = MemorySettings()
    """Ways to save memory."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer and learning rates."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Held-out accuracy during training."""
    save: SaveSettings = SaveSettings()
    """Checkpoints, recorded rollouts and trackers."""

    @property
    def evaluation_sampling(self) -> Sampling:
        """Sampling parameters of evaluations; the length limit and stop strings are training's."""
        return Sampling(
            self.rollout.max_tokens,
            self.evaluation.temperature,
            self.evaluation.top_p,
            stop=tuple(self.rollout.stop),
        )

    @property
    def total_steps(self) -> int:
        """Number of steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def recomputes(self) -> bool:
        """Whether log π_old is recomputed by the trained model."""
        exact = self.rollout.engine == "hf" and self.model.dtype == "float32"
        source = self.rollout.old_logp
        return source == "recompute" or (source == "auto" and not exact)

    def make_algorithm(self) -> Algorithm:
        """Make the method from its name and settings, with the bonus of ``update.entropy_coef``.

        A method with a parameter ``max_tokens``, such as Dr. GRPO, gets the run's limit unless it
        is set.
        """
        return self.with_bonus(algorithm_of(self.algorithm, self.rollout.max_tokens))

    def with_bonus(self, algorithm: Algorithm) -> Algorithm:
        """Add the bonus of ``update.entropy_coef`` to a method that supports it."""
        if not isinstance(algorithm, PolicyGradient):
            return algorithm
        return algorithm.with_entropy_bonus(self.update.entropy_coef)

    @field_validator("algorithm", "reward", mode="before")
    @classmethod
    def _has_name(cls, spec: Any, info: ValidationInfo) -> Any:
        several = info.field_name == "reward" and isinstance(spec, list) and spec
        if all(_is_named(x) for x in (spec if several else [spec])):
            return spec
        example = "{name: sapo, lam: 0.95}" if info.field_name == "algorithm" else "{name: math}"
        raise ValueError(f"expected a name, or settings with a name, as in {example}; got {spec!r}")

    @field_validator("algorithm", "reward")
    @classmethod
    def _can_be_made(cls, spec: Any, info: ValidationInfo) -> Any:
        try:
            if info.field_name == "algorithm":
                algorithm_of(spec)
            else:
                _check_reward(spec)
        except TypeError as error:
            raise ValueError(f"a setting of {spec!r} has the wrong type: {error}") from None
        return spec

    @model_validator(mode="after")
    def _settings_agree(self, info: ValidationInfo) -> "Recipe":
        """Check settings against each other; ``parse_recipe`` passes an algorithm as context."""
        problems = recipe_problems(self)
        if not info.context:
            name = self.algorithm if isinstance(self.algorithm, str) else self.algorithm["name"]
            problems += method_problems(self, self.make_algorithm(), name)
        elif (algorithm := info.context["algorithm"]) is not None:
            problems += method_problems(self, algorithm, "this method")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the complete settings as plain data, for config.yaml."""
        return self.model_dump(mode="json")

    def changed_settings(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults; as a recipe, they make this one."""
        found = self.model_dump(mode="json", exclude_defaults=True)
        stages = zip(self.stages, found["stages"], strict=True)
        return found | {"stages": [{"kind": stage.kind, **x} for stage, x in stages]}


def _is_named(spec: object) -> bool:
    return isinstance(spec, str) or (isinstance(spec, dict) and isinstance(spec.get("name"), str))


def _check_reward(spec: str | dict[str, Any] | list[Any]) -> None:
    """Make the reward, unless it names a file, which train/build.py checks later."""
    if isinstance(spec, list):
        # a stand-in under the same label, so that weights and labels are checked, too
        make_reward([_without_file(x) for x in spec])
    elif not names_code(spec if isinstance(spec, str) else spec["name"]):
        make_reward(spec)


def _without_file(spec: str | dict[str, Any]) -> str | dict[str, Any]:
    settings = {"name": spec} if isinstance(spec, str) else spec
    if not names_code(settings["name"]):
        return spec
    label = settings.get("label", settings["name"].rpartition(":")[2])
    return {"name": "exact", "label": label, "weight": settings.get("weight", 1.0)}


def algorithm_of(spec: str | dict[str, Any], max_tokens: int | None = None) -> Algorithm:
    """Make a method from a name, or from settings with a name; lists become tuples.

    Args:
        max_tokens: The run's response limit, for a method that has this parameter and does not set
            it.
    """
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name"))
    made = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    if max_tokens is not None and "max_tokens" in signature(ALGORITHMS[name]).parameters:
        made = {"max_tokens": max_tokens} | made
    return make_algorithm(name, **made)
