"""The settings of a run. Every field has its meaning beside it; unknown keys are refused."""

from difflib import get_close_matches
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

from segcredit.algorithms import make_algorithm
from segcredit.config.checks import method_problems, recipe_problems
from segcredit.data.worlds import make_world
from segcredit.models.template import check_template
from segcredit.rewards import make_reward
from segcredit.runlog.trackers import TRACKERS
from segcredit.runlog.untrusted import names_file
from segcredit.types import Algorithm


def _no_yes(x: Any) -> Any:
    if isinstance(x, bool):
        raise ValueError(f"expected a number; got {str(x).lower()}")
    return x


Whole = Annotated[int, BeforeValidator(_no_yes)]
Number = Annotated[float, BeforeValidator(_no_yes)]


class Settings(BaseModel):
    """Frozen, and strict about names."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class LoraSettings(Settings):
    """Matrices of low rank beside frozen weights, trained in their place (LoRA)."""

    rank: Whole = Field(32, ge=1)
    """Columns of B and rows of A; a weight W counts as W + alpha / rank · B A."""
    alpha: Number = Field(32.0, gt=0)
    """How much the product counts, times rank."""
    targets: str | list[str] = "language"
    """language: all linear layers of the language model; all-linear: the vision tower's too, unless
    model.freeze_vision; or names of layers, [q_proj, v_proj]. Never the head."""


class ModelSettings(Settings):
    """Which model is trained: a folder or hub id, or a tiny one made in code."""

    path: str | None = None
    """A Hugging Face folder or hub id, e.g. Qwen/Qwen2.5-VL-3B-Instruct."""
    tiny: str | None = None
    """qwen2, llama, qwen2_5_vl or qwen3_vl with random weights; needs a world's tokenizer."""
    hidden: Whole = Field(96, ge=8)
    """Width of a tiny model."""
    layers: Whole = Field(2, ge=1)
    """Depth of a tiny model."""
    heads: Whole = Field(4, ge=1)
    """Attention heads of a tiny model."""
    kv_heads: Whole | None = Field(None, ge=1)
    """Heads of keys and values of a tiny model; None: half as many, as many if odd."""
    vision_layers: Whole = Field(1, ge=1)
    """Depth of a tiny model's vision tower."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""
    attention: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"] = "auto"
    """packed: no padding is computed, and pictures go through the vision tower together; auto: that
    on a GPU in half precision, else sdpa without copies of keys that heads share."""
    compile: bool = False
    """Layers by torch.compile in scoring and update: faster on a GPU after a minute or two."""
    freeze_vision: bool = False
    """Leave the vision tower as it is."""
    critic: str | None = None
    """Where the critic begins: a folder that a run saved one to, RUN/checkpoints/step-…/critic.
    None: at the policy's own weights, with V = 0."""
    lora: LoraSettings | None = None
    """Train matrices of low rank instead of the weights: {} takes the settings' defaults."""
    device: str = "auto"
    """auto: the GPU if there is one."""
    trust_remote_code: bool = False
    """Run Python code that a hub repository brings along."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Of a tiny model."""
        return self.model_dump(include={"hidden", "layers", "heads", "kv_heads", "vision_layers"})

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        try:
            torch.device("cpu" if name == "auto" else name)
        except RuntimeError:
            raise ValueError(f"expected auto, cpu, cuda or cuda:0 …; got {name!r}") from None
        return name

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSettings":
        if (self.path is None) == (self.tiny is None):
            raise ValueError(
                "give exactly one of path (a folder or hub id) and tiny (a model made in code)"
            )
        return self


class DataSettings(Settings):
    """Which prompts: files of rows, or a generated world."""

    train: list[str] = Field(default_factory=list)
    """Files of prompts (jsonl, json, parquet) or hub ids."""
    test: list[str] = Field(default_factory=list)
    """Held-out prompts, for evaluation."""
    suffix: str | None = None
    """Joined to the last user message by a space."""
    template: str | None = None
    """How a question of text is put to a model that knows no chat, {question} in its place."""
    max_prompt_tokens: Whole | None = Field(None, ge=1)
    """Longer prompts are bad rows."""
    allow_outside: bool = False
    """Allow rows to name images outside the folder of their data file."""
    skip_bad_rows: bool = False
    """Leave bad rows out instead of stopping before training."""
    world: str | None = None
    """shape_grid, derived_variables, ledger or tile_tour."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Of the world: its difficulty."""
    size: Whole | None = Field(None, ge=1)
    """How many distinct training prompts of a world; None: never the same twice."""

    @field_validator("template")
    @classmethod
    def _one_question(cls, template: str | None) -> str | None:
        return template if template is None else check_template(template)

    @model_validator(mode="after")
    def _one_source(self) -> "DataSettings":
        if bool(self.train) == (self.world is not None):
            raise ValueError("give exactly one of train (files of prompts) and world (generated)")
        if self.settings and self.world is None:
            raise ValueError("settings belong to a world; got none")
        if self.world is not None:
            try:
                make_world(self.world, **self.settings)
            except TypeError as error:
                raise ValueError(
                    f"a setting of {self.world} is of the wrong kind: {error}"
                ) from None
        return self


class VllmSettings(Settings):
    """Of rollout.engine=vllm."""

    memory: Number = Field(0.4, gt=0, lt=1)
    """Share of the GPU's memory vLLM may fill while it samples; it gives it back to train."""
    eager: bool = False
    """Without CUDA graphs: starts sooner, samples at half the speed."""


class TreeSettings(Settings):
    """How responses branch (spo_tree)."""

    branching: list[Annotated[Whole, Field(ge=2)]] = Field([6, 6, 6], min_length=1)
    """Branches from the prompt, from the end of each of these, and so on."""
    tokens: Whole = Field(100, ge=1)
    """Length of a branch after which it branches again; the last ones end where responses do."""


class RolloutSettings(Settings):
    """How responses are drawn in a step."""

    prompts: Whole = Field(128, ge=1)
    """Number of distinct prompts per step; at most the number of training prompts."""
    samples: Whole = Field(1, ge=1)
    """Responses per prompt; group methods (grpo, gspo, rloo) need at least 2."""
    max_tokens: Whole = Field(2048, ge=1)
    """Length limit of a response."""
    temperature: Number = Field(1.0, gt=0)
    prefixes: Whole | None = Field(None, ge=1)
    """At most so many distinct beginnings of responses are continued in a step (vineppo, spo_chain,
    dvo); first units go first, those beyond get no value, and so no credit. None: all."""
    tree: TreeSettings | None = None
    """Of spo_tree: responses to a prompt are branches of one tree, {branching: [6, 6, 6]}."""
    rows: Whole = Field(256, ge=1)
    """Responses drawn at once."""
    engine: Literal["hf", "vllm"] = "hf"
    """hf: transformers, everywhere. vllm: several times faster on a GPU, in the same process."""
    graphs: Literal[True, False, "auto"] = "auto"
    """hf's steps by CUDA graphs: for small models, whose kernels take longer to launch than to run.
    auto: on a GPU, for models below 1 B parameters. Keys and values keep their memory then."""
    vllm: VllmSettings = VllmSettings()
    old_logp: Literal["auto", "sampler", "recompute"] = "auto"
    """Where log π_old and H come from: as drawn, or from a forward pass of the trained model.
    auto: as drawn by hf in float32; recomputed in half precision, where sampling and scoring round
    differently, and for vllm, which gives no entropies."""
    mismatch_cap: Number | None = Field(None, ge=1)
    """Weight each token's policy loss by π_old / π_sampler, truncated at this value, e.g. 2. This
    corrects for numerical differences between sampler and trainer. None: only log the ratio."""

    @model_validator(mode="after")
    def _tree_fits(self) -> "RolloutSettings":
        if self.tree is None:
            return self
        inner = (len(self.tree.branching) - 1) * self.tree.tokens
        if inner >= self.max_tokens:
            raise ValueError(
                f"tree: all branches but the last ones take {inner} tokens (tokens × levels), so "
                f"nothing is left of max_tokens={self.max_tokens}: set fewer tokens or levels"
            )
        if self.samples != 1:
            raise ValueError(
                f"tree.branching says how many responses a prompt gets: set samples to 1; "
                f"got {self.samples}"
            )
        return self


class UpdateSettings(Settings):
    """How a batch of rollouts becomes gradient steps."""

    minibatches: Whole = Field(4, ge=1)
    """Gradient steps per epoch over a batch."""
    epochs: Whole = Field(1, ge=1)
    """Passes over a batch."""
    tokens_per_micro: Whole = Field(16_384, ge=1)
    """Prompt and response tokens, padding included, in one forward pass: changes memory alone."""


class MemorySettings(Settings):
    """What to give up for room on the device; results stay the same."""

    recompute_activations: bool = False
    """Keep one state per layer and compute the rest again in the backward pass: a third more
    arithmetic, a fraction of the memory."""
    offload_optimizer: Literal[True, False, "stream"] = False
    """Moments and float32 originals rest in main memory while they are not needed. stream: they
    come back a part at a time within each gradient step, so that the passes have the room; takes
    seconds per gradient step for a model of some billions."""
    shard: bool = False
    """Weights, gradients and optimizer state are divided among the processes (FSDP2) instead of
    being whole on each; changes nothing for one process."""


class OptimizerSettings(Settings):
    """AdamW, its schedule, and when a step is refused."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: moments of eight bits each, a quarter of their memory, by bitsandbytes; results
    differ a little."""
    lr: Number = Field(1e-6, gt=0)
    """Of the policy."""
    critic_lr: Number = Field(2e-6, gt=0)
    beta1: Number = Field(0.9, ge=0, lt=1)
    beta2: Number = Field(0.999, ge=0, lt=1)
    eps: Number = Field(1e-8, gt=0)
    weight_decay: Number = Field(0.0, ge=0)
    """Of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: Number = Field(1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Whole = Field(0, ge=0)
    """Rollout batches over which the rate rises from 0."""
    min_lr_ratio: Number = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of lr."""


class WarmStart(Settings):
    """Supervised training on demonstrations: of a world, or rows with a response."""

    kind: Literal["warm_start"] = "warm_start"
    steps: Whole = Field(ge=1)
    batch: Whole = Field(32, ge=1)
    """Demonstrations per step."""
    lr: Number = Field(2e-3, gt=0)
    phase: str = "solve"
    """Which of the world's kinds of demonstration."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: Whole = Field(20, ge=0)
    """Steps over which the rate rises from 0."""
    min_lr_ratio: Number = Field(0.05, ge=0, le=1)
    """Where linear and cosine end, as a share of lr."""
    hold: Number = Field(0.0, ge=0, lt=1)
    """Share of the steps for which the rate stays at lr before it falls (linear, cosine): what is
    learnt late, and all at once, is not learnt at a low rate."""
    beta2: Number = Field(0.95, ge=0, lt=1)
    """AdamW's, in this stage."""


class PretrainCritic(Settings):
    """The critic alone, on the frozen policy's rollouts and their full returns (VC-PPO)."""

    kind: Literal["pretrain_critic"] = "pretrain_critic"
    steps: Whole = Field(ge=1)
    """Rollout batches."""
    lr: Number | None = Field(None, gt=0)
    """None: optimizer.critic_lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Falling to 0: V forgets the noise of single outcomes, which a constant rate keeps."""
    epochs: Whole = Field(1, ge=1)
    prompts: Whole | None = Field(None, ge=1)
    """Of a batch, each asked rollout.samples times. None: rollout.prompts."""
    minibatches: Whole | None = Field(None, ge=1)
    """Gradient steps of an epoch. None: update.minibatches."""


class Optimize(Settings):
    """Reinforcement learning by the recipe's algorithm."""

    kind: Literal["optimize"] = "optimize"
    steps: Whole = Field(ge=1)


Stage = Annotated[WarmStart | PretrainCritic | Optimize, Field(discriminator="kind")]
KINDS = tuple(str(x.model_fields["kind"].default) for x in (WarmStart, PretrainCritic, Optimize))


class EvaluationSettings(Settings):
    """Held-out accuracy while training."""

    every: Whole = Field(10, ge=0)
    """Optimisation steps between two evaluations; 0: only before and after."""
    prompts: Whole = Field(256, ge=1)
    """Held-out prompts asked each time."""
    samples: Whole = Field(1, ge=1)
    """Sampled responses per prompt, beside the greedy one."""
    greedy: bool = True
    temperature: Number = Field(1.0, gt=0)
    top_p: Number = Field(1.0, gt=0, le=1)
    watch: Whole = Field(4, ge=0)
    """Held-out prompts whose responses are kept token by token with their credit, each time the
    same, to see what changed."""


class SaveSettings(Settings):
    """What a run leaves behind."""

    every: Whole = Field(20, ge=1)
    """Steps between two checkpoints."""
    keep: Whole = Field(2, ge=1)
    """Checkpoints kept; the last one of the run always is."""
    rollouts_every: Whole = Field(10, ge=0)
    """Steps between two files of rollouts; 0: none."""
    rollouts: Whole = Field(16, ge=1)
    """Responses in each of them."""
    trackers: list[str] = Field(default_factory=list)
    """Beside TensorBoard: wandb, trackio, mlflow."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        others = [name for name in TRACKERS if name != "tensorboard"]
        for name in names:
            if name not in others:
                near = get_close_matches(name, others, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"expected names of {', '.join(others)}; got {name!r}.{hint}")
        return names


class Recipe(Settings):
    """One run, whole: running it again repeats it."""

    name: str = Field("run", min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Of the run's folder."""
    seed: Whole = Field(0, ge=0)
    threads: Whole | None = Field(None, ge=1)
    """CPU threads of torch; None: its own choice."""
    model: ModelSettings
    data: DataSettings
    reward: str | dict[str, Any] = "math"
    """math, geo3k, gsm8k, exact, or file.py:function; with settings as {name: …, …}."""
    algorithm: str | dict[str, Any] = "sapo"
    """A method's name; with settings as {name: sapo, lam: 0.95, partition: newline}."""
    stages: list[Stage] = Field(min_length=1)
    rollout: RolloutSettings = RolloutSettings()
    update: UpdateSettings = UpdateSettings()
    memory: MemorySettings = MemorySettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    save: SaveSettings = SaveSettings()

    @property
    def total_steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def recomputes(self) -> bool:
        """Whether π_old is computed again by the model that is trained."""
        exact = self.rollout.engine == "hf" and self.model.dtype == "float32"
        asked = self.rollout.old_logp
        return asked == "recompute" or (asked == "auto" and not exact)

    def make_algorithm(self) -> Algorithm:
        """The method as an object."""
        return algorithm_of(self.algorithm)

    @field_validator("algorithm", "reward", mode="before")
    @classmethod
    def _a_name(cls, spec: Any, info: ValidationInfo) -> Any:
        if isinstance(spec, str) or (isinstance(spec, dict) and isinstance(spec.get("name"), str)):
            return spec
        example = "{name: sapo, lam: 0.95}" if info.field_name == "algorithm" else "{name: math}"
        raise ValueError(f"expected a name, or settings with a name, as in {example}; got {spec!r}")

    @field_validator("algorithm")
    @classmethod
    def _known_algorithm(cls, spec: str | dict[str, Any]) -> str | dict[str, Any]:
        try:
            algorithm_of(spec)
        except TypeError as error:
            raise ValueError(f"a setting of {spec!r} is of the wrong kind: {error}") from None
        return spec

    @field_validator("reward")
    @classmethod
    def _known_reward(cls, spec: str | dict[str, Any]) -> str | dict[str, Any]:
        name = spec if isinstance(spec, str) else spec["name"]
        if names_file(name):
            return spec  # a file may come later; it is looked for before a model loads
        try:
            make_reward(spec)
        except TypeError as error:
            raise ValueError(f"a setting of {spec!r} is of the wrong kind: {error}") from None
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
        """Complete, for config.yaml."""
        return self.model_dump(mode="json")


def algorithm_of(spec: str | dict[str, Any]) -> Algorithm:
    """The method of a name, or of a name with settings; lists serve as tuples."""
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name"))
    made = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    return make_algorithm(name, **made)
