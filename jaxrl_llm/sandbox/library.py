"""Names that code may use without an import, as the judges of LeetCode and LiveCodeBench allow.

Imports the standard library alone: programs in the sandbox use it.
"""

import builtins
import functools
import importlib
import symtable
from typing import Any

# The judges import all names of these modules, later ones over earlier ones, and the modules.
STARRED = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
           "statistics", "itertools", "functools", "operator", "io", "sys", "json",
           "typing")  # fmt: skip
RECURSION_LIMIT = 50_000  # as LiveCodeBench sets it


class ListNode:
    """LeetCode's node of a linked list."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """LeetCode's node of a binary tree."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


def library_names(source: str) -> dict[str, Any]:
    """The names of the library that `source` uses without a definition; none for bad syntax."""
    try:
        missing = missing_names(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}  # the error is raised where the source is compiled
    return {name: value for name in missing if (value := find(name)) is not None}


def missing_names(source: str) -> set[str]:
    """Global names that `source` reads and neither it nor Python defines. Raises SyntaxError."""
    module = symtable.symtable(source, "source", "exec")
    defined = {name for name in module.get_identifiers() if _is_defined(module.lookup(name))}
    tables, used = [module], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                defined.add(symbol.get_name())
            elif symbol.is_referenced() and (symbol.is_global() or table is module):
                used.add(symbol.get_name())
    return {name for name in used - defined if not hasattr(builtins, name)}


def _is_defined(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


@functools.cache
def find(name: str) -> Any:
    """The value of a name in the library, or None."""
    if name in STARRED:
        return importlib.import_module(name)
    if name in ("ListNode", "TreeNode"):
        return globals()[name]
    for module in map(importlib.import_module, reversed(STARRED)):
        public = getattr(module, "__all__", None) or [n for n in dir(module) if n[0] != "_"]
        if name in public:
            return getattr(module, name)
    return None
