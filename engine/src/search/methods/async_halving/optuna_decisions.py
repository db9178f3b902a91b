"""Prints random decisions of Optuna's SuccessiveHalvingPruner, as JSON: pip install optuna==5.0.0.

Each study is {"divisor", "decisions": [[trial, rung, loss, is_pruned], ...]}. Up to eight trials of a
study run at a time, and each reports its next rung in random order. Few different losses, so that
many are equal.
"""

import json
import random

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
source = random.Random(20261123)
RUNGS = 4
studies = []
for number in range(16):
    divisor = 2 + number % 3
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=divisor)
    study = optuna.create_study(pruner=pruner)
    running, decisions = [], []
    while len(decisions) < 300:
        while len(running) < 8:
            running.append((study.ask(), 0))
        place = source.randrange(len(running))
        trial, rung = running.pop(place)
        loss = source.randrange(30)
        trial.report(loss, divisor**rung)
        is_pruned = trial.should_prune()
        decisions.append([trial.number, rung, loss, int(is_pruned)])
        if is_pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif rung + 1 == RUNGS:
            study.tell(trial, loss)
        else:
            running.append((trial, rung + 1))
    studies.append({"divisor": divisor, "decisions": decisions})
print("[\n" + ",\n".join(json.dumps(study, separators=(",", ":")) for study in studies) + "\n]")
