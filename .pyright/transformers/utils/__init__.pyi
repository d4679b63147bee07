from collections.abc import Callable
from typing import Any

def get_json_schema(func: Callable[..., Any]) -> dict[str, Any]: ...
