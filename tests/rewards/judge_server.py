"""An OpenAI-compatible server in a process of its own: python judge_server.py FOLDER.

It writes its port to FOLDER/port and a line for each request to FOLDER/requests.jsonl. What it does
follows the text that it is asked to grade.
"""

import json
import time
from collections import Counter

from recording import RecordingHandler, serve

SEEN: Counter[str] = Counter()


class Handler(RecordingHandler):
    def do_POST(self) -> None:
        body = self.recorded()
        text = body["messages"][-1]["content"]
        SEEN[text] += 1
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


if __name__ == "__main__":
    serve(Handler)
