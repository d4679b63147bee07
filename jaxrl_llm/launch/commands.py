"""The commands of `jaxrl`. Flags and config are checked before jax is imported."""

import argparse
import json
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.checkpoint.layout import find_checkpoint
from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.config.rules.paths import SERVER
from jaxrl_llm.data_files import resolve_files
from jaxrl_llm.evaluation.answer_settings import AnswerSettings, StreamSettings, read_settings
from jaxrl_llm.launch import flags as flags_of
from jaxrl_llm.launch import library
from jaxrl_llm.launch.command_line import read_config
from jaxrl_llm.launch.convert_config import convert_config
from jaxrl_llm.launch.exits import ALARMED, INTERRUPTED
from jaxrl_llm.launch.outputs import check_file, check_folder
from jaxrl_llm.launch.pipes import outlive_readers
from jaxrl_llm.launch.runtime import devices_are_used, join_processes, start
from jaxrl_llm.launch.runtime import prepare as prepare_jax
from jaxrl_llm.references import nearest, nearest_file
from jaxrl_llm.server.settings import ServerSettings
from jaxrl_llm.whole_files import write_whole

if TYPE_CHECKING:
    from jaxrl_llm.evaluation.answering import OpenModel


def train(argv: list[str]) -> int:
    """Train a model."""
    outlive_readers()
    config, flags = read_config(argv, flags_of.TRAIN)
    if flags.dry_run:
        return _dry_run(start(config, num_cpu_devices=flags.devices), flags.show)
    with library.started(config, num_cpu_devices=flags.devices) as config:
        from jaxrl_llm.trainer.loop import train

        summary = train(config, end_process=os._exit)
    from jaxrl_llm.trainer.output import print_summary

    print_summary(summary, config)
    if summary.alarmed:
        return ALARMED
    return INTERRUPTED if summary.interrupted else 0


def _dry_run(config: Any, show: int) -> int:
    from jaxrl_llm.distributed.multihost import is_main
    from jaxrl_llm.launch.dry_run import dry_run

    lines = dry_run(config, show=show)
    if is_main():
        print("\n".join(lines))
    return 0


def generate(argv: list[str]) -> int:
    """Answer one prompt, or a file of prompts."""
    flags = flags_of.GENERATE.read(argv)
    if (flags.prompts is None) != (flags.output is None):
        raise ConfigError("--prompts=PATH and --output=FILE belong together")
    if flags.prompts is not None:
        resolve_files(flags.prompts)
        check_file("--output", flags.output)
        if flags.output.exists():
            raise ConfigError(f"--output={flags.output} exists; give a new file")
    settings = read_settings(AnswerSettings, _sampling(flags, "n", "batch_size"), "--")
    model = _opened(flags)
    if flags.prompts is not None:
        from jaxrl_llm.launch.answer_file import answer_file

        done = answer_file(model, flags.prompts, flags.output, settings, logprobs=flags.logprobs)
        print(f"wrote the answers to {done} prompts: {flags.output}")
        return 0
    (answer,) = model.generate(flags.prompt, **vars(settings))
    for completion in answer.completions:
        print(completion.text)
        if not completion.finished:
            print(f"(cut after {len(completion.tokens)} tokens)", file=sys.stderr)
    return 0


def chat(argv: list[str]) -> int:
    """Talk with a model."""
    flags = flags_of.CHAT.read(argv)
    settings = read_settings(StreamSettings, _sampling(flags), "--")
    model = _opened(flags)
    if not model.tokenizer.has_chat_template:
        raise ConfigError(
            f"the model {flags.model} has no chat template; `jaxrl generate` answers plain prompts"
        )
    from jaxrl_llm.evaluation.answering import sampling_params
    from jaxrl_llm.launch.chat import chat, typed_lines

    sampling_params(model, settings)  # refuse stop strings before the first line
    chat(model, typed_lines(), sys.stdout, settings, system=flags.system or "")
    return 0


def serve(argv: list[str]) -> int:
    """Serve a model until Ctrl-C or SIGTERM."""
    flags = flags_of.SERVE.read(argv)
    names = ("port", "host", "slots", "context", "seed", "queue", "answer_s", "body_mb")
    values = {name: getattr(flags, name) for name in names}
    key = flags.api_key or os.environ.get("JAXRL_API_KEY", "")
    settings = read_settings(ServerSettings, values | {"api_key": key}, "--")
    if not all(map(find_spec, SERVER)):
        raise ConfigError(f"a server needs more packages: pip install {' '.join(SERVER)}")
    from jaxrl_llm.server.listening import open_socket

    open_socket(settings).close()  # before the model is opened
    model = replace(_opened(flags), name=flags.model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with model.serve(**vars(settings)) as server, suppress(KeyboardInterrupt):
        print(f"{flags.model} at {server.url}  (Ctrl-C ends it)", flush=True)
        server.wait()
    return 0


def _opened(flags: argparse.Namespace) -> "OpenModel":
    options = {name: getattr(flags, name) for name in ("dtype", "family", "tensor")}
    return library.open_model(flags.model, **options)


def _sampling(flags: argparse.Namespace, *others: str) -> dict[str, Any]:
    """The flags that are settings of answers, by name."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", *others)
    chat = {"auto": None, "true": True, "false": False}[getattr(flags, "chat", "auto")]
    settings = {name: getattr(flags, name) for name in names}
    return settings | {"chat": chat, "stop": flags.stop or []}


def evaluate(argv: list[str]) -> int:
    """Measure the held-out accuracy of a model."""
    flags = flags_of.EVALUATE.read(argv)
    overrides = flags.overrides
    if flags.data:
        data = [("data.val_files", [flags.data]), ("data.val_tasks", "[]")]
        overrides = [*data, *overrides]
    if flags.family:
        overrides = [("actor.family", flags.family), *overrides]
    report = library.evaluate(
        flags.model,
        flags.config,
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
    """Write a checkpoint as a Hugging Face directory."""
    flags = flags_of.EXPORT.read(argv)
    written = library.export(
        flags.model,
        flags.output,
        role=flags.role,
        dtype=flags.dtype,
        adapter=flags.adapter,
        max_shard_bytes=flags.max_shard_bytes or None,
        family=flags.family,
    )
    print(f"wrote {written}")
    from jaxrl_llm.evaluation.trained_model import base_note

    if note := base_note(find_checkpoint(flags.model), flags.role, adapter=flags.adapter):
        print(note)
    return 0


def prepare(argv: list[str]) -> int:
    """Make a data set or a model."""
    if argv[:1] == ["data"]:
        return _prepare_data(argv[1:])
    if argv[:1] == ["upcycle"]:
        return _prepare_upcycled(argv[1:])
    flags_of.PREPARE.read(argv)  # shows help, or refuses
    return 0


def _prepare_upcycled(argv: list[str]) -> int:
    """Write a dense model as a mixture of experts, in memory of the CPU."""
    flags = flags_of.PREPARE_UPCYCLED.read(argv)
    check_folder("--output", flags.output)
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

    flags = flags_of.PREPARE_DATA.read(argv)
    if flags.name not in PUBLIC_SETS:
        known = f"{nearest(flags.name, PUBLIC_SETS)}\nsets: {', '.join(PUBLIC_SETS)}"
        raise ConfigError(f"there is no set {flags.name}{known}")
    check_folder("--output", flags.output)
    written = prepare_public(
        flags.name, flags.output, source=flags.source or "", instruction=flags.instruction
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
    """Look for damage in the checkpoints of a run."""
    folder = flags_of.VERIFY.read(argv).run
    if not folder.is_dir():  # nothing in it would be damaged
        raise ConfigError(f"there is no folder {folder}{nearest_file(folder)}")
    prepare_jax()
    from jaxrl_llm.checkpoint.verify import verify

    is_sound = True
    for line, is_good in verify(folder):
        print(line, flush=True)
        is_sound = is_sound and is_good
    return 0 if is_sound else 1


def report(argv: list[str]) -> int:
    """Draw a run, or compare several."""
    flags = flags_of.REPORT.read(argv)
    from jaxrl_llm.report.html import REPORT, write_page
    from jaxrl_llm.report.run_files import is_run, open_runs
    from jaxrl_llm.report.server import ReportServer

    for folder in flags.runs:
        if not is_run(folder):
            hint = "" if folder.exists() else nearest_file(folder)
            raise ConfigError(f"{folder} has no metrics.jsonl and no config.json of a run{hint}")
    if flags.serve:
        with ReportServer(flags.runs, flags.port) as server, suppress(KeyboardInterrupt):
            print(f"{server.url}  (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        return 0
    output = flags.output or (flags.runs[0] if len(flags.runs) == 1 else Path()) / REPORT
    check_file("--output", output)
    print(f"wrote {write_page(open_runs(flags.runs), output)}")
    return 0


def doctor(argv: list[str]) -> int:
    """Measure this machine before a run."""
    flags = flags_of.DOCTOR.read(argv)
    folder = Path(flags.folder)
    check_folder("--folder", folder)
    if flags.json is not None:
        check_file("--json", flags.json)
    prepare_jax(num_cpu_devices=flags.devices)
    join_processes()
    from jaxrl_llm.distributed.multihost import is_main
    from jaxrl_llm.launch.doctor import examine, table

    report = examine(folder)
    if is_main():
        print(table(report))
        if flags.json is not None:
            write_whole(flags.json, json.dumps(report, indent=2) + "\n")
    return 0 if report["ok"] else 1


def plan(argv: list[str]) -> int:
    """Predict memory and time of a step."""
    flags = flags_of.PLAN.read(argv)
    # No data are read, so the files of the config need not be here.
    unread = [("data.train_files", "[]"), ("data.val_files", "[]")]
    unread += [("data.train_tasks", "[chain_sum]")]
    config = load_config(flags.config, [*flags.overrides, *unread])
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
        check_file("--json", flags.json)
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
    """Print a script that completes words in a shell."""
    flags = flags_of.COMPLETION.read(argv)
    from jaxrl_llm.launch.completion import script

    print(script(flags.shell, flags_of.PARSERS), end="")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "plan": plan,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "evaluate": evaluate,
    "export": export,
    "prepare": prepare,
    "convert-config": convert_config,
    "verify": verify,
    "report": report,
    "doctor": doctor,
    "completion": completion,
}


def command_of(name: str) -> Callable[[list[str]], int]:
    """The command with a name; --help and --version count as commands."""
    others = {"--help": _show_commands, "-h": _show_commands, "--version": _show_versions}
    if command := (COMMANDS | others).get(name):
        return command
    raise ConfigError(f"there is no command {name}{nearest(name, COMMANDS)}\n{_usage()}")


def _usage() -> str:
    abouts = [flags_of.PARSERS[name].description or "" for name in COMMANDS]
    return "\n".join(
        [
            "jaxrl COMMAND --help shows the flags of a command, and the keys of its config:",
            *(f"  {about.splitlines()[0]}" for about in abouts),
            "  Show versions; devices too: jaxrl --version [--devices]",
        ]
    )


def _show_commands(argv: list[str]) -> int:
    print(_usage())
    return 0


def _show_versions(argv: list[str]) -> int:
    print("\n".join(versions(devices="--devices" in argv)))
    return 0


def versions(*, devices: bool = False) -> list[str]:
    """Versions of the packages of a run; with `devices` also the devices of jax, which is slow."""
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
