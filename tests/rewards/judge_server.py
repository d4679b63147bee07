"""An OpenAI-compatible server in a process of its own: python judge_server.py FOLDER.

It writes its port to FOLDER/port and a line for each request to FOLDER/requests.jsonl. What it does
follows the text that it is asked to grade.
"""

import json
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
SEEN: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        SEEN[text] += 1
        entry = {"path": self.path, "key": self.headers.get("Authorization"), "body": body}
        with open(FOLDER / "requests.jsonl", "a") as file:
            file.write(json.dumps(entry | {"at": time.time()}) + "\n")
        if "busy" in text and SEEN[text] < 3:
            return self.answer(429, "later", {"Retry-After": "0"})
        if "locked" in text:
            return self.answer(401, "no key")
        if "moved" in text:
            return self.answer(307, "", {"Location": "/v1/elsewhere"})
        if "broken" in text:
            return self.answer(500, "oh")
        if "too long" in text:
            return self.answer(400, "more tokens than the context")
        if "garbled" in text:
            self.wfile.write(b"no HTTP\r\n\r\n")
            return
        if "slow" in text:
            time.sleep(20)
        score = "I would rather not." if "mute" in text else "It is good.\n**Score: 7.5**"
        score = "Score: 11" if "generous" in text else score
        found = {"choices": [{"message": {"role": "assistant", "content": score}}]}
        self.answer(200, json.dumps(found))

    def answer(self, code: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    (FOLDER / "port.tmp").write_text(str(server.server_address[1]))
    (FOLDER / "port.tmp").rename(FOLDER / "port")
    server.serve_forever()
