"""The trackers that a config may name, and whether their packages are installed."""

import importlib.util
from collections.abc import Sequence

from jaxrl_llm.config.records import ConfigError
from jaxrl_llm.references import check_path, nearest

# Name in config.log.trackers -> the module that it needs. The extra has the tracker's name.
PACKAGES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises: ConfigError for an unknown name, a package that is missing, or a name given twice."""
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"config.log.trackers names {name} twice; name it once")
        if ":" in name:
            try:
                check_path(name)
            except ValueError as error:
                raise ConfigError(f"config.log.trackers={name}: {error}") from None
        elif name not in PACKAGES:
            raise ConfigError(
                f"config.log.trackers={name}: there is no such tracker{nearest(name, PACKAGES)}\n"
                f"there are: {', '.join(PACKAGES)}, or a class of yours, my_file.py:MyTracker"
            )
        elif importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"config.log.trackers={name}: its package is not installed: "
                f"pip install 'jaxrl_llm[{name}]'"
            )
