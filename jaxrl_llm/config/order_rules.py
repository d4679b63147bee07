"""Rules of the order in which prompts come: by priority, by a column, or shuffled."""

from jaxrl_llm.config.functions import Spread
from jaxrl_llm.config.records import ConfigError
from jaxrl_llm.config.schema import Config


def check_order(config: Config, *, offline: bool) -> None:
    """ConfigError for an order of prompts that cannot work."""
    _check_priority(config, offline)
    data = config.data
    key = f"config.data.curriculum={data.curriculum}"
    if not data.curriculum:
        if data.curriculum_steps:
            raise ConfigError(
                f"config.data.curriculum_steps={data.curriculum_steps} and no column: name one, "
                "--config.data.curriculum=difficulty"
            )
    elif data.streaming:
        raise ConfigError(
            f"{key} reads the column of all rows, and config.data.streaming=true reads none before "
            "it is needed: set one of them"
        )
    elif offline:
        raise ConfigError(
            f"{key} is for online runs: set --config.data.curriculum='', sort the file, and set "
            "--config.data.shuffle=false"
        )
    elif data.priority is not None:
        raise ConfigError(
            f"{key} and config.data.priority={data.priority.label} each give the order: set "
            "--config.data.curriculum='' or --config.data.priority=null"
        )


def _check_priority(config: Config, offline: bool) -> None:
    priority = config.data.priority
    if priority is None:
        return
    key = f"config.data.priority={priority.label}"
    if offline:
        raise ConfigError(
            f"{key}: an offline run scores no answers; set --config.data.priority=null"
        )
    if not config.data.shuffle:
        raise ConfigError(
            f"{key} draws at random, and config.data.shuffle=false asks for the order of the "
            "files; set one of --config.data.shuffle=true and --config.data.priority=null"
        )
    if isinstance(priority, Spread) and config.rollout.n == 1:
        raise ConfigError(
            f"{key}: reads the std of a prompt's samples, and config.rollout.n=1 makes one; "
            "config.rollout.n=8 is usual, or --config.data.priority=failure_rate"
        )
