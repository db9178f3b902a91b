"""External searcher of Stoker: Optuna's TPE samples, and its median pruner stops trials.

As a program of `stoker run`, it reads questions from standard input and writes answers to standard
output. As a service on a cluster, it answers POST requests: `searcher.py --memory DIR --listen 80`.
"""

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

optuna.logging.set_verbosity(optuna.logging.WARNING)


def distributions(space, prefix=""):
    """Returns Optuna's distributions of a search space, by path. Constants have one choice."""
    found = {}
    for name, of in space.items():
        path = f"{prefix}{name}"
        kind = next(iter(of)) if isinstance(of, dict) and len(of) == 1 else None
        if kind == "int":
            found[path] = IntDistribution(of["int"]["min"], of["int"]["max"])
        elif kind == "double":
            found[path] = FloatDistribution(of["double"]["min"], of["double"]["max"])
        elif kind == "log":
            base = of["log"].get("base", 10)
            low, high = base ** of["log"]["min"], base ** of["log"]["max"]
            found[path] = FloatDistribution(low, high, log=True)
        elif kind == "categorical":
            found[path] = CategoricalDistribution(of["categorical"])
        elif kind == "const" or not isinstance(of, dict):
            found[path] = CategoricalDistribution([of["const"] if kind else of])
        else:
            found.update(distributions(of, f"{path}/"))
    return found


def nested(params):
    """Returns hyperparameters in the form of the search space."""
    values = {}
    for path, value in params.items():
        *groups, name = path.split("/")
        group = values
        for part in groups:
            group = group.setdefault(part, {})
        group[name] = value
    return values


def entries(file):
    """Returns the lines of a file. Removes a last line that was not written completely."""
    if not os.path.exists(file):
        return []
    with open(file, "rb+") as lines:
        text = lines.read()
        end = text.rfind(b"\n") + 1
        lines.truncate(end)
    return [json.loads(line) for line in text[:end].splitlines()]


class Search:
    """The search of one experiment. FILE has one line for each call, written before the answer."""

    def __init__(self, file, spec):
        self.file = file
        searcher = spec["searcher"]
        self.max_trials = searcher["external"]["maxTrials"]
        self.concurrency = searcher["external"]["maxConcurrentTrials"] or self.max_trials
        (self.max_units,) = searcher["maxLength"].values()
        self.space = distributions(spec["hyperparameters"])
        self.study = optuna.create_study(
            direction="minimize" if searcher["smallerIsBetter"] else "maximize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        )
        self.trials = {}  # open trials of Optuna, by tag
        self.waiting = {}  # trials of the experiment that have a result, with their tag and units
        self.tags = []  # of all trials, by index
        self.last_order = -1
        self.answers = {}
        for entry in entries(file):
            self.replay(entry)

    def replay(self, entry):
        """Takes in a line of the file: the events and the answer of a call."""
        if "limits" in entry:
            # The limits at the time of the call, which an edit may have changed since.
            self.max_trials, self.max_units = entry["limits"]
        self.take_in(entry["events"])
        for action in entry.get("actions", []):
            if create := action.get("create"):
                self.study.enqueue_trial(entry["params"][create["tag"]])
                self.trials[create["tag"]] = self.study.ask(self.space)
                self.tags.append(create["tag"])
            elif stop := action.get("stop"):
                self.prune(stop["trial"])
            elif on := action.get("continue"):
                del self.waiting[on["trial"]]
        if "actions" in entry:
            self.answers[entry["call"]] = entry["actions"]

    def answer(self, question):
        """Answers a question. A repeated call gets the same answer as before."""
        events = [event for event in question["events"] if event["order"] > self.last_order]
        call = question["call"]
        if call in self.answers:
            if events:
                self.take_in(events)
                self.write({"events": events})
            return {"call": call, "actions": self.answers[call]}
        limits = [self.max_trials, self.max_units]
        self.take_in(events)
        params = {}
        # The samples of a call do not depend on when the program was started.
        self.study.sampler = optuna.samplers.TPESampler(seed=call)
        actions = self.decide(params)
        entry = {"call": call, "limits": limits, "events": events}
        self.write({**entry, "actions": actions, "params": params})
        self.answers[call] = actions
        return {"call": call, "actions": actions}

    def take_in(self, events):
        for event in events:
            self.last_order = max(self.last_order, event["order"])
            if edited := event.get("edited"):
                self.max_trials, self.max_units = edited["maxTrials"], edited["maxLength"]
                self.concurrency = edited["maxConcurrentTrials"] or self.max_trials
            elif result := event.get("result"):
                self.take_in_result(**result)
            elif closed := event.get("closed"):
                self.fail(closed["trial"])
            elif deleted := event.get("deleted"):
                self.fail(deleted["trial"])
            elif "limitReached" in event:
                for trial in range(len(self.tags)):
                    self.fail(trial)

    def take_in_result(self, trial, tag, units, metric, **_):
        # Later versions of Stoker may add fields.
        if metric is None:
            metric = float("nan")
        self.trials[tag].report(metric, units)
        if units < self.max_units:
            self.waiting[trial] = (tag, units)
        elif metric == metric:
            self.tell(tag, metric)
        else:
            self.tell(tag, state=TrialState.FAIL)

    def tell(self, tag, *value, **state):
        if trial := self.trials.pop(tag, None):
            self.study.tell(trial, *value, **state)

    def fail(self, trial):
        self.waiting.pop(trial, None)
        self.tell(self.tags[trial], state=TrialState.FAIL)

    def prune(self, trial):
        tag, _ = self.waiting.pop(trial)
        self.tell(tag, state=TrialState.PRUNED)

    def decide(self, params):
        """Stops bad trials, lets the others train twice as long, and creates trials."""
        actions = []
        for trial, (tag, units) in list(self.waiting.items()):
            if self.trials[tag].should_prune():
                self.prune(trial)
                actions.append({"stop": {"trial": trial}})
            else:
                del self.waiting[trial]
                units = min(units * 2, self.max_units)
                actions.append({"continue": {"trial": trial, "units": units}})
        while len(self.trials) < self.concurrency and len(self.tags) < self.max_trials:
            trial = self.study.ask(self.space)
            tag = f"optuna-{trial.number}"
            self.trials[tag] = trial
            self.tags.append(tag)
            params[tag] = trial.params
            create = {"hyperparameters": nested(trial.params), "tag": tag}
            actions.append({"create": {**create, "units": max(self.max_units // 4, 1)}})
        return actions

    def write(self, entry):
        with open(self.file, "a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Searches:
    """The searches of all experiments that have asked."""

    def __init__(self, folder):
        self.folder = folder
        self.searches = {}
        os.makedirs(folder, exist_ok=True)

    def answer(self, question):
        name = question["experiment"]
        if name not in self.searches:
            file = os.path.join(self.folder, f"{name}.jsonl")
            self.searches[name] = Search(file, question["spec"])
        try:
            return self.searches[name].answer(question)
        except Exception:
            # The search may be ahead of its file. The next call reads the file again.
            del self.searches[name]
            raise


def listen(searches, port):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["content-length"])
            answer = json.dumps(searches.answer(json.loads(self.rfile.read(length)))).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    HTTPServer(("", port), Handler).serve_forever()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", required=True, help="directory with a file per experiment")
    parser.add_argument("--listen", type=int, metavar="PORT", help="answer HTTP requests")
    arguments = parser.parse_args()
    searches = Searches(arguments.memory)
    if arguments.listen:
        listen(searches, arguments.listen)
    for line in sys.stdin:
        print(json.dumps(searches.answer(json.loads(line))), flush=True)


main()
