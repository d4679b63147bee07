"""A stand-in for TRL's trainers, on which their methods run; without TRL its tests are skipped."""

from types import SimpleNamespace

import pytest

REASON = "TRL is not installed: pip install -e '.[parity]' -c constraints.txt"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("trl", reason=REASON)


class Recorder(dict):
    """TRL's `self._metrics`: mode -> name -> list of values."""

    def __missing__(self, key):
        self[key] = _Lists()
        return self[key]


class _Lists(dict):
    def __missing__(self, key):
        self[key] = []
        return self[key]


def trainer(**settings):
    """What the losses read of a trainer, in training mode on one CPU process."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    common = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True, _modules={}),  # peft looks into it
        "aux_loss_enabled": False,
        "_metrics": Recorder(),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**(common | settings))
