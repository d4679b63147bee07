"""The flags of each command, with their help. A flag stands here and nowhere else."""

from pathlib import Path

from jaxrl_llm.launch.command_line import Parser

LIBRARIES = ("verl", "trl")  # whose command lines convert-config reads
SHELLS = ("bash", "zsh", "fish")
ROLES = ("actor", "critic", "reward", "reference", "teacher")
DTYPES = ("float32", "bfloat16", "float16")


def _add_devices(parser: Parser) -> None:
    parser.flag("--devices=N", "split the CPU into N devices, to try a mesh on a laptop")


def _add_output(parser: Parser) -> None:
    parser.flag("--output=DIR", "the directory to write", required=True)


def _add_model(parser: Parser) -> None:
    parser.flag(
        "--model=PATH",
        "a Hugging Face directory, a checkpoint (RUN/checkpoints/global_step_N), or a run's "
        "folder (its newest checkpoint)",
        required=True,
    )
    _add_family(parser)


def _add_family(parser: Parser) -> None:
    parser.flag("--family=FILE:NAME", "the model's family, if it is yours", default="")


def _add_computation(parser: Parser) -> None:
    parser.flag("--dtype=float32", "type of computation: float32 | bfloat16", choices=DTYPES[:2])
    parser.flag("--tensor=1", "devices that share the model, by its heads")


def _add_sampling(parser: Parser, *, temperature: float, max_new_tokens: int) -> None:
    parser.flag(f"--temperature={temperature}", "0 is greedy")
    parser.flag(f"--max_new_tokens={max_new_tokens}", "most tokens of an answer")
    parser.flag("--top_p=1.0", "nucleus sampling, off by default")
    parser.flag("--top_k=0", "top-k sampling, off by default")
    parser.flag(
        "--stop=TEXT",
        "ends an answer, and stays in it; may be given several times",
        action="append",
    )
    _add_computation(parser)
    parser.flag("--seed=0", "the same seed and prompts give the same answers")


TRAIN = Parser(
    """Train a model: jaxrl train --config=ppo [--config.key=value ...]

    Starting again with the same --config.run_dir continues from its last checkpoint.
    Exit code 3: an alarm whose action is `stop` ended the run (docs/alarms.md).""",
    takes_config=True,
)
_add_devices(TRAIN)
TRAIN.flag(
    "--dry_run",
    "plan the run and read its data, show stages, models and memory, write the resolved "
    "config, and end without training",
)
TRAIN.flag(
    "--show=0",
    "with --dry_run: print the tokens of so many rows of each source, what is learned of them, "
    "and the ends of a response",
)

PLAN = Parser(
    """Memory and time of a step before there are GPUs: jaxrl plan --config=ppo --devices=64

    Compiles the programs of a config for devices that this machine need not have. Prints what a
    device holds, what its axes move, the seconds of each stage, and what would run faster.
    It ends with 1 if the run does not fit.""",
    takes_config=True,
)
PLAN.flag(
    "--devices=N",
    "GPUs in all; the devices of config.mesh without it. If config.mesh has another number, "
    "the fastest mesh that fits is taken",
)
PLAN.flag("--hosts=N", "hosts that share the GPUs evenly; 8 GPUs a host without it")
PLAN.flag(
    "--hardware=h200",
    "h200 | h100, compiled or not; a100 | b200 | gh200 | l40s | l4 with --quick; cpu "
    "compiles for CPU devices, and predicts no seconds",
)
PLAN.flag("--quick", "compute without compiling, in seconds")
PLAN.flag("--prompt_tokens=N", "tokens of each prompt; the config's limit without it")
PLAN.flag("--response_tokens=N", "tokens of each response; the config's limit without it")
PLAN.flag("--lengths=FILE", "a line PROMPT,RESPONSE for each sample, in place of these two")
PLAN.flag("--json=FILE", "also write the report as JSON")

GENERATE = Parser(
    """Answer prompts: jaxrl generate --model=PATH --prompt="..." or --prompts=PATH \
--output=FILE"""
)
_add_model(GENERATE)
prompts = GENERATE.add_mutually_exclusive_group(required=True)
GENERATE.flag("--prompt=TEXT", "one prompt; its answers are printed", group=prompts)
GENERATE.flag(
    "--prompts=PATH",
    "many prompts: parquet, arrow, JSON lines, CSV, a glob or a folder, with the column "
    "prompt, messages or question",
    group=prompts,
)
GENERATE.flag(
    "--output=FILE",
    "a new file for the answers to --prompts, as JSON lines; each batch when it is done",
)
GENERATE.flag("--logprobs", "also write the tokens and their log-probs")
GENERATE.flag("--batch_size=64", "prompts answered at once")
GENERATE.flag(
    "--chat=auto",
    "whether a text is a user's message: auto (where the model has a chat template) | true | false",
    choices=("auto", "true", "false"),
)
GENERATE.flag("--n=1", "answers to each prompt")
_add_sampling(GENERATE, temperature=1.0, max_new_tokens=256)

CHAT = Parser(
    """Talk with a model: jaxrl chat --model=PATH

    Shows each answer while it is made. /reset begins a new conversation, /exit ends, and Ctrl-C
    ends an answer. Lines of a pipe are answered one after the other. The model needs a chat
    template."""
)
_add_model(CHAT)
CHAT.flag("--system=TEXT", "a system message before the conversation")
_add_sampling(CHAT, temperature=0.7, max_new_tokens=512)

SERVE = Parser(
    """Serve a model with OpenAI's API: jaxrl serve --model=PATH [--port=8000]

    Routes: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics. It needs
    pip install starlette uvicorn prometheus_client. docs/serve.md lists the parameters."""
)
_add_model(SERVE)
SERVE.flag("--port=8000", "0 takes a free one")
SERVE.flag(
    "--host=ADDRESS",
    "address to listen on: 127.0.0.1 without it; 0.0.0.0 opens the server to the network",
    default="127.0.0.1",
)
SERVE.flag("--api_key=KEY", "key that requests must have; $JAXRL_API_KEY without it")
_add_computation(SERVE)
SERVE.flag("--slots=N", "answers generated at once; 256 on a GPU and 8 on a CPU without it")
SERVE.flag("--context=N", "most tokens of a prompt and its answer; as many as fit without it")
SERVE.flag("--seed=0", "seed of requests that give none")
SERVE.flag("--queue=1024", "most unfinished answers; further requests get 429")
SERVE.flag("--answer_s=600.0", "longest time of a request, in seconds")
SERVE.flag("--body_mb=16.0", "largest body of a request, in megabytes")

EVALUATE = Parser(
    """Held-out accuracy of a model: jaxrl evaluate --model=PATH --config=ppo

    Answers and grades the config's validation data as the run's own validation does: its
    sampling, its graders, its metrics. Prints a table: shares of right answers, with 95 %
    intervals in brackets. The model brings its own tokenizer. Of the config, data.val_files,
    data.val_tasks and validation are used.""",
    takes_config=True,
)
_add_model(EVALUATE)
EVALUATE.flag("--data=PATH", "held-out rows in place of the config's")
EVALUATE.flag("--output=FILE", "also write the metrics as JSON")
EVALUATE.flag("--answers=FILE", "also write every answer with its grade, as JSON lines")
_add_devices(EVALUATE)

EXPORT = Parser(
    """Write a checkpoint as a Hugging Face directory: jaxrl export --model=PATH --output=DIR

    `AutoModelForCausalLM.from_pretrained(DIR)` opens what it writes: config.json, safetensors,
    the tokenizer with its chat template, generation_config.json, and a model card."""
)
EXPORT.flag(
    "--model=PATH",
    "a checkpoint (RUN/checkpoints/global_step_N), or a run's folder (its newest checkpoint)",
    required=True,
)
_add_family(EXPORT)
EXPORT.flag("--output=DIR", "the directory to write", required=True)
EXPORT.flag(
    "--role=actor",
    " | ".join(ROLES)
    + ", or the name of a model in config.models; scalar models, such as a critic, are written as "
    "sequence classification with one label",
)
EXPORT.flag("--dtype=DTYPE", " | ".join(DTYPES) + "; as stored without it", choices=DTYPES)
EXPORT.flag("--max_shard_bytes=N", "split the weights into files of at most this size (5 GB)")
adapters = EXPORT.add_mutually_exclusive_group()
EXPORT.flag(
    "--merge",
    "adapters merged with their base, the default for a run with lora",
    group=adapters,
)
EXPORT.flag("--adapter", "the adapters alone, in the files that PEFT reads", group=adapters)

PREPARE = Parser(
    """Make a data set or model: jaxrl prepare data|upcycle --output=DIR

    jaxrl prepare data --help and jaxrl prepare upcycle --help show their flags."""
)
PREPARE.add_argument(
    "what",
    choices=("data", "upcycle"),
    metavar="WHAT",
    help="data: a public set; upcycle: a mixture of experts made of a dense model",
)

PREPARE_DATA = Parser(
    """Write a public set: jaxrl prepare data gsm8k|math|math500|aime24|mbpp --output=DIR

    The set comes from the Hugging Face hub, by the package datasets (pip install
    datasets). Each split is a file of JSON lines with the columns prompt, ground_truth
    and data_source."""
)
PREPARE_DATA.add_argument("name", metavar="NAME", help="name of the set")
_add_output(PREPARE_DATA)
PREPARE_DATA.flag(
    "--source=FOLDER",
    "the set on disk, instead of the hub: a folder with its splits, as downloaded or as "
    "save_to_disk writes it",
)
PREPARE_DATA.flag("--instruction=TEXT", "text at the end of each prompt, instead of ours")

PREPARE_UPCYCLED = Parser(
    """Make a mixture of experts: jaxrl prepare upcycle --model=DIR --output=DIR --experts=4

    Its experts begin as copies of a dense model's MLPs (docs/moe.md)."""
)
PREPARE_UPCYCLED.flag("--model=DIR", "the dense Hugging Face directory", required=True)
_add_output(PREPARE_UPCYCLED)
PREPARE_UPCYCLED.flag("--experts=N", "experts of a layer", required=True)
PREPARE_UPCYCLED.flag("--experts_per_token=2", "experts that a token takes")
PREPARE_UPCYCLED.flag(
    "--router_std=X",
    "standard deviation of the routers' weights; the model's initializer_range without it",
    type=float,
)
PREPARE_UPCYCLED.flag("--seed=0", "seed of the routers' weights")

CONVERT_CONFIG = Parser(
    """Write the config of a verl or TRL run: jaxrl convert-config --from=verl \
"python3 -m verl..."

    Prints what became of each key: translated, not needed, or without counterpart and what to
    do. Quote the command line, or give a file with it. docs/from-verl.md and docs/from-trl.md
    compare the keys."""
)
CONVERT_CONFIG.add_argument(
    "words", nargs="*", metavar="COMMAND", help="the command line, in quotes"
)
CONVERT_CONFIG.flag(
    "--from=LIBRARY",
    "whose command line it is: " + " | ".join(LIBRARIES),
    dest="library",
    choices=LIBRARIES,
    required=True,
)
CONVERT_CONFIG.flag(
    "--file=FILE",
    "a file with the command line; or .hydra/overrides.yaml of a run of verl",
)
CONVERT_CONFIG.flag("--output=FILE", "the config to write, a new file; NAME.py without it")
CONVERT_CONFIG.flag(
    "--rows=N",
    "rows of the training data, if its files are not here: they turn epochs into steps",
)
CONVERT_CONFIG.flag("--devices=N", "devices of the run, if the command line does not say so")
CONVERT_CONFIG.flag(
    "--allow=KEYS",
    "keys that change what is learned and may be left out, with commas between them; without it "
    "the command ends with 4 for such a key",
    default="",
)

VERIFY = Parser(
    """Look for damage in the checkpoints of a run: jaxrl verify RUN

    Compares every file with the digest that was written when it was saved, and prints a line
    for each checkpoint. It ends with 1 if anything is damaged. It changes nothing."""
)
VERIFY.add_argument(
    "run",
    type=Path,
    metavar="RUN",
    help="the folder of a run, or of one checkpoint (RUN/checkpoints/global_step_N)",
)

REPORT = Parser(
    """Draw a run, or compare several: jaxrl report RUN [RUN2 ...]

    Writes one HTML page that needs no network: curves, times and memory of the stages, samples
    token by token, alarms, config. A run writes its own page while it goes on. It changes
    nothing else, and needs no devices."""
)
REPORT.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
REPORT.flag(
    "--output=FILE",
    "the page; RUN/report.html without it, ./report.html for several runs",
)
REPORT.flag("--serve", "serve the page on 127.0.0.1 instead, until Ctrl-C")
REPORT.flag("--port=8000", "port of --serve; 0 takes a free one")

DOCTOR = Parser(
    """Measure this machine before a run: jaxrl doctor [--folder=DIR] [--json=FILE]

    Measures matmuls, memory, host and device links, collectives, disk and file locks, and
    compares them with the data sheet. It ends with 1 if anything is slow. Start it as a run is
    started, for example under srun: every process measures its own devices."""
)
DOCTOR.flag("--folder=runs", "where a run would write")
DOCTOR.flag("--json=FILE", "also write the report as JSON")
_add_devices(DOCTOR)

COMPLETION = Parser(
    """Complete words in a shell: source <(jaxrl completion bash)

    Prints a script for bash, zsh or fish. It completes commands, their flags, the names of
    packaged configs and the keys of a config. To keep it:

      bash   jaxrl completion bash > ~/.local/share/bash-completion/completions/jaxrl
      zsh    jaxrl completion zsh > _jaxrl      (in a folder of $fpath)
      fish   jaxrl completion fish > ~/.config/fish/completions/jaxrl.fish"""
)
COMPLETION.add_argument("shell", choices=SHELLS, metavar="SHELL", help=" | ".join(SHELLS))

# The flags of each command, and of the parts of `prepare`.
PARSERS: dict[str, Parser] = {
    "train": TRAIN,
    "plan": PLAN,
    "generate": GENERATE,
    "chat": CHAT,
    "serve": SERVE,
    "evaluate": EVALUATE,
    "export": EXPORT,
    "prepare": PREPARE,
    "prepare data": PREPARE_DATA,
    "prepare upcycle": PREPARE_UPCYCLED,
    "convert-config": CONVERT_CONFIG,
    "verify": VERIFY,
    "report": REPORT,
    "doctor": DOCTOR,
    "completion": COMPLETION,
}
