"""External searcher of the tests. Arguments: FOLDER [http].

Creates three trials of 4 batches, continues those with an even index to 10 batches, and stops the
others. FOLDER/answers has one answer per line, so a repeated call is answered as before.
FOLDER/questions gets all questions. The files `bad`, `crash` and `hang` in FOLDER cause faults.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

folder = sys.argv[1]


def path(name):
    return os.path.join(folder, name)


def append(name, value):
    with open(path(name), "a") as file:
        file.write(json.dumps(value) + "\n")


def stored():
    if not os.path.exists(path("answers")):
        return {}
    with open(path("answers")) as file:
        answers = [json.loads(line) for line in file]
    return {answer["call"]: answer for answer in answers}


def decide(question):
    actions = []
    for event in question["events"]:
        if "began" in event:
            for number in range(3):
                given = {"x": number / 4}
                create = {"hyperparameters": given, "units": 4, "tag": f"t{number}"}
                actions.append({"create": create})
        result = event.get("result")
        if result and result["units"] == 4:
            trial = result["trial"]
            assert result["tag"] == f"t{trial}", result
            if trial % 2 == 0:
                actions.append({"continue": {"trial": trial, "units": 10}})
            else:
                actions.append({"stop": {"trial": trial}})
    return {"call": question["call"], "actions": actions}


def respond(question):
    append("questions", question)
    if os.path.exists(path("bad")):
        with open(path("bad")) as file:
            return file.read().strip()
    answer = stored().get(question["call"])
    if answer is None:
        answer = decide(question)
        append("answers", answer)
    if os.path.exists(path("crash")) and question["call"] == 1:
        os.remove(path("crash"))
        sys.exit(3)
    if os.path.exists(path("hang")) and question["call"] == 1:
        append("hung", question["call"])
        while os.path.exists(path("hang")):
            time.sleep(0.01)
    return json.dumps(answer)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers["content-length"])
        answer = respond(json.loads(self.rfile.read(length))).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


if sys.argv[2:] == ["http"]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    with open(path("port.new"), "w") as file:
        file.write(str(server.server_port))
    os.rename(path("port.new"), path("port"))
    server.serve_forever()
for line in sys.stdin:
    print(respond(json.loads(line)), flush=True)
