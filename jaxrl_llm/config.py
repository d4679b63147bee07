"""The configuration of a run: frozen dataclasses whose sizes are checked before jax is imported.

A config file holds `get_config() -> Config`. Every default is written once, here or in the
function that a `FunctionConfig` names. Names are verl's and TRL's where they have one.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """A mistake of the user's that one message explains: what is wrong, and what would work.

    Scripts print it without a traceback and end with exit code 2.
    """


@dataclass(frozen=True, kw_only=True)
class FunctionConfig:
    """A function by path, `package.module:name` or `file.py:name`, and its keyword settings.

    The legal settings are the function's keyword-only parameters; those left out keep the
    default that its signature gives.
    """

    path: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis; the product is the number of devices used."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def num_replicas(self) -> int:
        """How many ways a batch is split."""
        return self.data * self.fsdp


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A procedural task, a function of `data/tasks.py`, and its settings."""

    name: str = "chain_sum"
    settings: dict[str, Any] = field(default_factory=dict)
    size: int = 0  # rows drawn; 0 takes every problem, of 200,000 at most


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from. Files and tasks may be mixed."""

    train_files: tuple[str, ...] = ()  # .parquet, .jsonl, or Hugging Face dataset folders
    val_files: tuple[str, ...] = ()
    train_tasks: tuple[TaskConfig, ...] = ()
    val_tasks: tuple[TaskConfig, ...] = ()
    tokenizer: str = ""  # a directory, or "char"; the last, or empty, yields to actor.path
    prompt_style: str = "plain"  # how tasks ask: "plain" ("7+2+5=") or "chat" (messages)
    train_batch_size: int = 128  # prompts an iteration
    val_batch_size: int = 512  # prompts a validation call
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    truncation: str = "error"  # error | left | right | middle
    filter_overlong_prompts: bool = False
    shuffle: bool = True
    # Online: in place of shuffled epochs, prompts by a weight of what the policy got on them before
    # (data/priority.py): failure_rate, learnability, spread, or a function of yours.
    priority: FunctionConfig | None = None
    priority_uniform: float = 0.1  # share of the draws that is uniform, so that no prompt starves
    num_workers: int = 0  # reader processes; 0 reads in a thread
    prefetch: int = 2  # batches
    max_bad_fraction: float = 0.0  # rows that may be set aside before a run refuses to start
    dataset_class: str = ""  # "module:Class" or "file.py:Class" yielding rows


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a global-norm clip and a schedule over optimizer steps."""

    learning_rate: float = 1e-6
    schedule: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_steps: int = 0
    total_steps: int = 0  # where linear and cosine end; 0 takes the run's own number
    min_learning_rate_ratio: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    # bfloat16 halves what AdamW keeps beside the weights; rounded by chance, or the second moment
    # would stand still: a step moves it by less than bfloat16 can tell.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    # Moments in the host's memory, verl's optimizer_offload: they visit the device two or three
    # parameters at a time in each step, so a step takes longer, and 8 bytes a parameter are free
    # for the rest of it.
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A role's model: a directory to import, or a Hugging Face config to initialise at random."""

    path: str = ""  # Hugging Face directory or a checkpoint of ours; empty builds hf_config
    hf_config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"  # of computation: float32 | bfloat16
    param_dtype: str = "float32"  # of the stored (master) weights
    # "cudnn" takes a sample a row: no micro_batch_tokens, and prompts one a row in a prefill. It
    # knows no pages, so a decode step then takes what "auto" does.
    attention: Literal["auto", "pallas", "cudnn", "xla"] = "auto"
    # What a backward pass computes again to save memory: "none"; "projections" keeps every
    # projection and the attention; "attention" keeps that alone; "full" keeps each layer's input.
    remat: Literal["none", "projections", "attention", "full"] = "none"
    # Of the sum that the layers add to. The sampler's is float32; in bfloat16 the trainer's would
    # double the distance between their log-probs.
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    # One compiled layer in a loop: a smaller program, and no faster to compile since like layers
    # are traced once. It copies the weights: 11 to 14 % more time, 13 % more memory at 7B.
    scan_layers: bool = False


@dataclass(frozen=True, kw_only=True)
class ActorConfig(ModelSettings):
    """The policy and its update."""

    optimizer: OptimizerConfig = OptimizerConfig()
    ppo_mini_batch_size: int = 128  # prompts an optimizer step
    ppo_epochs: int = 1
    # Mini-batches, the critic's too, of samples in random order, anew each epoch; else of whole
    # prompts in order, whose samples `share_prompts` can then compute together in updates as well.
    shuffle: bool = False
    micro_batch_size: int = 0  # samples a device and forward pass; 0 takes the whole mini-batch
    # Tokens a device and forward pass: samples are packed, without padding, into rows of so many.
    # 0 gives each sample its own padded row.
    micro_batch_tokens: int = 0
    share_prompts: bool = True  # packed: a prompt that several samples answer is in a row once


@dataclass(frozen=True, kw_only=True)
class CriticConfig(ModelSettings):
    """The value model. An empty path starts it from the actor's weights, after the warm-up."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    ppo_epochs: int = 1
    micro_batch_size: int = 0
    micro_batch_tokens: int = 0
    share_prompts: bool = True
    warmup_steps: int = 0  # iterations in which only the critic learns, from its first phase on


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """A supervised training: the SFT warm-up, or the reward model's."""

    steps: int = 100
    batch_size: int = 256  # rows an optimizer step
    micro_batch_size: int = 0  # rows a device and forward pass; 0 takes the whole batch
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    files: tuple[str, ...] = ()
    tasks: tuple[TaskConfig, ...] = ()  # empty files and tasks take the run's training data
    eval_every: int = 0  # steps between held-out evaluations; 0 only at the end
    stop_at: float = 0.0  # end early once held-out accuracy reaches this; 0 never


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ModelSettings):
    """A scalar model whose score at the last token is the reward, or a part of it."""

    weight: float = 1.0  # of its score in a sum with reward functions
    training: SupervisedConfig | None = None  # train it in the run, on preference pairs
    center: float = 0.0  # coefficient of the squared sum of scores (centring)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(ModelSettings):
    """A frozen language model to learn from. Without a path or hf_config it has the actor's."""

    training: SupervisedConfig | None = None  # train it in the run first, like the warm-up
    top_k: int = 8  # tokens a position that it reports, to an algorithm that reads them


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): generate again in place of groups whose samples all got the same."""

    enable: bool = False
    metric: str = "score"  # what must vary: the score, or the name of a reward function
    max_num_gen_batches: int = 10  # rounds of generation an iteration
    shortage: Literal["error", "fill"] = "error"  # after the last: stop, or take what there is


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation for training."""

    n: int = 1  # samples a prompt
    temperature: float = 1.0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    # Sequences decoded at once a replica; 0 takes all of its samples, and 8 at least on a GPU.
    num_slots: int = 0
    # Response tokens in a replica's cache; 0 has room for all slots at data.max_response_length.
    cache_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the tokenizer's own
    dtype: str = ""  # of generation; empty takes the actor's
    # "float8": projections and cache in 8 bits; set algorithm.settings.rollout_is=token with it.
    quantization: Literal["none", "float8"] = "none"
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Held-out evaluation: greedy by default."""

    before_train: bool = True
    every: int = 20  # steps; 0 only before and after
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    grader: FunctionConfig = FunctionConfig(path="jaxrl_llm.rewards.exact_answer:exact_answer")
    generate: bool = False  # offline runs: also answer the held-out prompts; online ones always do


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward functions and how they are run."""

    functions: tuple[FunctionConfig, ...] = ()
    weights: tuple[float, ...] = ()  # empty is 1 each
    num_workers: int = 2  # processes for user functions
    timeout_s: float = 30.0  # a call
    failure_value: float = 0.0  # the score of a sample whose function crashed or timed out
    model: RewardModelConfig | None = None  # with functions, its weighted score is added to theirs


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """Another algorithm for the first steps of an online run."""

    algorithm: FunctionConfig
    steps: int


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What the user sees."""

    console_every: int = 1  # steps between progress lines
    samples_every: int = 20  # steps between tables of samples; 0 never
    num_samples: int = 4
    tensorboard: bool = True
    trace: bool = True


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept on disk."""

    keep_latest: int = 2
    keep_best: int = 1  # by best_metric
    # Larger is better; "-eval_loss": smaller. Empty takes the first val-core metric, and in an
    # offline run that answers no prompts the held-out loss.
    best_metric: str = ""
    asynchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    name: str = "run"
    seed: int = 0
    run_dir: str = ""  # empty is runs/<name>
    total_steps: int = 100
    save_every: int = 50  # steps; 0 only at the end
    resume: str = "auto"  # auto | never | the path of a checkpoint
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: FunctionConfig = FunctionConfig(path="jaxrl_llm.algorithms.alias:ppo")
    # Before `algorithm`, in turn, each for its part of `total_steps`. Roles, their optimizers and
    # the data go on from one to the next; the reference stays the actor before the first.
    phases: tuple[PhaseConfig, ...] = ()
    # Offline: the reference model's log-probs once, before the first step, instead of in each.
    precompute_reference: bool = False
    reward: RewardConfig = RewardConfig()
    teacher: TeacherConfig | None = None  # of distillation
    validation: ValidationConfig = ValidationConfig()
    warmup: SupervisedConfig | None = None  # supervised training of the actor before RL
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    # Folder of compiled programs; empty is JAX_COMPILATION_CACHE_DIR, or <run_dir>/compile_cache.
    compile_cache: str = ""
    exact: bool = True  # same bits in every process, on a GPU too: no atomics, no cuDNN attention
    fuse_stages: bool = True  # one program of consecutive stages; False times each by itself
