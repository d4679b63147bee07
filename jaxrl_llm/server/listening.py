"""A server that listens, in a thread of its own: also in a notebook, whose loop is in use."""

# Packages of the extra `serve`.
# pyright: reportMissingImports=false

import atexit
import socket
import threading
from types import TracebackType
from typing import Self

import uvicorn

from jaxrl_llm.generation.session import Engine
from jaxrl_llm.server.app import Application
from jaxrl_llm.server.settings import ServerSettings
from jaxrl_llm.server.worker import Worker
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.typed_records.messages import ConfigError

BACKLOG = 2048  # connections that may wait to be accepted
LAST_S = 5  # how long open answers may go on when the server ends


class Listener:
    """An application that listens, until `close`."""

    def __init__(self, application: Application, settings: ServerSettings) -> None:
        """Begin to listen. ConfigError where the port is in use."""
        host = settings.host
        self._socket = open_socket(settings)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"
        config = uvicorn.Config(
            application.starlette(any_host=not _is_loopback(host)),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=LAST_S,
        )
        self._server = uvicorn.Server(config)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a program may forget it

    def wait(self) -> None:
        """Wait until the server ends; Ctrl-C is raised here."""
        # Not by `join`: until Python 3.13 a join that Ctrl-C ends counts the thread as ended.
        while not self._ended.wait(1.0):  # a wait without a limit would hold Ctrl-C back
            pass

    def close(self) -> None:
        """End the server. Open answers have a few seconds."""
        atexit.unregister(self.close)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        finally:
            self._ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Server(Listener):
    """Serves one model at `url`, until `close`. `context` is the longest sequence of `engine`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        name: str,
        context: int,
        settings: ServerSettings,
    ) -> None:
        """Begin to listen. ConfigError where the port is in use."""
        application = Application(Worker(engine), tokenizer, name, context, settings)
        super().__init__(application, settings)


def open_socket(settings: ServerSettings) -> socket.socket:
    """Listen at the address of the settings. ConfigError where that cannot be."""
    address = (settings.host, settings.port)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"port {settings.port} of {settings.host}: {reason}") from None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
