"""A server in a process of its own that writes down its requests, and what a test asks of it.

The server writes its port to FOLDER/port and a line for each request to FOLDER/requests.jsonl.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class RecordingHandler(BaseHTTPRequestHandler):
    """Of the server: its folder is the first argument of the process."""

    def recorded(self) -> dict[str, Any]:
        """The body of the request, which is written down."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        entry = {"path": self.path, "key": self.headers.get("Authorization"), "body": body}
        with open(Path(sys.argv[1]) / "requests.jsonl", "a") as file:
            file.write(json.dumps(entry | {"at": time.time()}) + "\n")
        return body

    def answer(self, code: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def serve(handler: type[RecordingHandler]) -> None:
    """What the process of a server does, without end."""
    folder = Path(sys.argv[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        (folder / "port.tmp").write_text(str(server.server_address[1]))
        (folder / "port.tmp").rename(folder / "port")
        server.serve_forever()


class RecordingServer:
    """Of the test: where the server is, and what it was asked."""

    def __init__(self, folder: Path, path: str):
        self.folder = folder
        self.url = f"http://127.0.0.1:{(folder / 'port').read_text()}/{path}"
        self._read = 0

    def requests(self) -> list[dict]:
        """Those since the last call."""
        file = self.folder / "requests.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        new, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in new]


@contextmanager
def running_server(script: str, folder: Path, path: str) -> Iterator[RecordingServer]:
    """The server of a script of this folder, until the block ends."""
    file = Path(__file__).with_name(script)
    process = subprocess.Popen([sys.executable, str(file), str(folder)])
    try:
        deadline = time.monotonic() + 30
        while not (folder / "port").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        yield RecordingServer(folder, path)
    finally:
        process.kill()
        process.wait()
