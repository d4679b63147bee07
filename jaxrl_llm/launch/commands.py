"""The commands: train, plan, generate, evaluate, export, prepare, verify, report, doctor, ...

`jaxrl NAME` and scripts/ run them.
Flags and config are checked before jax is imported.
"""

import argparse
import inspect
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_llm.checkpoint.layout import find_checkpoint
from jaxrl_llm.config import ConfigError, UnknownKeyError, load_config
from jaxrl_llm.data_files import resolve_files
from jaxrl_llm.evaluation.answer_settings import AnswerSettings, StreamSettings, read_settings
from jaxrl_llm.launch import library
from jaxrl_llm.launch.command_line import Parser, count, read_config
from jaxrl_llm.launch.convert_config import convert_config
from jaxrl_llm.launch.outputs import (
    DOCTOR,
    PAGE,
    PLAN,
    check_folder,
    check_new_folder,
    check_other_files,
    check_parent,
)
from jaxrl_llm.launch.pipes import outlive_readers
from jaxrl_llm.launch.runtime import (
    ALARMED,
    INTERRUPTED,
    USER_ERROR,
    devices_are_used,
    join_processes,
    run_script,
    start,
)
from jaxrl_llm.launch.runtime import prepare as prepare_jax
from jaxrl_llm.references import nearest, nearest_file
from jaxrl_llm.whole_files import write_whole


def train(argv: list[str]) -> int:
    """Train a model: jaxrl train --config=ppo [--config.key=value ...]

    Flags:
      --config=FILE          a file with get_config(), the name of a packaged config such as ppo, or
                             the folder or config.json of a run
      --config.a.b=VALUE     override any key of it, e.g. --config.total_steps=10
      --devices=N            split the CPU into N devices, to try a mesh on a laptop
      --dry_run              plan the run and read its data, show stages, models and memory, write
                             the resolved config, and end without training

    Starting again with the same --config.run_dir continues from its last checkpoint.
    Exit code 3: an alarm whose action is `stop` ended the run (docs/alarms.md).
    """
    parser = Parser()
    parser.add_argument("--devices", type=count, default=0)
    parser.add_argument("--dry_run", action="store_true")
    outlive_readers()
    config, flags = read_config(argv, parser)
    if flags.dry_run:
        config = start(config, num_cpu_devices=flags.devices)
        from jaxrl_llm.launch.dry_run import dry_run

        found = dry_run(config)
        from jaxrl_llm.distributed.multihost import is_main

        if is_main():
            print("\n".join(found))
        return 0
    summary = library.train(config, num_cpu_devices=flags.devices, end_process=os._exit)
    from jaxrl_llm.trainer.output import print_summary

    print_summary(summary, config)
    if summary.alarmed:
        return ALARMED
    return INTERRUPTED if summary.interrupted else 0


def generate(argv: list[str]) -> int:
    """Answer prompts: jaxrl generate --model=PATH --prompt="..." or --prompts=FILE --output=FILE

    Flags:
      --model=PATH            a Hugging Face directory, a checkpoint
                              (RUN/checkpoints/global_step_N), or a run's folder (its newest
                              checkpoint)
      --prompt=TEXT           one prompt; its answers are printed
      --prompts=FILE          many: parquet, arrow, JSON lines, CSV, a glob or a folder, with the
                              column prompt, messages or question
      --output=FILE           where their answers go, as JSON lines; each batch when it is done
      --logprobs              also write the tokens and their log-probs
      --batch_size=64         prompts that are answered at once
      --temperature=1.0       0 is greedy
      --max_new_tokens=256    most tokens of an answer
      --top_p=1.0  --top_k=0  nucleus and top-k sampling, off by default
      --stop=TEXT             ends an answer, and stays in it; may be given several times
      --chat=auto             whether a text is a user's message: auto (where the model has a chat
                              template) | true | false
      --dtype=float32         of computation: float32 | bfloat16
      --n=1  --seed=0         number of answers; the same seed gives the same ones
    """
    parser = _sampling_parser()
    parser.add_argument("--prompt", action="append")
    parser.add_argument("--prompts")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--batch_size", type=count, default=64)
    parser.add_argument("--chat", choices=("auto", "true", "false"), default="auto")
    parser.add_argument("--n", type=count, default=1)
    flags = parser.read(argv)
    if (flags.prompt is None) == (flags.prompts is None):
        raise ConfigError("required: --prompt=TEXT, or --prompts=FILE with --output=FILE")
    if len(flags.prompt or ()) > 1:
        raise ConfigError("--prompt is given twice; --prompts=FILE --output=FILE answers several")
    if (flags.prompts is None) != (flags.output is None):
        raise ConfigError("--prompts=FILE and --output=FILE belong together")
    if flags.prompts is not None:
        resolve_files(flags.prompts)
        check_parent("--output", flags.output)
        if flags.output.exists():
            raise ConfigError(f"--output={flags.output} exists; give a new file")
    how = read_settings(AnswerSettings, _sampling(flags, "n", "batch_size"), "--")
    model = library.open_model(flags.model, dtype=flags.dtype)
    if flags.prompts is not None:
        from jaxrl_llm.launch.answer_file import answer_file

        done = answer_file(model, flags.prompts, flags.output, how, logprobs=flags.logprobs)
        print(f"wrote the answers to {done} prompts: {flags.output}")
        return 0
    (answer,) = model.generate(*flags.prompt, **vars(how))
    for completion in answer.completions:
        print(completion.text)
        if not completion.finished:
            print(f"(cut after {len(completion.tokens)} tokens)", file=sys.stderr)
    return 0


def chat(argv: list[str]) -> int:
    """Talk with a model: jaxrl chat --model=PATH

    Shows each answer while it is made. /reset begins a new conversation, /exit ends, and Ctrl-C
    ends an answer. Lines of a pipe are answered one after the other.

    Flags:
      --model=PATH            as for `jaxrl generate`; it needs a chat template
      --system=TEXT           a system message before the conversation
      --temperature=0.7       0 is greedy
      --max_new_tokens=512    most tokens of an answer
      --top_p=1.0  --top_k=0  nucleus and top-k sampling, off by default
      --stop=TEXT             ends an answer, and stays in it; may be given several times
      --dtype=float32         of computation: float32 | bfloat16
      --seed=0                the same seed and lines give the same answers
    """
    parser = _sampling_parser(temperature=0.7, max_new_tokens=512)
    parser.add_argument("--system", default="")
    flags = parser.read(argv)
    how = read_settings(StreamSettings, _sampling(flags), "--")
    model = library.open_model(flags.model, dtype=flags.dtype)
    if not model.tokenizer.has_chat_template:
        raise ConfigError(
            f"the model {flags.model} has no chat template; `jaxrl generate` answers plain prompts"
        )
    from jaxrl_llm.evaluation.answering import sampling_params
    from jaxrl_llm.launch.chat import chat, typed_lines

    sampling_params(model, how)  # refuse stop strings before the first line
    chat(model, typed_lines(), sys.stdout, how, system=flags.system)
    return 0


def _sampling_parser(*, temperature: float = 1.0, max_new_tokens: int = 256) -> Parser:
    """The flags of a model and of how it is sampled."""
    parser = Parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--temperature", type=float, default=temperature)
    parser.add_argument("--max_new_tokens", type=count, default=max_new_tokens)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _sampling(flags: argparse.Namespace, *others: str) -> dict[str, Any]:
    """The flags that are settings of answers, by name."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "stop", "seed", *others)
    chat = {"auto": None, "true": True, "false": False}[getattr(flags, "chat", "auto")]
    return {"chat": chat} | {name: getattr(flags, name) for name in names}


def evaluate(argv: list[str]) -> int:
    """Held-out accuracy of a model: jaxrl evaluate --model=PATH --config=ppo

    Answers and grades the config's validation data as the run's own validation does: its sampling,
    its graders, its metrics. Prints a table: shares of right answers, with 95 % intervals in
    brackets. The model brings its own tokenizer.

    Flags:
      --model=PATH           a Hugging Face directory, a checkpoint (RUN/checkpoints/global_step_N),
                             or a run's folder (its newest checkpoint)
      --config=FILE          whose data.val_files, data.val_tasks and validation are used
      --config.a.b=VALUE     override any key of it, e.g. --config.validation.n=4
      --data=FILE            held-out rows in place of the config's
      --output=FILE          also write the metrics as JSON
      --answers=FILE         also write every answer with its grade, as JSON lines
      --devices=N            split the CPU into N devices, to try a mesh on a laptop
    """
    parser = Parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--devices", type=count, default=0)
    flags, config_path, overrides = parser.read_with_config(argv)
    if flags.data:
        given = (("data.val_files", [flags.data]), ("data.val_tasks", "[]"))
        overrides = (*given, *overrides)
    report = library.evaluate(
        flags.model,
        config_path,
        overrides=overrides,
        output=flags.output,
        answers=flags.answers,
        num_cpu_devices=flags.devices,
    )
    from jaxrl_llm.distributed.multihost import is_main
    from jaxrl_llm.evaluation.evaluation_report import table

    if is_main():
        print(table(report["metrics"], report["num_samples"], report["samples_per_prompt"]))
    return 0


def export(argv: list[str]) -> int:
    """Write a checkpoint as a Hugging Face directory: jaxrl export --model=PATH --output=DIR

    `AutoModelForCausalLM.from_pretrained(DIR)` opens what it writes: config.json, safetensors, the
    tokenizer with its chat template, generation_config.json, and a model card.

    Flags:
      --model=PATH             a checkpoint (RUN/checkpoints/global_step_N), or a run's folder (its
                               newest checkpoint)
      --output=DIR             the directory to write
      --role=actor             actor | critic | reward | reference | teacher; a critic and a reward
                               model are written as sequence classification with one label
      --dtype=...              float32 | bfloat16 | float16; as stored unless given
      --merge                  adapters merged with their base, the usual for a run with lora
      --adapter                the adapters alone, in the files that PEFT reads
      --max_shard_bytes=...    split the weights into files of at most this size (5 GB)
    """
    parser = Parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    roles = ("actor", "critic", "reward", "reference", "teacher")
    parser.add_argument("--role", choices=roles, default="actor")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max_shard_bytes", type=count)
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--adapter", action="store_true")
    flags = parser.read(argv)
    if flags.merge and flags.adapter:
        raise ConfigError("--merge and --adapter contradict each other; give one of them")
    written = library.export(
        flags.model,
        flags.output,
        role=flags.role,
        dtype=flags.dtype,
        adapter=flags.adapter,
        max_shard_bytes=flags.max_shard_bytes,
    )
    print(f"wrote {written}")
    from jaxrl_llm.evaluation.trained_model import base_note

    if note := base_note(find_checkpoint(flags.model), flags.role, adapter=flags.adapter):
        print(note)
    return 0


def prepare(argv: list[str]) -> int:
    """Make a data set or model: jaxrl prepare data|upcycle --output=DIR

    data gsm8k|math|math500|aime24|mbpp: a public set from the Hugging Face hub, by the package
    datasets (pip install 'jaxrl_llm[hub]'): a file of JSON lines for each split, with the columns
    prompt, ground_truth and data_source.
    upcycle: a mixture of experts whose experts begin as copies of a dense model's MLPs
    (docs/moe.md): jaxrl prepare upcycle --model=DIR --output=DIR --experts=4

    Flags:
      --output=DIR          the directory to write
      --source=FOLDER       a public set on disk, instead of the hub: a folder with its splits, as
                            downloaded or as save_to_disk writes it
      --instruction=TEXT    stands at the end of each prompt of a public set, instead of ours
      --model=DIR           of upcycle: the dense Hugging Face directory
      --experts=N           of upcycle: experts of a layer
      --experts_per_token=2 of upcycle: experts that a token takes
      --router_std=...      of upcycle: of the routers' random weights; the model's
                            initializer_range unless given
      --seed=0              of upcycle: of the routers
    """
    parser = Parser()
    parser.add_argument("what", choices=["data", "upcycle"])
    what = parser.read(argv[:1]).what
    return _prepare_data(argv[1:]) if what == "data" else _prepare_upcycled(argv[1:])


def _prepare_upcycled(argv: list[str]) -> int:
    """Write a dense model as a mixture of experts, in memory of the CPU."""
    parser = Parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--experts", type=int, required=True)
    parser.add_argument("--experts_per_token", type=int, default=2)
    parser.add_argument("--router_std", type=float)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.read(argv)
    check_new_folder("--output", flags.output)
    prepare_jax(num_cpu_devices=0 if devices_are_used() else 1)
    from jaxrl_llm.checkpoint.upcycling import Upcycling, upcycle

    mixture = Upcycling(
        experts=flags.experts,
        experts_per_token=flags.experts_per_token,
        router_std=flags.router_std,
        seed=flags.seed,
    )
    print(f"wrote {upcycle(flags.model, flags.output, mixture)}")
    return 0


def _prepare_data(argv: list[str]) -> int:
    """Write a public set, and show the keys that train on it."""
    from jaxrl_llm.data.public_sets import PUBLIC_SETS, prepare_public

    parser = Parser()
    parser.add_argument("name", choices=list(PUBLIC_SETS))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--source", default="")
    parser.add_argument("--instruction")
    flags = parser.read(argv)
    check_new_folder("--output", flags.output)
    written = prepare_public(
        flags.name, flags.output, source=flags.source, instruction=flags.instruction
    )
    for file, rows, left_out in written.values():
        print(f"wrote {file}: {rows} rows" + (f", {left_out} left out" if left_out else ""))
    files = {split: str(file) for split, (file, _, _) in written.items()}
    reward = PUBLIC_SETS[flags.name].reward
    if "train" in files:
        print(f"  --config.data.train_files='[{files['train']}]' --config.data.train_tasks='[]'")
        print(f"  --config.reward.functions='[{reward}]'")
    print(f"  --config.data.val_files='[{files['test']}]' --config.data.val_tasks='[]'")
    print(f"  --config.validation.grader={reward} --config.data.prompt_style=chat")
    return 0


def verify(argv: list[str]) -> int:
    """Look for damage in the checkpoints of a run: jaxrl verify RUN

    Compares every file with the digest that was written when it was saved, and prints a line for
    each checkpoint. It ends with 1 if anything is damaged. RUN is the folder of a run, or of one
    checkpoint (RUN/checkpoints/global_step_N). It changes nothing.
    """
    parser = Parser()
    parser.add_argument("run", type=Path)
    folder = parser.read(argv).run
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}{nearest_file(folder)}")
    prepare_jax()
    from jaxrl_llm.checkpoint.verify import verify

    sound = True
    for line, good in verify(folder):
        print(line, flush=True)
        sound = sound and good
    return 0 if sound else 1


def report(argv: list[str]) -> int:
    """Draw a run, or compare several: jaxrl report RUN [RUN2 ...]

    Writes one HTML page that needs no network: curves, times and memory of the stages, samples
    token by token, alarms, config. A run writes its own page while it goes on. It changes nothing
    else, and needs no devices.

    Flags:
      --output=FILE         the page; RUN/report.html without it, ./report.html for several runs
      --serve               serve the page on 127.0.0.1 instead, until Ctrl-C
      --port=8000           of --serve; 0 takes a free one
    """
    parser = Parser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    flags = parser.read(argv)
    from jaxrl_llm.report.html import REPORT, write_page
    from jaxrl_llm.report.run_files import is_run, open_runs

    for folder in flags.runs:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}{nearest_file(folder)}")
        if not is_run(folder):
            raise ConfigError(f"{folder} is no run: it has neither metrics.jsonl nor config.json")
    if flags.serve:
        return _serve(flags.runs, flags.port)
    output = flags.output or (flags.runs[0] if len(flags.runs) == 1 else Path()) / REPORT
    check_parent("--output", output)
    check_other_files("--output", output, PAGE)
    print(f"wrote {write_page(open_runs(flags.runs), output)}")
    return 0


def _serve(folders: list[Path], port: int) -> int:
    from jaxrl_llm.report.server import ReportServer

    try:
        server = ReportServer(folders, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port={port} cannot be used: {error}. Give another one") from None
    with server, suppress(KeyboardInterrupt):
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


def doctor(argv: list[str]) -> int:
    """Measure this machine before a run: jaxrl doctor [--folder=DIR] [--json=FILE]

    Measures matmuls, memory, host and device links, collectives, disk and file locks, and compares
    them with the data sheet. It ends with 1 if anything is slow. Start it as a run is started, for
    example under srun: every process measures its own devices.

    Flags:
      --folder=runs         where a run would write
      --json=FILE           also write the report as JSON
      --devices=N           split the CPU into N devices, to try it on a laptop
    """
    parser = Parser()
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--devices", type=count, default=0)
    flags = parser.read(argv)
    if flags.json is not None and flags.json.is_dir():
        raise ConfigError(f"--json={flags.json} is a folder; give a file such as doctor.json")
    check_folder("--folder", flags.folder)
    if flags.json is not None:
        check_folder("the folder of --json", flags.json.parent)
        check_other_files("--json", flags.json, DOCTOR)
    prepare_jax(num_cpu_devices=flags.devices)
    join_processes()
    from jaxrl_llm.distributed.multihost import is_main
    from jaxrl_llm.launch.doctor import examine, table

    report = examine(flags.folder)
    if is_main():
        print(table(report))
        if flags.json is not None:
            write_whole(flags.json, json.dumps(report, indent=2) + "\n")
    return 0 if report["ok"] else 1


def plan(argv: list[str]) -> int:
    """Memory and time of a step before there are GPUs: jaxrl plan --config=ppo --devices=64

    Compiles the programs of a config for devices that this machine need not have. Prints what a
    device holds, what its axes move, the seconds of each stage, and what would run faster.

    Flags:
      --config=FILE         a file with get_config(), a packaged config, or a run's folder
      --config.a.b=VALUE    override any key of it
      --devices=N           GPUs in all; without it those of config.mesh. If config.mesh has another
                            number, the fastest mesh that fits is taken
      --hosts=N             hosts that share them evenly; 8 GPUs a host without it
      --hardware=h200       h200 | h100, compiled or not; a100 | b200 | gh200 | l40s | l4 with
                            --quick; cpu compiles for CPU devices, and predicts no seconds
      --quick               compute without compiling, in seconds
      --prompt_tokens=N     of each prompt; the config's limit without it
      --response_tokens=N   of each response; the config's limit without it
      --lengths=FILE        a line PROMPT,RESPONSE for each sample, in place of these two
      --json=FILE           also write the report as JSON

    It ends with 1 if the run does not fit.
    """
    parser = Parser()
    parser.add_argument("--devices", type=count, default=0)
    parser.add_argument("--hosts", type=count, default=0)
    parser.add_argument("--hardware", type=str.lower, default="h200")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--prompt_tokens", type=count, default=0)
    parser.add_argument("--response_tokens", type=count, default=0)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--json", type=Path)
    flags, config_path, overrides = parser.read_with_config(argv)
    # No data are read, so those of the config need not be here.
    unread = (("data.train_files", "[]"), ("data.val_files", "[]"))
    unread += (("data.train_tasks", "[chain_sum]"),)
    config = load_config(config_path, (*overrides, *unread))
    from jaxrl_llm.launch.described_models import check_models

    check_models(config)
    from jaxrl_llm.estimate.lengths import lengths_in
    from jaxrl_llm.estimate.rates import CPU, rates_of
    from jaxrl_llm.estimate.topology import check_compiler

    if flags.hardware == CPU and flags.quick:
        raise ConfigError("--hardware=cpu has no rates to compute with; leave --quick out")
    if flags.hardware != CPU:
        rates_of(flags.hardware)
        if not flags.quick:
            check_compiler(flags.hardware)
    if flags.lengths is not None and (flags.prompt_tokens or flags.response_tokens):
        raise ConfigError("--lengths already says what --prompt_tokens and --response_tokens say")
    lengths = () if flags.lengths is None else lengths_in(flags.lengths)
    if flags.json is not None:
        check_parent("--json", flags.json)
        check_other_files("--json", flags.json, PLAN)
    on_cpu = flags.hardware == CPU
    prepare_jax(num_cpu_devices=(flags.devices or config.mesh.num_devices) if on_cpu else 1)
    from jaxrl_llm.estimate.report import Request, lines, make_report

    request = Request(
        devices=flags.devices,
        hosts=flags.hosts,
        hardware=flags.hardware,
        quick=flags.quick,
        prompt_tokens=flags.prompt_tokens,
        response_tokens=flags.response_tokens,
        lengths=lengths,
    )
    report = make_report(config, request, lambda text: print(text, file=sys.stderr, flush=True))
    print("\n".join(lines(report)))
    if flags.json is not None:
        write_whole(flags.json, json.dumps(report.to_json(), indent=2) + "\n")
    return 0 if report.planned.fits or not report.timed else 1


def completion(argv: list[str]) -> int:
    """Complete words in a shell: source <(jaxrl completion bash)

    Prints a script for bash, zsh or fish. It completes commands, their flags, the names of packaged
    configs and the keys of a config. To keep it:

      bash   jaxrl completion bash > ~/.local/share/bash-completion/completions/jaxrl
      zsh    jaxrl completion zsh > _jaxrl      (in a folder of $fpath)
      fish   jaxrl completion fish > ~/.config/fish/completions/jaxrl.fish
    """
    from jaxrl_llm.launch.completion import SHELLS, script

    parser = Parser()
    parser.add_argument("shell", choices=SHELLS)
    flags = parser.read(argv)
    print(script(flags.shell, {name: fn.__doc__ or "" for name, fn in COMMANDS.items()}), end="")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "plan": plan,
    "generate": generate,
    "chat": chat,
    "evaluate": evaluate,
    "export": export,
    "prepare": prepare,
    "convert-config": convert_config,
    "verify": verify,
    "report": report,
    "doctor": doctor,
    "completion": completion,
}


TAKES_CONFIG = ("train", "evaluate", "plan")  # their --help lists the keys of a config


def help_of(name: str) -> str:
    """What `jaxrl NAME --help` prints: the flags, and the keys of a config where one is taken."""
    text = inspect.cleandoc(COMMANDS[name].__doc__ or "")
    if name not in TAKES_CONFIG:
        return text
    from jaxrl_llm.launch.config_keys import help_text

    return f"{text}\n\n{help_text()}"


def run(command: Callable[[list[str]], int], argv: list[str] | None = None) -> NoReturn:
    """Run one command on the process's arguments and exit."""
    name = next(name for name, each in COMMANDS.items() if each is command)
    run_script(partial(_with_counterpart, command), argv, help_text=partial(help_of, name))


def _with_counterpart(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """The command; where a key is unknown here and known to verl, the error says what it is."""
    try:
        return command(argv)
    except UnknownKeyError as error:
        from jaxrl_llm.convert.verl_command import CONVERTS, counterpart

        note = counterpart(error.key, error.value)
        ours = any(word.startswith(f"--config.{error.key}") for word in argv)
        if note and not ours and CONVERTS not in note:  # the words of a command of verl
            note = f"{note}; {CONVERTS}"
        raise ConfigError(f"{error}\n{note}" if note else str(error)) from None


def main() -> NoReturn:
    """The console command `jaxrl`."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        run(COMMANDS[name], argv)
    if name == "--version":
        print("\n".join(versions(devices="--devices" in argv)))
        sys.exit(0)
    shown = [f"  {(fn.__doc__ or '').splitlines()[0]}" for fn in COMMANDS.values()]
    usage = "\n".join(
        [
            "jaxrl COMMAND --help shows the flags of a command, and the keys of its config:",
            *shown,
            "  Show versions; devices too: jaxrl --version [--devices]",
        ]
    )
    if name in ("--help", "-h"):
        print(usage)
        sys.exit(0)
    print(f"error: there is no command {name}{nearest(name, COMMANDS)}\n{usage}", file=sys.stderr)
    sys.exit(USER_ERROR)


def versions(*, devices: bool = False) -> list[str]:
    """Versions of what a run depends on; with `devices` also those that jax sees, which is slow."""
    import jaxrl_llm

    lines = [f"jaxrl_llm {jaxrl_llm.__version__}", f"python {platform.python_version()}"]
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy"):
        lines.append(f"{name} {metadata.version(name)}")
    if devices:
        prepare_jax()
        import jax

        kinds = Counter(device.device_kind for device in jax.devices())
        lines += [f"{count} x {kind}" for kind, count in kinds.items()]
    return lines
