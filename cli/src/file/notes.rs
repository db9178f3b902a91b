//! Notes on files that are valid, but probably do not mean what their author wants.

use serde_json::Value;
use stoker_api::experiment::{Length, Searcher, TpeSearch};
use stoker_api::hyperparameters::{LogRange, Parameter};
use stoker_api::validate::{Method, ValidExperiment};

use super::kinds;

/// Path of the search space.
const ROOT: &str = "hyperparameters";

/// Names of fields in the format of the file.
#[derive(Clone, Copy)]
pub(super) struct Format {
    pub(super) is_legacy: bool,
    /// Whether the method samples hyperparameters.
    pub(super) searches: bool,
}

impl Format {
    /// Returns the name in the format of the file: `legacy` is Determined's.
    fn name(self, ours: &'static str, legacy: &'static str) -> &'static str {
        if self.is_legacy { legacy } else { ours }
    }
}

/// Returns the notes on an experiment. `file` is its file, without defaults, and translated if
/// `is_legacy`.
pub(super) fn notes(valid: &ValidExperiment, file: &Value, is_legacy: bool) -> Vec<String> {
    let searches = !matches!(valid.method, Method::Single);
    let format = Format { is_legacy, searches };
    let mut notes: Vec<String> = note(&valid.method, format).into_iter().collect();
    notes.extend(without_dimension(valid, format));
    notes.extend(only_random_samples(valid));
    notes.extend(without_stops(valid));
    notes.extend(directions(&valid.spec.searcher, &file["spec"]["searcher"], format));
    kinds::notes(ROOT, &valid.space, format, &mut notes);
    valid.space.for_each_parameter(&mut |path, parameter| {
        if let Parameter::Log(range) = parameter {
            notes.extend(values_as_exponents(path, range, format));
        }
    });
    let spec = &valid.spec;
    let validation = format.name("minValidationPeriod", "min_validation_period");
    let checkpoint = format.name("minCheckpointPeriod", "min_checkpoint_period");
    for (field, period) in
        [(validation, spec.min_validation_period), (checkpoint, spec.min_checkpoint_period)]
    {
        notes.extend(period.and_then(|period| long_period(valid, field, &period)));
    }
    notes
}

/// Returns a note for each metric whose name suggests that larger is better, if the file leaves
/// the direction to the default. The names are the same as for `EarlyStopping` of the trainer.
fn directions(searcher: &Searcher, file: &Value, format: Format) -> Vec<String> {
    let note = |metric: &str, field: &str| {
        format!(
            "note: a smaller `{metric}` is better, because {field} is unset; set it to false if \
             larger is better, else to true"
        )
    };
    let is_noted = |metric: &str, file: &Value| {
        file["smallerIsBetter"].is_null()
            && ["acc", "accuracy", "auc"].iter().any(|end| metric.ends_with(end))
    };
    let mut notes = vec![];
    if is_noted(&searcher.metric, file) {
        let field = format.name("searcher.smallerIsBetter", "searcher.smaller_is_better");
        notes.push(note(&searcher.metric, field));
    }
    for (i, objective) in searcher.objectives.iter().enumerate().skip(1) {
        if is_noted(&objective.metric, &file["objectives"][i]) {
            let field = format!("searcher.objectives[{i}].smallerIsBetter");
            notes.push(note(&objective.metric, &field));
        }
    }
    notes
}

/// Returns the number of trials of a method that samples them; `None` if the method determines it.
fn num_sampled(method: &Method) -> Option<u32> {
    match method {
        Method::Random { max_trials, .. } => Some(*max_trials),
        Method::Tpe(search) => Some(search.max_trials),
        Method::Sobol(search) => Some(search.max_trials),
        Method::AsyncHalving(search) => Some(search.max_trials),
        Method::AdaptiveAsha(search) => Some(search.max_trials),
        _ => None,
    }
}

/// Returns a note if all trials of a search have the same hyperparameters. A list may be meant as
/// values to search over.
fn without_dimension(valid: &ValidExperiment, format: Format) -> Option<String> {
    let num_trials = num_sampled(&valid.method).filter(|num| *num > 1)?;
    if valid.space.num_dimensions() > 0 {
        return None;
    }
    let mut list = None;
    valid.space.for_each_parameter(&mut |path, parameter| {
        if let Parameter::Const(value @ Value::Array(_)) = parameter {
            list.get_or_insert_with(|| (path.to_owned(), value.to_string()));
        }
    });
    let (path, values) = list.unwrap_or_else(|| (ROOT.to_owned(), "LIST".to_owned()));
    let path = path.strip_prefix("spec.").unwrap_or(&path);
    let form = match format.is_legacy {
        true => format!("{{type: categorical, vals: {values}}}"),
        false => format!("categorical: {values}"),
    };
    Some(format!(
        "note: all {num_trials} trials have the same hyperparameters, because none varies; to \
         search over values in {path}, write `{form}`"
    ))
}

/// Returns a note if the bounds of a `log` parameter are probably values, not exponents.
fn values_as_exponents(path: &str, range: &LogRange, format: Format) -> Option<String> {
    let LogRange { base, min, max, .. } = *range;
    let is_noted = base > 1.0 && min > 0.0 && max < 1.0;
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    let (smallest, largest) = (format.name("min", "minval"), format.name("max", "maxval"));
    is_noted.then(|| {
        format!(
            "note: {}{} samples from {} to {}, because {smallest} and {largest} are exponents; for \
             values from {min} to {max}, write {smallest}: {}, {largest}: {}",
            path.strip_prefix("spec.").unwrap_or(path),
            format.name(".log", ""),
            rounded(base.powf(min)),
            rounded(base.powf(max)),
            rounded(min.log(base)),
            rounded(max.log(base)),
        )
    })
}

/// Returns a note if an interval is longer than a trial.
fn long_period(valid: &ValidExperiment, field: &str, period: &Length) -> Option<String> {
    let (unit, units) = period.get()?;
    let is_noted = unit == valid.unit && units > valid.units_max;
    is_noted.then(|| {
        format!(
            "note: {field} of {units} {} has no effect, because a trial trains for at most {}",
            unit.plural(),
            valid.units_max
        )
    })
}

/// Returns the note on a search method, if there is one.
fn note(method: &Method, format: Format) -> Option<String> {
    match method {
        Method::AsyncHalving(search) => {
            let num_required = search.divisor.saturating_pow(search.num_rungs.saturating_sub(1));
            // With `stopOnce`, the best trial of a rung always continues.
            let is_short = !search.stop_once && search.max_trials < num_required;
            is_short.then(|| {
                format!(
                    "note: {} is {}, so few or no trials are promoted to {}; use {num_required} \
                     trials or more, or fewer rungs than {}",
                    format.name("asyncHalving.maxTrials", "searcher.max_trials"),
                    search.max_trials,
                    format.name("maxLength", "max_length"),
                    search.num_rungs
                )
            })
        }
        Method::Pbt { search, .. } => {
            let is_without = search.num_rounds > 1 && search.num_truncated() == 0;
            is_without.then(|| {
                format!(
                    "note: {} of {} is less than one of {} trials, so no trial is replaced by a \
                     copy; raise it, or {}",
                    format.name(
                        "pbt.truncateFraction",
                        "searcher.replace_function.truncate_fraction"
                    ),
                    search.truncate_fraction,
                    search.population_size,
                    format.name("pbt.populationSize", "searcher.population_size")
                )
            })
        }
        _ => None,
    }
}

/// Returns a note if TPE creates all trials before it has the ten results that it learns from.
fn only_random_samples(valid: &ValidExperiment) -> Option<String> {
    let Method::Tpe(search) = &valid.method else { return None };
    let TpeSearch { max_trials, max_concurrent_trials: num_places, .. } = *search;
    // Each of the first nine results is followed by another random trial.
    let is_random = num_places == 0 || max_trials <= num_places.saturating_add(9);
    let is_noted = is_random && valid.spec.searcher.prior_trials.is_none();
    is_noted.then(|| match max_trials {
        ..=10 => "note: all trials are random samples, because tpe learns from ten results; raise \
                  tpe.maxTrials"
            .to_owned(),
        _ => format!(
            "note: all {max_trials} trials are random samples, because tpe learns from ten results \
             and tpe.maxConcurrentTrials is {num_places}; set it to the number of trials that can \
             train at the same time, or raise tpe.maxTrials"
        ),
    })
}

/// Returns a note if median stopping can never stop a trial.
fn without_stops(valid: &ValidExperiment) -> Option<String> {
    let rule = valid.spec.searcher.median_stopping?;
    let (every, min_trials) = (rule.every_units.max(1), rule.min_trials.max(1));
    let first = rule.start_units.div_ceil(every).max(1).saturating_mul(every);
    let why = match num_sampled(&valid.method) {
        _ if first >= valid.units_max => format!(
            "its first comparison is at {first} {}, and a trial trains for at most {}; lower \
             everyUnits or startUnits",
            valid.unit.plural(),
            valid.units_max
        ),
        Some(num_trials) if num_trials <= min_trials => format!(
            "it compares a trial with at least {min_trials} others, and maxTrials is {num_trials}; \
             raise maxTrials or lower minTrials"
        ),
        _ => return None,
    };
    Some(format!("note: searcher.medianStopping never stops a trial, because {why}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::file::metadata::Target;
    use crate::file::parse;

    /// Returns the note on a search of 64 epochs.
    fn note_on(method: &str, fields: Value) -> Option<String> {
        let spec = json!({
            "entrypoint": { "command": ["train"] },
            "hyperparameters": { "x": { "categorical": [1, 2] } },
            "searcher": { "metric": "loss", "maxLength": { "epochs": 64 }, method: fields },
        });
        let file = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": { "name": "a" }, "spec": spec,
        });
        parse(&file.to_string(), "a", &[], Target::Local).unwrap().notes.pop()
    }

    #[test]
    fn too_few_trials_for_the_last_rung_are_noted() {
        let note = |max_trials: u32, stop_once: bool| {
            let halving = json!({
                "maxTrials": max_trials, "numRungs": 4, "divisor": 4, "stopOnce": stop_once,
            });
            note_on("asyncHalving", halving)
        };
        assert!(note(63, false).unwrap().contains("use 64 trials or more"));
        assert_eq!(note(64, false), None);
        assert_eq!(note(1, true), None);
        assert_eq!(note_on("single", json!({})), None);
    }

    #[test]
    fn tpe_with_only_random_samples_is_noted() {
        let note = |max_trials: u32, max_concurrent: u32| {
            let tpe = json!({ "maxTrials": max_trials, "maxConcurrentTrials": max_concurrent });
            note_on("tpe", tpe)
        };
        assert!(note(25, 16).unwrap().contains("all 25 trials are random"));
        assert_eq!(note(26, 16), None);
        assert!(note(100, 0).is_some());
        assert_eq!(note(20, 4), None);
        // Fewer places would not help.
        assert!(note(1, 16).unwrap().ends_with("ten results; raise tpe.maxTrials"));
    }

    #[test]
    fn median_stopping_without_effect_is_noted() {
        let note = |max_trials: u32, rule: Value| {
            let searcher = json!({
                "metric": "loss", "maxLength": { "epochs": 20 },
                "random": { "maxTrials": max_trials }, "medianStopping": rule,
            });
            let space = json!({ "x": { "categorical": [1, 2] } });
            notes_on(&json!({ "hyperparameters": space, "searcher": searcher })).pop()
        };
        let at_20 = "first comparison is at 20 epochs, and a trial trains for at most 20";
        assert!(note(9, json!({ "everyUnits": 20 })).unwrap().contains(at_20));
        let late = json!({ "everyUnits": 6, "startUnits": 19 });
        assert!(note(9, late).unwrap().contains("is at 24 epochs"));
        let few = json!({ "everyUnits": 5, "minTrials": 3 });
        assert!(note(3, few.clone()).unwrap().contains("at least 3 others, and maxTrials is 3"));
        assert_eq!(note(4, few), None);
    }

    #[test]
    fn population_without_copies_is_noted() {
        let note = |population_size: u32, num_rounds: u32| {
            let length = json!({ "epochs": 64 / num_rounds });
            let pbt = json!({
                "populationSize": population_size, "numRounds": num_rounds,
                "lengthPerRound": length,
            });
            note_on("pbt", pbt)
        };
        assert!(note(4, 2).unwrap().contains("truncateFraction of 0.2 is less than one of 4"));
        assert_eq!(note(5, 2), None);
        assert_eq!(note(4, 1), None);
    }

    /// Returns all notes on a spec, of which `fields` replaces some fields.
    fn notes_on(fields: &Value) -> Vec<String> {
        let mut spec = json!({
            "entrypoint": { "command": ["train"] },
            "searcher": { "metric": "loss", "maxLength": { "epochs": 20 }, "single": {} },
        });
        for (name, value) in fields.as_object().unwrap() {
            spec[name] = value.clone();
        }
        let file = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": { "name": "a" }, "spec": spec,
        });
        parse(&file.to_string(), "a", &[], Target::Local).unwrap().notes
    }

    #[test]
    fn metrics_that_should_be_large_are_noted() {
        let note = |fields: Value| {
            let mut searcher = json!({ "maxLength": { "epochs": 20 }, "single": {} });
            for (name, value) in fields.as_object().unwrap() {
                searcher[name] = value.clone();
            }
            notes_on(&json!({ "searcher": searcher })).pop()
        };
        for metric in ["validation_accuracy", "acc", "val_auc"] {
            let text = note(json!({ "metric": metric })).unwrap();
            assert!(text.contains("searcher.smallerIsBetter is unset"), "{text}");
            for smaller in [true, false] {
                assert_eq!(note(json!({ "metric": metric, "smallerIsBetter": smaller })), None);
            }
        }
        assert_eq!(note(json!({ "metric": "accuracy_loss" })), None);
        let objectives = json!([{ "metric": "loss" }, { "metric": "accuracy" }]);
        let text = note(json!({ "metric": "loss", "objectives": objectives })).unwrap();
        assert!(text.contains("searcher.objectives[1].smallerIsBetter is unset"), "{text}");
    }

    #[test]
    fn search_spaces_of_other_tools_are_noted() {
        let note = |space: Value| notes_on(&json!({ "hyperparameters": { "x": space } })).pop();
        let expected = "note: hyperparameters.x.log samples from 1.002 to 1.259, because min and \
                        max are exponents; for values from 0.001 to 0.1, write min: -3, max: -1";
        let log = json!({ "log": { "min": 0.001, "max": 0.1 } });
        assert_eq!(note(log).as_deref(), Some(expected));
        let expected = "note: hyperparameters.x.choice is a constant; to search over \
                        hyperparameters.x, write `categorical` instead of `choice`";
        assert_eq!(note(json!({ "choice": [8, 16] })).as_deref(), Some(expected));
        let uniform = json!({ "oneOf": [{ "rate": { "uniform": { "min": 0, "max": 1 } } }, {}] });
        assert!(note(uniform).unwrap().contains("x.oneOf[0].rate.uniform is a constant"));
        for (space, form) in [
            (json!({ "range": [0, 1] }), "write `int: {min: MIN, max: MAX}` instead of `range`"),
            (json!({ "uniform": [0.1, 0.9] }), "write `double: {min: MIN, max: MAX}` instead"),
            (json!({ "loguniform": [1, 2] }), "instead of `loguniform`; MIN and MAX are exponents"),
        ] {
            let text = note(space).unwrap();
            assert!(text.contains(form), "{text}");
        }
        for space in [
            json!({ "log": { "min": -3, "max": -1 } }),
            json!({ "log": { "min": 0.5, "max": 2 } }),
            json!({ "choice": "best" }),
            json!({ "choice": { "a": 1 } }),
            json!({ "choice": [] }),
            json!({ "values": { "int": { "min": 1, "max": 2 } } }),
            json!({ "choice": [8, 16], "other": 1 }),
            json!({ "oneOf": [{ "choice": [8, 16] }, { "x": 1 }] }),
            json!({ "type": "relu", "minval": 4, "maxval": 9 }),
            json!({ "type": "int", "size": 9 }),
            json!([8, 16]),
        ] {
            assert_eq!(note(space.clone()), None, "{space}");
        }
    }

    #[test]
    fn distributions_in_the_form_of_determined_are_noted() {
        for (space, form) in [
            (json!({ "type": "int", "minval": 4, "maxval": 9 }), "int: {min: 4, max: 9}"),
            (
                json!({ "type": "log", "base": 2, "minval": 4, "maxval": 9, "count": 3 }),
                "log: {min: 4, max: 9, base: 2, count: 3}",
            ),
            (json!({ "type": "categorical", "vals": [4, 8] }), "categorical: [4,8]"),
        ] {
            let expected = format!(
                "note: hyperparameters.x is a group of constants; to search over it, write `{form}`"
            );
            let notes = notes_on(&json!({ "hyperparameters": { "x": space } }));
            assert_eq!(notes, [expected]);
        }
    }

    #[test]
    fn searches_in_which_nothing_varies_are_noted() {
        let note = |space: Value, max_trials: u32| {
            let searcher = json!({
                "metric": "loss", "maxLength": { "epochs": 20 },
                "random": { "maxTrials": max_trials },
            });
            let fields = json!({ "hyperparameters": { "x": space }, "searcher": searcher });
            notes_on(&fields).pop()
        };
        let expected = "note: all 2 trials have the same hyperparameters, because none varies; to \
                        search over values in hyperparameters.x, write `categorical: [4,8]`";
        assert_eq!(note(json!([4, 8]), 2).as_deref(), Some(expected));
        assert!(note(json!(4), 2).unwrap().contains("in hyperparameters, write"));
        assert_eq!(note(json!(4), 1), None);
        assert_eq!(note(json!({ "categorical": [4, 8] }), 2), None);
    }

    #[test]
    fn notes_on_determined_files_use_their_names() {
        let file = json!({
            "name": "a",
            "entrypoint": "train.sh",
            "hyperparameters": {
                "batch": { "choice": [8, 16] },
                "depth": { "range": [1, 3] },
                "rate": { "type": "log", "base": 10, "minval": 0.001, "maxval": 0.1 },
            },
            "searcher": {
                "name": "async_halving", "metric": "accuracy", "max_length": { "batches": 900 },
                "max_trials": 3, "num_rungs": 4, "divisor": 4,
            },
            "min_validation_period": { "batches": 1000 },
        });
        let loaded = parse(&file.to_string(), "a", &[], Target::Local).unwrap();
        let notes: Vec<_> =
            loaded.notes.iter().filter(|note| note.starts_with("note: ")).cloned().collect();
        let notes = notes.join("\n");
        for words in [
            "searcher.max_trials is 3",
            "searcher.smaller_is_better is unset",
            "write `{type: categorical, vals: LIST}` instead of `{choice: VALUE}`",
            "write `{type: int, minval: MIN, maxval: MAX}`",
            "hyperparameters.rate samples from",
            "write minval: -3, maxval: -1",
            "min_validation_period of 1000 batches",
        ] {
            assert!(notes.contains(words), "{words}\n{notes}");
        }
        for name in ["smallerIsBetter", "maxTrials", "maxLength", "minValidationPeriod", ".log"] {
            assert!(!notes.contains(name), "{name}\n{notes}");
        }
    }

    #[test]
    fn periods_longer_than_trials_are_noted() {
        for field in ["minValidationPeriod", "minCheckpointPeriod"] {
            let note = |period: Value| notes_on(&json!({ field: period })).pop();
            let expected = format!(
                "note: {field} of 21 epochs has no effect, because a trial trains for at most 20"
            );
            assert_eq!(note(json!({ "epochs": 21 })), Some(expected));
            assert_eq!(note(json!({ "epochs": 20 })), None);
            assert_eq!(note(json!({ "batches": 500 })), None);
        }
    }
}
