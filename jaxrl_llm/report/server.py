"""The report on this machine's loopback address, made again whenever it is asked for."""

import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from jaxrl_llm.report.html import page
from jaxrl_llm.report.run_files import open_runs

LOOPBACK = "127.0.0.1"
FRESH_S = 5.0  # a page so young is sent again


class ReportServer(ThreadingHTTPServer):
    """Serves one page at / on 127.0.0.1, and nothing else.

    A request that names another host is refused: a page elsewhere could otherwise read this one
    by a name that it lets point to 127.0.0.1.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int):
        super().__init__((LOOPBACK, port), _Handler)
        self._runs = open_runs(folders)
        self._lock = threading.Lock()
        self._made, self._page = -FRESH_S, b""

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def hosts(self) -> set[str]:
        """The hosts that a request may name."""
        port = self.server_address[1]
        return {f"{name}:{port}" for name in (LOOPBACK, "localhost")}

    def page(self) -> bytes:
        """The page of now, or of a moment ago."""
        with self._lock:
            if time.monotonic() - self._made >= FRESH_S:
                self._page = page(self._runs).encode("utf-8", errors="backslashreplace")
                self._made = time.monotonic()
            return self._page


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer a request for the page."""
        if self.headers.get("Host") not in self.server.hosts():
            self.send_error(403, "this server answers 127.0.0.1 only")
        elif self.path.partition("?")[0] != "/":
            self.send_error(404)
        else:
            body = self.server.page()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each request is of no use."""
