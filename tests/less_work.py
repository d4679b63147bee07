"""Work of jax and grain that takes a twentieth of the tests' CPU time, and changes no result."""

import functools
import threading
import zlib

import jax
from grain._src.python.experimental.index_shuffle.python import index_shuffle_module
from jax._src import compilation_cache
from jax._src.interpreters import mlir

USES = 10  # of a context, as in jax 0.11: what is interned in it is freed with it


def do_less() -> None:
    """Change jax and grain in this process: its later programs and its later shuffles."""
    if jax.__version_info__ < (0, 11):  # later versions keep contexts by themselves
        mlir.make_ir_context = kept_context(mlir.make_ir_context)
    # An executable that is read once or twice is compressed fast. Every level is read alike.
    if not (compilation_cache.zstd or compilation_cache.zstandard):
        compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)
    # The place of a row in an epoch of 16 takes grain 2 ms, of 64 a quarter of that.
    index_shuffle_module.index_shuffle = functools.cache(index_shuffle_module.index_shuffle)


def kept_context(new):
    """`new`, asked once for USES programs of a thread. To open a context takes 5 ms."""
    own = threading.local()

    def kept():
        context, uses = getattr(own, "kept", (None, USES))
        if uses == USES:
            context, uses = new(), 0
        own.kept = context, uses + 1
        return context

    return kept
