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

from jaxrl_llm.config.agents import Environments, ProgramSettings, ToolSettings
from jaxrl_llm.config.alarms import AlarmsConfig, AlarmSettings
from jaxrl_llm.config.algorithms import PPO, AlgorithmSettings
from jaxrl_llm.config.graders import OwnFunction, RewardFunction
from jaxrl_llm.config.optimizers import MOMENTS, OptimizerName, ScheduleName
from jaxrl_llm.config.tasks import PrioritySettings, TaskSettings
from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.bounds import (
    BelowOne,
    Count,
    EndTime,
    Fraction,
    FreeDict,
    Gigabytes,
    GigabytesOrZero,
    Many,
    Maybe,
    NotNegative,
    Positive,
    Probability,
    Processes,
    Seconds,
    TopK,
    Unbounded,
    Whole,
    guess,
    tested,
)
from jaxrl_llm.typed_records.python_objects import Params, Rows
from jaxrl_llm.typed_records.record import Record, records_in, validate

DType = Literal["float32", "bfloat16"]
AUTO = "auto"
# Mesh axes, outermost first. Neighbours on the innermost axis are neighbours in the machine.
MeshAxis = Literal["data", "pipeline", "fsdp", "expert", "sequence", "tensor"]
AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)
# One coordinate of these axes is a replica, which holds a share of the batch. The stages of a
# pipeline pass rows through each other's layers. Outside of the layers they are replicas.
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
Drafts = Annotated[int, Ge(0), Le(15)]
Placement = Annotated[dict[str, Any] | Literal["auto"], BeforeValidator(_placement)]


class PhaseMeshConfig(Record):
    """The layout of a phase on the same devices; the devices left over are replicas."""

    tensor: Whole = 0  # neighbouring devices that share the heads; 0: mesh.tensor


class MeshConfig(Record):
    """Devices along each mesh axis; the product is the number of devices used."""

    data: Count = 1  # replicas of the weights, for example one per node
    fsdp: Count = 1  # shards of the weights; each shard is also a batch replica
    expert: Count = 1  # shards of the experts of a layer; each shard is also a batch replica
    sequence: Count = 1  # shards of the tokens of a row (context parallelism)
    tensor: Count = 1  # shards of heads, MLP and vocabulary
    pipeline: Count = 1  # pipeline stages; outside of the layers each is a batch replica
    # Groups of layers per stage. More groups make the bubble smaller, and rows travel more.
    pipeline_rounds: Count = 1
    # Micro-batches per stage and pass. More make the bubble smaller. With packed rows, activations
    # take this many times the memory.
    pipeline_micro_batches: Count = 1
    generation: PhaseMeshConfig = PhaseMeshConfig()  # neighbouring devices that share the heads
    passes: PhaseMeshConfig = PhaseMeshConfig()  # passes without a gradient: old log-probs, values

    @property
    def sizes(self) -> dict[Any, int]:
        """The size of each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def num_replicas(self) -> int:
        """Number of shares of a batch."""
        return math.prod(self.sizes[axis] for axis in REPLICA_AXES)

    def replicas_with(self, tensor: int) -> int:
        """Number of shares of a batch for a model with another tensor size; 0 is the mesh's."""
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

    # Training files: .parquet, .jsonl, .csv, globs, Hugging Face folders, FOLDER#SPLIT, or
    # hf://OWNER/NAME#SPLIT.
    train_files: Many[str] = ()
    val_files: Many[str] = ()  # held-out files, named like train_files
    train_tasks: Many[TaskSettings] = ()  # generated training problems, in addition to files
    val_tasks: Many[TaskSettings] = ()  # held-out generated problems
    # Rows of a Python program, before the rows of files and tasks: docs/library.md.
    train_rows: Rows = None
    val_rows: Rows = None
    tokenizer: str = ""  # tokenizer folder or "char"; actor.path replaces "char" and empty
    # Column names of the files, by our names: {prompt: question, ground_truth: answer}.
    columns: Annotated[dict[str, str], BeforeValidator(guess)] = field(default_factory=dict)
    # Form of prompts. "chat" makes a text prompt a user's message, and tasks ask in a sentence.
    prompt_style: Literal["plain", "chat"] = "plain"
    system_prompt: str = ""  # system prompt of conversations without one
    # Further variables of the chat template, such as {enable_thinking: false}.
    chat_template_kwargs: FreeDict = field(default_factory=dict)
    # Supervised rows with thinking that the chat template drops: true keeps it, in one row a
    # conversation; false makes a row of each turn, and refuses an answer whose thinking is dropped.
    keep_thinking: bool = False
    train_batch_size: Count = 128  # prompts per iteration; offline, rows per step
    val_batch_size: Count = 512  # prompts per validation call
    max_prompt_length: Count = 512  # tokens of the longest prompt
    max_response_length: Count = 512  # tokens of the longest response
    # Handling of prompts and rows that are too long: an error, or the side that is cut.
    truncation: Literal["error", "left", "right", "middle"] = "error"
    max_images: Whole = 0  # images of a row at most; 0: text alone, of an image model too
    # Tokens of an image at most, of models that keep its shape: a larger one is shrunk.
    max_image_tokens: Count = 512
    filter_overlong_prompts: bool = False  # whether prompts over max_prompt_length are left out
    shuffle: bool = True  # whether each epoch has a new order of rows
    # Online: the weight by which prompts are drawn from their earlier scores, instead of epochs.
    priority: Maybe[PrioritySettings] = None
    priority_uniform: Fraction = 0.1  # share of uniform draws
    # Online: column of numbers, such as difficulty, that orders the first batches.
    curriculum: str = ""
    curriculum_steps: Whole = 0  # batches in the order of curriculum; 0: each prompt once
    num_workers: Annotated[int, Ge(0), Le(1024)] = 0  # reader processes; 0: a thread
    prefetch: Annotated[int, Ge(1), Le(10_000)] = 2  # batches that are read ahead
    max_bad_fraction: Fraction = 0.0  # share of bad rows above which a run does not start
    # Whether training rows are read when needed, for files larger than memory: docs/data.md.
    streaming: bool = False
    dataset_class: str = ""  # class of yours that yields rows: file.py:Class or module:Class

    @property
    def max_row_length(self) -> int:
        """Tokens of the longest row, prompt and response."""
        return self.max_prompt_length + self.max_response_length


class OptimizerConfig(Record):
    """An optimizer with a global-norm clip and a schedule over optimizer steps."""

    # The optimizer: a name, or a function of yours, my_file.py:optimizer: docs/jax-users.md.
    name: OptimizerName = "adamw"
    learning_rate: NotNegative = 1e-6  # peak learning rate, after the warm-up
    # Schedule of the learning rate after the warm-up: a name, or a function of yours.
    schedule: ScheduleName = "constant"
    warmup_steps: Whole = 0  # optimizer steps in which the learning rate rises
    total_steps: Whole = 0  # last step of linear and cosine; 0: the run's last optimizer step
    min_learning_rate_ratio: Fraction = 0.0  # last learning rate divided by learning_rate
    b1: BelowOne = 0.9  # decay of AdamW's first moment; momentum of lion and sgd
    # Decay of AdamW's second moment, or of lion's momentum. null: 0.999; 0.99 for lion.
    b2: Maybe[BelowOne] = None
    eps: Positive = 1e-8  # epsilon, added to the root of the second moment
    weight_decay: NotNegative = 0.01  # weight decay, times the learning rate
    max_grad_norm: Unbounded = 1.0  # largest global gradient norm; inf: no clipping
    # Dtype of the optimizer state. bfloat16 halves it; its updates are stochastically rounded.
    moment_dtype: DType = "float32"
    # Optimizer state in CPU memory: 8 bytes per parameter less on the device, slower steps.
    offload: bool = False

    @property
    def num_moments(self) -> int:
        """Copies of the weights in the optimizer state; a guess for an optimizer of yours."""
        return MOMENTS.get(str(self.name), 2)


class ModelSettings(Record):
    """A role's model: a directory to import, or a Hugging Face config to initialise at random."""

    path: str = ""  # Hugging Face folder, checkpoint or run folder; empty: hf_config
    # Sizes of a model with random weights, as in config.json.
    hf_config: FreeDict = field(default_factory=dict)
    family: str = ""  # model family of yours, my_file.py:family: docs/add-a-model.md
    tensor: Whole = 0  # tensor size of this model on the same devices; 0: mesh.tensor
    dtype: DType = "float32"  # dtype of computation
    param_dtype: DType = "float32"  # dtype of the stored (master) weights
    # Attention kernels. "cudnn" takes one sample per row, so no micro_batch_tokens; it decodes as
    # "auto".
    attention: Literal["auto", "pallas", "cudnn", "xla"] = "auto"
    # Activation checkpointing: activations that a backward pass computes again to save memory.
    # "projections" keeps projections and attention, "attention" keeps attention, "full" keeps
    # layer inputs.
    remat: Literal["none", "projections", "attention", "full"] = "none"
    # Dtype of the residual stream. The sampler's is float32, so bfloat16 doubles the gap between
    # the log-probs of sampler and trainer.
    residual_dtype: DType = "float32"
    # One compiled layer in a loop. It copies the weights: 11 to 14 % slower, 13 % larger at 7B.
    scan_layers: bool = False


class LoraConfig(Record):
    """Low-rank adapters in place of training all weights; PEFT's names. See docs/lora.md."""

    rank: Whole = 0  # rank of the adapters; 0: all weights learn
    # Folder of a PEFT adapter to begin with. Its rank, alpha, targets and kind count.
    path: str = ""
    alpha: Positive = 16.0  # numerator of the scale alpha / rank of A B
    dropout: BelowOne = 0.0  # dropout rate of the adapters' inputs in updates
    # Adapted modules: "all-linear", names such as q_proj, or patterns of whole names.
    targets: Many[str] = ("all-linear",)
    rslora: bool = False  # scale alpha / sqrt(rank), for large ranks
    dora: bool = False  # DoRA: the norm of each output learns too
    # Computation with a copy of base plus adapters, as fast as all weights. False makes no copy.
    merge: bool = True

    @property
    def enabled(self) -> bool:
        """True if adapters learn, and not all weights."""
        return bool(self.rank or self.path)


class AdaptedSettings(ModelSettings):
    """A model that learns, in full or by adapters on frozen weights."""

    lora: LoraConfig = LoraConfig()
    # With lora: dtype of the frozen weights; empty: dtype. "float8" holds for projections alone.
    base_dtype: Literal["", "float32", "bfloat16", "float8"] = ""


class VisionConfig(Record):
    """The image encoder of the actor; read with data.max_images."""

    # Parts of the encoder that learn. The projector maps its features to the decoder.
    train: Literal["none", "projector", "all"] = "none"


class ActorConfig(AdaptedSettings):
    """The policy and its update."""

    # Weights of a Python program, in place of the weights at `path`: docs/jax-users.md.
    params: Params = None
    vision: VisionConfig = VisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo_mini_batch_size: Count = 128  # prompts per optimizer step
    ppo_epochs: Count = 1  # passes over the samples of an iteration
    # Mini-batches of shuffled samples in each epoch, the critic's too. False keeps prompts whole.
    shuffle: bool = False
    micro_batch_size: Whole = 0  # samples per device and forward pass; 0: the whole mini-batch
    # Tokens per device and pass of rows that samples are packed into; 0: a padded row per sample.
    micro_batch_tokens: Whole = 0
    share_prompts: bool = True  # packed: one copy per row of a prompt with several samples
    # Coefficient of the experts' load-balance loss, as in transformers; in the warm-up too.
    router_aux_loss_coef: NotNegative = 0.0
    router_z_loss_coef: NotNegative = 0.0  # coefficient of the experts' router z-loss
    # Load-balance loss as a mean over layers. In transformers' formula the layers' loads cancel.
    router_aux_loss_by_layer: bool = False
    # Step size of the bias that balances a sigmoid router's experts. DeepSeek-V3: 0.001.
    router_bias_rate: NotNegative = 0.0
    # Dtype of the head in sampling and training, for the policy and its reference: its weights, the
    # last matmul and its gradient. Empty: dtype. MiniMax-M1 and ScaleRL take float32.
    head_dtype: Literal["", "float32"] = ""


class CriticConfig(AdaptedSettings):
    """The value model. An empty path starts it from the actor's weights, after the warm-up."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    ppo_epochs: Count = 1  # passes over the samples of an iteration
    micro_batch_size: Whole = 0  # samples per device and forward pass; 0: the mini-batch
    micro_batch_tokens: Whole = 0  # tokens of a packed row; 0: a padded row per sample
    share_prompts: bool = True  # packed: one copy per row of a prompt with several samples
    warmup_steps: Whole = 0  # iterations that train the critic alone; verl's critic_warmup - 1


class SupervisedConfig(Record):
    """A supervised training: the SFT warm-up, the reward model's or the teacher's."""

    steps: Whole = 100  # optimizer steps; 0: no training
    batch_size: Count = 256  # rows per optimizer step
    micro_batch_size: Whole = 0  # rows per device and forward pass; 0: the whole batch
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    files: Many[str] = ()  # training files, named like data.train_files
    tasks: Many[TaskSettings] = ()  # generated rows; without files and tasks: the run's data
    eval_every: Whole = 0  # steps between held-out evaluations; 0: only at the end
    stop_at: Fraction = 0.0  # held-out accuracy at which the training ends early; 0: never


class ReferenceConfig(Record):
    """The reference model: the policy before training, a later one, or another model."""

    # Hugging Face folder, checkpoint or run folder of another model with the actor's vocabulary;
    # empty: the policy.
    path: str = ""
    refresh_every: Whole = 0  # steps after which the reference follows the policy; 0: never
    # Share of the policy in the new reference; the rest is the old one. TRL: 0.6, 1 copies.
    mixup_alpha: Annotated[float, Gt(0), Le(1)] = 1.0


class RewardModelConfig(ModelSettings):
    """A scalar model whose score at the last token is the reward, or a part of it."""

    weight: float = 1.0  # weight of its score in the sum with reward functions
    training: Maybe[SupervisedConfig] = None  # its training in the run, on preference pairs
    center: NotNegative = 0.0  # coefficient of the squared sum of a pair's scores


class TeacherConfig(ModelSettings):
    """A frozen language model to learn from. Without a path or hf_config it has the actor's."""

    training: Maybe[SupervisedConfig] = None  # its training before the run's steps
    top_k: Count = 8  # likeliest tokens per position that it reports, for distillation_top_k
    weight: Positive = 1.0  # weight among several teachers: models.0.teacher_weight


# Names of the trainer's roles; the bases are frozen weights below adapters.
ROLES = ("actor", "critic", "reference", "reward", "teacher", "rollout", "base", "critic_base")


RoleName = Annotated[
    str,
    tested(str.isidentifier, "expected a name of letters, digits and _, such as cost_model"),
    tested(
        lambda name: name not in ROLES,
        "a role of the trainer has that name; another works, such as cost_model",
    ),
]


class OwnUpdate(Record):
    """The update of a model of yours, in each step and on its samples."""

    loss: OwnFunction  # function of yours: fields of the batch -> (loss, metrics)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    ppo_epochs: Count = 1  # passes over the samples of an iteration


class ExtraModelConfig(ModelSettings):
    """A model of yours: a second reward model, a cost model, another reference.

    A scalar model writes the fields `<name>_scores` and `<name>_token_scores`, a language model
    `<name>_logprobs`.
    """

    name: RoleName  # name of the role, also in the names of its fields
    kind: Literal["scalar", "causal_lm"] = "scalar"  # output of the model: scores or log-probs
    weight: float = 0.0  # weight of a scalar model's score in the reward; 0: for your stages alone
    # Weight of a language model among the teachers of distillation; 0: no teacher.
    teacher_weight: NotNegative = 0.0
    update: Maybe[OwnUpdate] = None  # loss and optimizer of a model that learns; null: frozen


class FilterGroupsConfig(Record):
    """Dynamic sampling (DAPO): replace groups whose samples all got the same reward."""

    enable: bool = False  # whether groups of equal scores are replaced
    metric: str = "score"  # metric that must vary: score, or the name of a reward function
    max_num_gen_batches: Count = 10  # most rounds of generation per iteration
    # End of the last round without enough groups: an error, or groups of equal scores as well.
    shortage: Literal["error", "fill"] = "error"


class RolloutConfig(Record):
    """Generation for training."""

    n: Count = 1  # samples per prompt
    temperature: NotNegative = 1.0  # sampling temperature; 0: greedy
    # Number of likeliest tokens to sample from; 0: off. Log-probs are over the tokens that filters
    # keep, at most 512.
    top_k: TopK = 0
    top_p: Probability = 1.0  # probability of the likeliest tokens to sample from; 1: off
    min_p: Fraction = 0.0  # least probability, relative to the likeliest token; 0: off
    # Sequences per replica that are decoded at once; 0: all of its samples, or as many as fit.
    num_slots: Whole = 0
    # Response tokens in a replica's KV cache; 0: data.max_response_length for every slot, or as
    # many as fit.
    cache_tokens: Whole = 0
    # Memory of a GPU for slots and cache, in GB; 0: what the models of the run leave free.
    memory_gb: GigabytesOrZero = 0.0
    # Most draft tokens of a sequence in a decode step at the end of a batch; 0: none. Drafts come
    # from the group's texts and change no distribution: docs/engine.md.
    drafts: Drafts = 0
    stop_token_ids: Many[Whole] = ()  # token ids that end a response, added to the tokenizer's
    # Texts that end a response, held-out answers too: at most 16, each of at most 32 characters.
    stop: StopTexts = ()
    dtype: Literal["", "float32", "bfloat16"] = ""  # dtype of generation; empty: the actor's
    # Quantized generation. "float8": projections and cache in 8 bits, with
    # algorithm.rollout_is=token.
    quantization: Literal["none", "float8"] = "none"
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    # Leave responses that were cut at the maximum length out of the loss and of their groups.
    mask_truncated: bool = False
    # Experts: log-probs and updates route each token to the experts of its rollout.
    routing_replay: bool = True
    # Tools of answers with several turns: calculator, python, functions of yours: docs/agents.md.
    tools: Many[ToolSettings] = ()
    # Environment of the samples: calculator, integer_calculator, guess, maze, retry, code, or a
    # class of yours. Of several, the column `environment` of a row names one.
    environment: Environments = ()
    in_graph: bool = True  # an environment of JAX functions runs inside the generation program
    # Rows of a sample, where its program begins a new context. Of more, the last ones are learned.
    max_rows: Count = 1
    # Thinking of earlier turns where the chat template drops it. "fork": the next turn begins a row
    # without it. "keep": it stays, as it was sampled.
    earlier_thinking: Literal["keep", "fork"] = "keep"
    max_turns: Whole = 0  # turns of the model in a sample; 0: no limit
    max_turn_tokens: Whole = 0  # tokens of a turn; 0: what is left of data.max_response_length
    max_tool_calls: Whole = 0  # calls of tools in a sample; 0: no limit
    max_parse_errors: Whole = 3  # turns in a row whose calls cannot be run; one more ends a sample
    max_tool_result_tokens: Whole = 1024  # tokens of the results of a turn; 0: no limit
    tool_timeout_s: Seconds = 30.0  # time limit of a call, and of a step of an environment
    num_tool_workers: Processes = 2  # processes for tools and environments of yours
    # Program that answers each sample with a client of OpenAI's API: a function of yours,
    # my_file.py:agent, or a command line: docs/any-harness.md.
    program: Maybe[ProgramSettings] = None
    program_timeout_s: Seconds = 1800.0  # time limit of a program, with its waiting for the model
    num_programs: Count = 256  # most programs that run at once, on each host


class SourceGrader(Record):
    """The grader of the held-out rows of one data source."""

    source: str  # name of the data source
    grader: RewardFunction  # grader of its held-out rows


class ValidationConfig(Record):
    """Held-out evaluation: greedy by default."""

    before_train: bool = True  # whether the run evaluates before the first step
    every: Whole = 20  # steps between evaluations; 0: only before and after
    n: Count = 1  # answers per prompt
    temperature: NotNegative = 0.0  # sampling temperature; 0: greedy
    top_p: Probability = 1.0  # probability of the likeliest tokens to sample from; 1: off
    # Grader of held-out answers; null: the reward functions of the run, or exact_answer.
    grader: Maybe[RewardFunction] = None
    graders: Many[SourceGrader] = ()  # graders of single data sources
    generate: bool = False  # offline: whether held-out prompts are answered; online: always
    # The same as rollout.memory_gb, while held-out prompts are answered.
    memory_gb: GigabytesOrZero = 0.0


class RewardConfig(Record):
    """Reward functions and how they are run."""

    functions: Many[RewardFunction] = ()  # our graders and your functions; their scores are added
    weights: Many[float] = ()  # weights of the functions; empty: 1 each
    num_workers: Processes = 2  # processes for user functions
    timeout_s: Seconds = 30.0  # time limit of a call
    max_retries: Whole = 1  # further calls for a sample whose function failed
    # A sample that still fails: "mask" leaves it out of the loss and of its group; "value" gives
    # it the score `failure_value`.
    on_failure: Literal["mask", "value"] = "mask"
    failure_value: float = 0.0  # score of a failed sample, with on_failure=value
    # Scores for steps of a response, each at its last token: docs/write-a-reward.md.
    process_rewards: bool = False
    memory_gb: Gigabytes = 16.0  # most memory of a process for user functions
    file_gb: Gigabytes = 4.0  # largest file that a user function may write
    model: Maybe[RewardModelConfig] = None  # reward model; its weighted score is added


class PhaseConfig(Record):
    """Another algorithm for the first steps of an online run."""

    algorithm: AlgorithmSettings  # algorithm of these steps
    steps: Count  # number of steps; they are part of total_steps


class LogConfig(Record):
    """Output for the user."""

    console_every: Whole = 1  # steps between progress lines
    samples_every: Whole = 20  # steps between tables of samples; 0: never
    num_samples: Whole = 4  # rows of a table of samples
    tensorboard: bool = True  # files for TensorBoard
    # Trackers: wandb, trackio, mlflow, or a class of yours, my_file.py:MyTracker: docs/trackers.md.
    trackers: Many[str] = ()
    trace: bool = True  # samples as JSON lines in <run_dir>/trace
    trace_gb: NotNegative = 0.0  # size of the trace from which the oldest files go; 0: no limit
    trace_details: Whole = 16  # samples per step whose advantages etc. are traced by token
    report: bool = True  # page <run_dir>/report.html, updated while the run goes on
    communication_every: Whole = 100  # steps between tables of communication; 0: never
    # Least level of log lines on stderr. `info` adds the stages of every process with their times,
    # `debug` also each compilation of jax.
    level: Literal["debug", "info", "warning", "error"] = "warning"


class ProfileConfig(Record):
    """Traces of jax's profiler, in <run_dir>/profile."""

    steps: Many[Count] = ()  # traced steps; on several GPUs each also times its collectives


class CheckpointConfig(Record):
    """Checkpoints on disk."""

    keep_latest: Count = 2  # number of latest checkpoints that are kept
    keep_best: Whole = 1  # number of best checkpoints that are kept, by best_metric
    # Metric of the best checkpoint; a leading minus, as in "-eval_loss": smaller is better. Empty:
    # the validation reward, or the held-out loss.
    best_metric: str = ""
    asynchronous: bool = True  # whether the run goes on while a checkpoint is written
    # Largest norm of weights that are saved, relative to the norm at the start.
    max_growth: Unbounded = 100.0
    # Time by which the run saves and ends with code 130: 2026-11-25T18:00, +3h50m from the start,
    # or $SLURM_JOB_END_TIME.
    save_by: EndTime = ""


class WatchdogConfig(Record):
    """Ends a run that stands still, so that a launcher starts it again."""

    # Least time limit of a stage. A stage that ran twice may take ten times its longest time.
    floor_minutes: Annotated[float, Gt(0), Le(1e6)] = 1.5
    # Largest time limit of a stage, and the limit of its first runs; 0: off.
    ceiling_minutes: Annotated[float, Ge(0), Le(1e6)] = 60.0


class NodeGroup(Record):
    """Nodes of a run that are named together, for `placement`. A node is a process."""

    count: Count = 1  # number of nodes
    gpus_per_node: Count = 8  # GPUs of each node


def _group(value: Any) -> Any:
    """A group of nodes, also written as a dict."""
    return validate(NodeGroup, value) if isinstance(value, dict) else value


Group = Annotated[NodeGroup, BeforeValidator(_group)]


class Config(Record):
    """A whole run."""

    name: str = "run"  # name of the run, and by default of its folder
    seed: Whole = 0  # seed of weights, data order and sampling
    run_dir: str = ""  # folder of the run; empty: runs/<name>
    total_steps: Whole = 100  # steps of the run
    save_every: Whole = 50  # steps between checkpoints; 0: only at the end
    resume: str = "auto"  # checkpoint to go on from: auto, never, or its path
    mesh: MeshConfig = MeshConfig()
    # Device numbers of roles with their own devices: {"critic": "4-5", "reference": "critic"}.
    # Other roles share the actor's. Nodes and groups: docs/placement.md. "auto": docs/planner.md.
    placement: Placement = field(default_factory=dict)
    # Groups of all nodes of a run, in order. By default the actor has the first group.
    node_groups: dict[str, Group] = field(default_factory=dict)
    # Most updates that the sampling policy may be behind; from 1 on, batches are generated ahead.
    max_staleness: Whole = 0
    # With max_staleness: tokens of a response under one policy; the next one goes on. 0: off.
    partial_rollouts: Whole = 0
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmSettings = PPO()  # algorithm: docs/algorithms.md
    # Algorithms before `algorithm`, each for its part of `total_steps`: docs/algorithms.md.
    phases: Many[PhaseConfig] = ()
    # Offline: log-probs of the reference model computed once, before the first step.
    precompute_reference: bool = False
    reward: RewardConfig = RewardConfig()
    teacher: Maybe[TeacherConfig] = None  # teacher of distillation
    # Models of yours: docs/add-a-stage.md.
    models: Many[ExtraModelConfig] = ()
    stages: Many[OwnFunction] = ()  # functions of yours that return stages: docs/add-a-stage.md
    validation: ValidationConfig = ValidationConfig()
    warmup: Maybe[SupervisedConfig] = None  # SFT of the actor before RL
    log: LogConfig = LogConfig()
    alarms: AlarmSettings = AlarmsConfig()  # alarms; "off" switches all off
    profile: ProfileConfig = ProfileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    # Folder of compiled programs; empty: JAX_COMPILATION_CACHE_DIR, or <run_dir>/compile_cache.
    compile_cache: str = ""
    # Exactness. "repeatable": the same bits in every run, without atomics and cuDNN attention.
    # "strict": the sampler's log-probs also have the trainer's bits (one device, slower).
    exact: Literal["off", "repeatable", "strict"] = "repeatable"
    fuse_stages: bool = True  # one program for consecutive stages; False: one each, timed alone


def is_offline(config: Config) -> bool:
    """True if the run learns from fixed records."""
    return config.algorithm.offline


def run_folder(config: Config) -> Path:
    """Where a run writes. A shell leaves the ~ of --config.run_dir=~/runs as it is."""
    return Path(os.path.expanduser(config.run_dir or os.path.join("runs", config.name)))


__all__ = records_in(  # pyright: ignore
    __name__, "AUTO", "DType", "is_offline", "run_folder",
)  # fmt: skip
