"""Run configurations: each file's get_config() returns one frozen dataclass."""
