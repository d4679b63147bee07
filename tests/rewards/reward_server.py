"""A reward server in a process of its own: python reward_server.py FOLDER.

It writes its port to FOLDER/port and a line for each request to FOLDER/requests.jsonl. A row's
score is the length of its response; some responses ask for something else.
"""

import json
import time

from recording import RecordingHandler, serve

BUSY: set[str] = set()
ODD = {
    "none": None,
    "map": {"score": 0.5, "why": "so"},
    "steps": {"step_scores": [1, 2], "step_ends": [2, 5]},
    "text": "0.5",
}


class Handler(RecordingHandler):
    def do_POST(self) -> None:
        body = self.recorded()
        responses = [row["response"] for row in body["rows"]]
        if "busy" in responses and "busy" not in BUSY:
            BUSY.add("busy")
            return self.answer(503, "later")
        if "locked" in responses:
            return self.answer(401, "no key")
        if "slow" in responses:
            time.sleep(0.6)
        grades = [ODD.get(text, len(text)) for text in responses if text != "lost"]
        self.answer(200, json.dumps(grades if "bare" in responses else {"scores": grades}))


if __name__ == "__main__":
    serve(Handler)
