"""Data sets of the Hugging Face hub, by the package `datasets`."""

from jaxrl_llm.data_files import DataFile, HubName, check_hub


def hub_files(name: HubName) -> list[DataFile]:
    """The arrow files of a data set, downloaded if they are not in the cache of `datasets`.

    Raises: ValueError that names the remedy, without the package, the network or the data set.
    """
    check_hub(name)
    import datasets  # pyright: ignore[reportMissingImports]

    try:
        loaded = datasets.load_dataset(name.path, name.config or None, split=name.split)
    except Exception as error:  # datasets raises its own errors, the hub's and the network's
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name} could not be loaded: {what}. Without a network, load it on another machine, "
            "write it there with save_to_disk(FOLDER), and give that folder"
        ) from error
    files = [DataFile(entry["filename"], "arrow") for entry in loaded.cache_files]
    if not files:
        raise ValueError(f"{name} has no files in the cache of datasets: set HF_DATASETS_CACHE")
    return files
