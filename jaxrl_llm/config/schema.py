"""The configuration of a run: frozen records, checked before jax is imported.

A config file holds `get_config() -> Config`. Names are verl's and TRL's where they have one.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Len
from pydantic import BeforeValidator

from jaxrl_llm.config.alarms import AlarmsConfig, AlarmSettings
from jaxrl_llm.config.algorithms import PPO, AlgorithmSettings
from jaxrl_llm.config.graders import ExactAnswer, OwnFunction, RewardFunction
from jaxrl_llm.config.tasks import PrioritySettings, TaskSettings
from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.bounds import (
    BelowOne,
    Count,
    EndTime,
    Fraction,
    FreeDict,
    Gigabytes,
    Many,
    Maybe,
    NotNegative,
    Positive,
    Probability,
    Processes,
    Seconds,
    Unbounded,
    Whole,
    guess,
    tested,
)
from jaxrl_llm.typed_records.python_objects import Rows
from jaxrl_llm.typed_records.record import Record, records_in, validate

DType = Literal["float32", "bfloat16"]
AUTO = "auto"
# Of the mesh, outermost first. Neighbours on the innermost axis are neighbours in the machine.
MeshAxis = Literal["data", "pipeline", "fsdp", "expert", "sequence", "tensor"]
AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)
# One coordinate of these axes is a replica: it holds a share of the batch. The stages of a pipeline
# pass rows through each other's layers, and share all else as replicas do.
REPLICA_AXES: tuple[MeshAxis, ...] = ("data", "pipeline", "fsdp", "expert")


def _placement(value: Any) -> Any:
    """A placement as written; one group of devices is the empty one."""
    value = guess(value)
    if not isinstance(value, Mapping) and value not in ("colocated", AUTO):
        hint = nearest(str(value), ("colocated", AUTO))
        raise ValueError(f"expected colocated, {AUTO} or {{role: devices, …}}{hint}")
    return {} if value == "colocated" else value


_ESCAPE = re.compile(r"\\[nrt](?![a-z])")  # not the start of a command of LaTeX
_ESCAPED = (
    "it has a backslash and a letter, not a new line or a tab; give the character itself, which "
    "bash writes as $'\\n'"
)
StopText = Annotated[str, Len(1, 32), tested(lambda text: not _ESCAPE.search(text), _ESCAPED)]
StopTexts = Annotated[Many[StopText], Len(0, 16)]
Placement = Annotated[dict[str, Any] | Literal["auto"], BeforeValidator(_placement)]


class PhaseMeshConfig(Record):
    """How a phase lays the same devices out; the devices left over are replicas."""

    tensor: Whole = 0  # neighbouring devices that share the heads; 0 takes mesh.tensor


class MeshConfig(Record):
    """Devices along each mesh axis; the product is the number of devices used."""

    data: Count = 1  # replicas of the weights, for example one a node
    fsdp: Count = 1  # shards of the weights; each is a replica of the batch too
    expert: Count = 1  # shards of the experts of a layer; each is a replica of the batch too
    sequence: Count = 1  # shards of the tokens of a row (context parallelism)
    tensor: Count = 1  # shards of heads, MLP and vocabulary
    pipeline: Count = 1  # stages of layers; each is a replica of the batch outside of the layers
    # Groups of layers that a stage holds. More make the bubble smaller, and rows travel more.
    pipeline_rounds: Count = 1
    # Micro-batches of a pass, for each stage; more make the bubble smaller. Packed ones are rows of
    # the pass, so activations take that many times the memory.
    pipeline_micro_batches: Count = 1
    generation: PhaseMeshConfig = PhaseMeshConfig()
    passes: PhaseMeshConfig = PhaseMeshConfig()  # without a gradient: old log-probs, values, ...

    @property
    def sizes(self) -> dict[Any, int]:
        """The size of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def num_replicas(self) -> int:
        """How many ways a batch is split."""
        return math.prod(self.sizes[axis] for axis in REPLICA_AXES)

    def replicas_with(self, tensor: int) -> int:
        """How many ways a model with its own tensor size splits a batch; 0 is the mesh's size."""
        if tensor in (0, self.tensor):
            return self.num_replicas
        if tensor < self.tensor:
            return self.num_replicas * (self.tensor // tensor)
        # A larger group takes the axes next to `tensor`, from the innermost on.
        left, replicas = tensor // self.tensor, self.num_replicas
        for axis in ("sequence", "expert", "fsdp", "pipeline", "data"):
            taken = math.gcd(left, self.sizes[axis])
            left //= taken
            replicas //= 1 if axis == "sequence" else taken
        return replicas


class DataConfig(Record):
    """Where prompts come from. Files and tasks may be mixed."""

    # .parquet, .jsonl, .csv, globs, Hugging Face folders, FOLDER#SPLIT, or hf://OWNER/NAME#SPLIT
    train_files: Many[str] = ()
    val_files: Many[str] = ()  # held-out rows, named in the same way
    train_tasks: Many[TaskSettings] = ()  # generated problems, in addition to files
    val_tasks: Many[TaskSettings] = ()  # held-out generated problems
    # Rows of a Python program, before those of files and tasks: docs/library.md.
    train_rows: Rows = None
    val_rows: Rows = None
    tokenizer: str = ""  # a directory or "char"; actor.path replaces "char" and empty
    # Our names of columns and the files': {prompt: question, ground_truth: answer}.
    columns: Annotated[dict[str, str], BeforeValidator(guess)] = field(default_factory=dict)
    # "chat": a prompt that is a text becomes a user's message; tasks ask in a sentence.
    prompt_style: Literal["plain", "chat"] = "plain"
    system_prompt: str = ""  # before conversations that have none of their own
    # Further variables of the chat template, such as {enable_thinking: false}.
    chat_template_kwargs: FreeDict = field(default_factory=dict)
    train_batch_size: Count = 128  # prompts an iteration
    val_batch_size: Count = 512  # prompts a validation call
    max_prompt_length: Count = 512  # tokens
    max_response_length: Count = 512  # tokens
    # of too long prompts or rows: refuse them, or cut a side
    truncation: Literal["error", "left", "right", "middle"] = "error"
    filter_overlong_prompts: bool = False  # leave out prompts over max_prompt_length
    shuffle: bool = True  # a new order of rows in each epoch
    # Online: draw prompts by their earlier scores, instead of in shuffled epochs.
    priority: Maybe[PrioritySettings] = None
    priority_uniform: Fraction = 0.1  # share of the draws that is uniform
    # Online: a column of numbers, such as difficulty, by which the first batches are sorted.
    curriculum: str = ""
    curriculum_steps: Whole = 0  # batches of that; 0 takes each prompt once
    num_workers: Annotated[int, Ge(0), Le(1024)] = 0  # reader processes; 0 reads in a thread
    prefetch: Annotated[int, Ge(1), Le(10_000)] = 2  # batches
    max_bad_fraction: Fraction = 0.0  # rows that may be set aside before a run refuses to start
    # Read training rows when a batch needs them, for files larger than memory: docs/data.md
    streaming: bool = False
    dataset_class: str = ""  # "module:Class" or "file.py:Class" yielding rows

    @property
    def max_row_length(self) -> int:
        """Tokens of the longest row, prompt and response."""
        return self.max_prompt_length + self.max_response_length


class OptimizerConfig(Record):
    """AdamW with a global-norm clip and a schedule over optimizer steps."""

    learning_rate: NotNegative = 1e-6  # its peak, after the warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: Whole = 0  # in which the learning rate rises
    total_steps: Whole = 0  # where linear and cosine end; 0 takes the run's own number
    min_learning_rate_ratio: Fraction = 0.0  # last learning rate over learning_rate
    b1: BelowOne = 0.9  # decay of AdamW's first moment
    b2: BelowOne = 0.999  # decay of AdamW's second moment
    eps: Positive = 1e-8  # added to the root of the second moment
    weight_decay: NotNegative = 0.01  # AdamW's decay, times the learning rate
    max_grad_norm: Unbounded = 1.0  # inf never clips
    moment_dtype: DType = "float32"  # bfloat16 halves the state; updates are stochastically rounded
    offload: bool = False  # optimizer state in CPU memory: 8 bytes a parameter less, slower steps


class ModelSettings(Record):
    """A role's model: a directory to import, or a Hugging Face config to initialise at random."""

    path: str = ""  # Hugging Face directory, checkpoint or run folder; empty builds hf_config
    # Sizes of a model with random weights, as in config.json.
    hf_config: FreeDict = field(default_factory=dict)
    tensor: Whole = 0  # its own tensor size on the same devices; 0 takes mesh.tensor
    dtype: DType = "float32"  # of computation
    param_dtype: DType = "float32"  # of the stored (master) weights
    # "cudnn" takes a sample a row, in a prefill too: no micro_batch_tokens. It decodes as "auto".
    attention: Literal["auto", "pallas", "cudnn", "xla"] = "auto"
    # Activation checkpointing: what a backward pass computes again to save memory. "projections"
    # keeps projections and attention; "attention" keeps attention; "full" keeps layer inputs.
    remat: Literal["none", "projections", "attention", "full"] = "none"
    # Of the residual stream; the sampler's is float32. bfloat16 doubles the gap of their log-probs.
    residual_dtype: DType = "float32"
    # One compiled layer in a loop. It copies the weights: 11 to 14 % slower, 13 % larger at 7B.
    scan_layers: bool = False


class LoraConfig(Record):
    """Low-rank adapters in place of training all weights; PEFT's names. See docs/lora.md."""

    rank: Whole = 0  # 0 trains all weights
    # Folder of a PEFT adapter to begin with; its rank, alpha, targets and kind count.
    path: str = ""
    alpha: Positive = 16.0  # A B counts alpha / rank times
    dropout: BelowOne = 0.0  # of the adapters' inputs in updates
    # "all-linear", names of modules such as q_proj, or patterns of whole names
    targets: Many[str] = ("all-linear",)
    rslora: bool = False  # alpha / sqrt(rank), for large ranks
    dora: bool = False  # the norm of each output learns too
    # Compute with a copy of base plus adapters, as fast as all weights. False makes no copy.
    merge: bool = True

    @property
    def enabled(self) -> bool:
        """Whether adapters learn, and not all weights."""
        return bool(self.rank or self.path)


class AdaptedSettings(ModelSettings):
    """A model that learns, in full or by adapters on frozen weights."""

    lora: LoraConfig = LoraConfig()
    # With lora: of the frozen weights; empty takes dtype. "float8" is of projections alone.
    base_dtype: Literal["", "float32", "bfloat16", "float8"] = ""


class ActorConfig(AdaptedSettings):
    """The policy and its update."""

    optimizer: OptimizerConfig = OptimizerConfig()
    ppo_mini_batch_size: Count = 128  # prompts an optimizer step
    ppo_epochs: Count = 1  # passes over the samples of an iteration
    # Draw mini-batches of samples, the critic's too, in each epoch. False keeps prompts whole.
    shuffle: bool = False
    micro_batch_size: Whole = 0  # samples per device and forward pass; 0 takes the whole mini-batch
    # Samples are packed into rows of so many tokens a device and pass; 0 pads each in its own row
    micro_batch_tokens: Whole = 0
    share_prompts: bool = True  # packed: a prompt that several samples answer is in a row once
    # Of experts, in the warm-up too: coefficient of the load-balance loss, as in transformers.
    router_aux_loss_coef: NotNegative = 0.0
    router_z_loss_coef: NotNegative = 0.0  # of experts: coefficient of the routers' z-loss
    # The mean over layers instead of transformers' formula, in which loads of layers cancel.
    router_aux_loss_by_layer: bool = False
    # Step of the bias that balances experts of a sigmoid router without a loss. DeepSeek-V3: 0.001.
    router_bias_rate: NotNegative = 0.0


class CriticConfig(AdaptedSettings):
    """The value model. An empty path starts it from the actor's weights, after the warm-up."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    ppo_epochs: Count = 1  # passes over the samples of an iteration
    micro_batch_size: Whole = 0  # samples per device and forward pass; 0 takes the mini-batch
    micro_batch_tokens: Whole = 0  # tokens of a packed row; 0 pads each sample
    share_prompts: bool = True  # packed: a prompt of several samples is in a row once
    warmup_steps: Whole = 0  # iterations in which only it learns; verl's critic_warmup less 1


class SupervisedConfig(Record):
    """A supervised training: the SFT warm-up, the reward model's or the teacher's."""

    steps: Whole = 100  # optimizer steps; 0 skips the training
    batch_size: Count = 256  # rows an optimizer step
    micro_batch_size: Whole = 0  # rows a device and forward pass; 0 takes the whole batch
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    files: Many[str] = ()  # training rows, as in data.train_files
    tasks: Many[TaskSettings] = ()  # empty files and tasks take the run's training data
    eval_every: Whole = 0  # steps between held-out evaluations; 0 only at the end
    stop_at: Fraction = 0.0  # end early once held-out accuracy reaches this; 0 never


class RewardModelConfig(ModelSettings):
    """A scalar model whose score at the last token is the reward, or a part of it."""

    weight: float = 1.0  # of its score in a sum with reward functions
    training: Maybe[SupervisedConfig] = None  # train it in the run, on preference pairs
    center: NotNegative = 0.0  # coefficient of the squared sum of scores (centring)


class TeacherConfig(ModelSettings):
    """A frozen language model to learn from. Without a path or hf_config it has the actor's."""

    training: Maybe[SupervisedConfig] = None  # train it in the run first, like the warm-up
    top_k: Count = 8  # tokens a position that it reports, to an algorithm that reads them


# Names of the trainer's own roles; the bases are frozen weights below adapters.
ROLES = ("actor", "critic", "reference", "reward", "teacher", "rollout", "base", "critic_base")


RoleName = Annotated[
    str,
    tested(str.isidentifier, "expected a name of letters, digits and _, such as cost_model"),
    tested(
        lambda name: name not in ROLES,
        "a role of the trainer has that name; another works, such as cost_model",
    ),
]


class ExtraModelConfig(ModelSettings):
    """A frozen model of yours: a second reward model, a cost model, another reference.

    A scalar model writes the field `<name>_scores`, a language model `<name>_logprobs`.
    """

    name: RoleName  # of the role, and in the names of its fields
    kind: Literal["scalar", "causal_lm"] = "scalar"  # what it computes: scores or log-probs
    weight: float = 0.0  # of a scalar model's score in the reward; 0 leaves it to stages of yours


class FilterGroupsConfig(Record):
    """Dynamic sampling (DAPO): replace groups whose samples all got the same reward."""

    enable: bool = False  # replace groups of equal scores
    metric: str = "score"  # what must vary: the score, or the name of a reward function
    max_num_gen_batches: Count = 10  # rounds of generation an iteration
    shortage: Literal["error", "fill"] = "error"  # after the last: stop, or take what there is


class RolloutConfig(Record):
    """Generation for training."""

    n: Count = 1  # samples a prompt
    temperature: NotNegative = 1.0  # of sampling; 0 is greedy
    top_k: Whole = 0  # 0 is off
    top_p: Probability = 1.0  # sample from the likeliest tokens of this probability; 1 is off
    min_p: Fraction = 0.0  # least probability over that of the likeliest token; 0 is off
    # Sequences decoded at once a replica; 0 takes all of its samples, and 8 at least on a GPU.
    num_slots: Whole = 0
    # Response tokens in a replica's cache; 0 has room for all slots at data.max_response_length.
    cache_tokens: Whole = 0
    stop_token_ids: Many[Whole] = ()  # in addition to the tokenizer's own
    # Texts that end a response, held-out answers too: at most 16, each of at most 32 characters.
    stop: StopTexts = ()
    dtype: Literal["", "float32", "bfloat16"] = ""  # of generation; empty takes the actor's
    # "float8": projections and cache in 8 bits; set algorithm.rollout_is=token with it.
    quantization: Literal["none", "float8"] = "none"
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    # Of experts: log-probs and updates send a token to those that it had in the rollout.
    routing_replay: bool = True


class SourceGrader(Record):
    """The grader of the held-out rows of one data source."""

    source: str
    grader: RewardFunction


class ValidationConfig(Record):
    """Held-out evaluation: greedy by default."""

    before_train: bool = True  # evaluate before the first step
    every: Whole = 20  # steps; 0 only before and after
    n: Count = 1  # answers a prompt
    temperature: NotNegative = 0.0  # of sampling; 0 is greedy
    top_p: Probability = 1.0  # sample from the likeliest tokens of this probability; 1 is off
    grader: RewardFunction = ExactAnswer()  # scores held-out answers
    graders: Many[SourceGrader] = ()  # of data sources with a grader of their own
    generate: bool = False  # offline runs: also answer the held-out prompts; online ones always do


class RewardConfig(Record):
    """Reward functions and how they are run."""

    functions: Many[RewardFunction] = ()  # graders of ours and functions of yours; scores are added
    weights: Many[float] = ()  # empty is 1 each
    num_workers: Processes = 2  # processes for user functions
    timeout_s: Seconds = 30.0  # a call
    failure_value: float = 0.0  # the score of a sample whose function crashed or timed out
    # Functions may score the steps of a response, each at its last token: docs/write-a-reward.md.
    process_rewards: bool = False
    memory_gb: Gigabytes = 16.0  # most memory of a process for user functions
    file_gb: Gigabytes = 4.0  # largest file that a user function may write
    model: Maybe[RewardModelConfig] = None  # with functions, its weighted score is added to theirs


class PhaseConfig(Record):
    """Another algorithm for the first steps of an online run."""

    algorithm: AlgorithmSettings  # what the policy learns by in these steps
    steps: Count  # how many; they are part of total_steps


class LogConfig(Record):
    """What the user sees."""

    console_every: Whole = 1  # steps between progress lines
    samples_every: Whole = 20  # steps between tables of samples; 0 never
    num_samples: Whole = 4  # rows of a table of samples
    tensorboard: bool = True  # files for it; `pip install tensorboard` shows them
    # wandb, trackio, mlflow, or a class of yours, my_file.py:MyTracker: docs/trackers.md
    trackers: Many[str] = ()
    trace: bool = True  # write samples as JSON lines to <run_dir>/trace
    trace_details: Whole = 16  # samples of a step whose advantages etc. are traced by token
    report: bool = True  # <run_dir>/report.html, written again while the run goes on
    communication_every: Whole = 100  # steps between tables of what devices exchange; 0 never


class ProfileConfig(Record):
    """Traces of jax's profiler, in <run_dir>/profile."""

    steps: Many[Count] = ()  # on several GPUs, each also times its collectives


class CheckpointConfig(Record):
    """What is kept on disk."""

    keep_latest: Count = 2  # how many of the latest stay
    keep_best: Whole = 1  # by best_metric
    # "-eval_loss": smaller is better. Empty is the validation reward, or the held-out loss.
    best_metric: str = ""
    asynchronous: bool = True  # write to disk while the run goes on
    # Weights are not saved once their norm is so many times that of the start.
    max_growth: Unbounded = 100.0
    # Save and end with code 130 by 2026-11-25T18:00, +3h50m from the start, or $SLURM_JOB_END_TIME.
    save_by: EndTime = ""


class WatchdogConfig(Record):
    """Ends a run that stands still, so that a launcher starts it again."""

    # A stage that ran twice may take ten times its longest, and at least this.
    floor_minutes: Annotated[float, Gt(0), Le(1e6)] = 1.5
    # The most that a stage may take, and the limit of its first runs. 0 is off.
    ceiling_minutes: Annotated[float, Ge(0), Le(1e6)] = 60.0


class NodeGroup(Record):
    """Nodes of a run that are named together, for `placement`. A node is a process."""

    count: Count = 1  # nodes
    gpus_per_node: Count = 8


def _group(value: Any) -> Any:
    """A group of nodes, also written as a dict."""
    return validate(NodeGroup, value) if isinstance(value, dict) else value


Group = Annotated[NodeGroup, BeforeValidator(_group)]


class Config(Record):
    """A whole run."""

    name: str = "run"  # name of the run, and by default of its folder
    seed: Whole = 0  # of weights, order of data, and sampling
    run_dir: str = ""  # empty is runs/<name>
    total_steps: Whole = 100  # steps of the run
    save_every: Whole = 50  # steps; 0 only at the end
    resume: str = "auto"  # auto | never | the path of a checkpoint
    mesh: MeshConfig = MeshConfig()
    # Roles on devices of their own, by their numbers: {"critic": "4-5", "reference": "critic"};
    # others share the actor's. Nodes and groups: docs/placement.md. "auto": docs/planner.md.
    placement: Placement = field(default_factory=dict)
    # All nodes of a run, in their order. The actor has the first group, if nothing else is said.
    node_groups: dict[str, Group] = field(default_factory=dict)
    # How many updates the policy that samples may be behind; from 1 on, it generates ahead
    max_staleness: Whole = 0
    # With max_staleness: tokens of a response under one policy; it goes on under the next; 0 is off
    partial_rollouts: Whole = 0
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmSettings = PPO()  # How the policy learns: docs/algorithms.md
    # Before `algorithm`, in turn, each for its part of `total_steps`: docs/algorithms.md
    phases: Many[PhaseConfig] = ()
    # Offline: the reference model's log-probs once, before the first step.
    precompute_reference: bool = False
    reward: RewardConfig = RewardConfig()
    teacher: Maybe[TeacherConfig] = None  # of distillation
    # Your own models: docs/add-a-stage.md.
    models: Many[ExtraModelConfig] = ()
    stages: Many[OwnFunction] = ()  # functions that return your stages: docs/add-a-stage.md
    validation: ValidationConfig = ValidationConfig()
    warmup: Maybe[SupervisedConfig] = None  # SFT of the actor before RL; 0 steps are none
    log: LogConfig = LogConfig()
    alarms: AlarmSettings = AlarmsConfig()  # what is watched; "off" switches all off
    profile: ProfileConfig = ProfileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    # Folder of compiled programs; empty is JAX_COMPILATION_CACHE_DIR, or <run_dir>/compile_cache.
    compile_cache: str = ""
    # "repeatable": same bits in every process, on a GPU too: no atomics, no cuDNN attention.
    # "strict": also, the sampler's log-probs have the bits of the trainer's (one device, slower).
    exact: Literal["off", "repeatable", "strict"] = "repeatable"
    fuse_stages: bool = True  # one program of consecutive stages; False times each by itself


def is_offline(config: Config) -> bool:
    """Whether the run learns from fixed records."""
    return config.algorithm.offline


def run_folder(config: Config) -> Path:
    """Where a run writes. A shell leaves the ~ of --config.run_dir=~/runs as it is."""
    return Path(os.path.expanduser(config.run_dir or os.path.join("runs", config.name)))


__all__ = records_in(  # pyright: ignore
    __name__, "AUTO", "DType", "is_offline", "run_folder",
)  # fmt: skip
