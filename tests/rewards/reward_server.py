"""A reward server in a process of its own: python reward_server.py FOLDER.

It writes its port to FOLDER/port and a line for each request to FOLDER/requests.jsonl. A row's
score is the length of its response; some responses ask for something else.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
BUSY: set[str] = set()
ODD = {
    "none": None,
    "map": {"score": 0.5, "why": "so"},
    "steps": {"step_scores": [1, 2], "step_ends": [2, 5]},
    "text": "0.5",
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        responses = [row["response"] for row in body["rows"]]
        entry = {"path": self.path, "key": self.headers.get("Authorization"), "body": body}
        with open(FOLDER / "requests.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        if "busy" in responses and "busy" not in BUSY:
            BUSY.add("busy")
            return self.answer(503, "later")
        if "locked" in responses:
            return self.answer(401, "no key")
        if "slow" in responses:
            time.sleep(0.6)
        grades = [ODD.get(text, len(text)) for text in responses if text != "lost"]
        self.answer(200, json.dumps(grades if "bare" in responses else {"scores": grades}))

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    (FOLDER / "port.tmp").write_text(str(server.server_address[1]))
    (FOLDER / "port.tmp").rename(FOLDER / "port")
    server.serve_forever()
