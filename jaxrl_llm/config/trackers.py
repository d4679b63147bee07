"""The trackers that a config may name in `log.trackers`."""

# Name -> the module that it needs. The extra of the package has the tracker's name.
PACKAGES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
