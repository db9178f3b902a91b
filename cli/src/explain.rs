//! Explanations of searches, for `stoker experiment describe` and `stoker trial describe`.

use serde_json::{Value, json};
use stoker_api::experiment::{Experiment, Unit};
use stoker_engine::experiment::explain::{
    Decision, DisplayState, Explanation, TrialExplanation, metric,
};
use stoker_engine::experiment::{Ledger, Record, validate_recorded};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::TrialRecord;
use stoker_engine::trial::config::experiment_seed;

use crate::cluster::text::section;

/// Explanation of an experiment, or the reason why there is none.
pub(crate) struct Explained {
    unit: Unit,
    has_runner: bool,
    explanation: Result<Explanation, String>,
}

impl Explained {
    /// Explains a search from its record.
    pub(crate) fn new<'a>(
        experiment: &Experiment,
        trials: impl IntoIterator<Item = &'a TrialRecord>,
    ) -> Self {
        let unit = experiment.spec.searcher.length().map(|(unit, _)| unit);
        let mut explanation = explain(experiment, trials);
        let has_ended = experiment.status.as_ref().is_some_and(|status| status.phase.is_terminal());
        if let (Ok(explanation), true) = (&mut explanation, has_ended) {
            explanation.close();
        }
        Self { unit: unit.unwrap_or(Unit::Batches), has_runner: true, explanation }
    }

    /// Sets whether a runner works on the experiment. By default, one does.
    pub(crate) fn with_runner(self, has_runner: bool) -> Self {
        Self { has_runner, ..self }
    }

    /// Returns an explanation that is not available for this reason.
    pub(crate) fn unavailable(reason: String) -> Self {
        Self { unit: Unit::Batches, has_runner: true, explanation: Err(reason) }
    }

    /// Returns the tables of brackets and rungs. Empty before the search has begun.
    pub(crate) fn search_sections(&self) -> String {
        match &self.explanation {
            Ok(explanation) if explanation.trials.is_empty() => String::new(),
            Ok(explanation) => brackets(explanation) + &rungs(explanation, self.unit),
            Err(reason) => format!("\n\nDecisions: {reason}"),
        }
    }

    /// Returns the table of rungs. Empty if the method has none.
    pub(crate) fn rungs_section(&self) -> String {
        let rungs = |explanation| rungs(explanation, self.unit);
        self.explanation.as_ref().map(rungs).unwrap_or_default()
    }

    /// Returns the state of a trial.
    pub(crate) fn state(&self, trial: &TrialRecord) -> DisplayState {
        let state = self.trial(trial.spec.index).map(TrialExplanation::state);
        DisplayState::of(trial, state, self.has_runner)
    }

    /// Returns the reason for the state of a trial.
    pub(crate) fn why(&self, trial: u32) -> Option<String> {
        self.trial(trial).map(TrialExplanation::reason)
    }

    /// Returns the table of a trial's decisions.
    pub(crate) fn trial_section(&self, trial: u32) -> String {
        match (&self.explanation, self.trial(trial)) {
            (Err(reason), _) => format!("\n\nDecisions: {reason}"),
            (Ok(_), None) => String::new(),
            (Ok(_), Some(trial)) => {
                let rows: Vec<Vec<String>> = trial.decisions.iter().map(row).collect();
                section("Decisions", &["ORDER", "TIME", "DECISION"], &rows)
            }
        }
    }

    /// Adds the explanation to the JSON of an experiment.
    pub(crate) fn add_to_experiment(&self, mut object: Value) -> Value {
        object["explanation"] = match &self.explanation {
            Ok(explanation) => explanation.to_json(),
            Err(reason) => json!({ "error": reason }),
        };
        object
    }

    /// Adds the explanation to the JSON of a trial.
    pub(crate) fn add_to_trial(&self, trial: u32, mut object: Value) -> Value {
        object["explanation"] = match (&self.explanation, self.trial(trial)) {
            (Err(reason), _) => json!({ "error": reason }),
            (Ok(_), None) => json!({ "error": "no decision about the trial is recorded" }),
            (Ok(_), Some(trial)) => trial.to_json(),
        };
        object
    }

    fn trial(&self, trial: u32) -> Option<&TrialExplanation> {
        self.explanation.as_ref().ok()?.trials.get(trial as usize)
    }
}

/// Returns the search of an experiment, or the reason why it is not valid.
pub(crate) fn config(experiment: &Experiment) -> Result<SearchConfig, String> {
    let Experiment { metadata, spec, status, .. } = experiment;
    let name = metadata.name.as_deref().unwrap_or_default();
    let valid = validate_recorded(name, spec, status.as_ref()).map_err(|errors| {
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        format!("cannot explain an invalid experiment: {}", errors.join("; "))
    })?;
    let uid = metadata.uid.as_deref().unwrap_or_default();
    Ok(SearchConfig::new(&valid, experiment_seed(&valid, uid)))
}

fn explain<'a>(
    experiment: &Experiment,
    trials: impl IntoIterator<Item = &'a TrialRecord>,
) -> Result<Explanation, String> {
    let config = config(experiment)?;
    let status = experiment.status.clone().unwrap_or_default();
    let trials = trials.into_iter().map(|record| (record.spec.index, record)).collect();
    let record =
        Record { log: &status.log, trials: &trials, trials_created: status.trials_created };
    Ledger::explain(&config, record).map_err(|error| format!("cannot read the record: {error}"))
}

fn row(decision: &Decision) -> Vec<String> {
    let time = decision.at.map_or_else(|| "-".to_owned(), |at| at.to_string());
    vec![decision.order.to_string(), time, decision.to_string()]
}

fn brackets(explanation: &Explanation) -> String {
    let rows: Vec<Vec<String>> = explanation
        .brackets
        .iter()
        .map(|bracket| {
            let of = bracket.created + bracket.remaining;
            let places = bracket.places.map_or_else(|| "-".to_owned(), |num| num.to_string());
            vec![
                bracket.bracket.to_string(),
                format!("{} of {of}", bracket.created),
                bracket.training.to_string(),
                (bracket.paused + bracket.waiting).to_string(),
                bracket.promotions.to_string(),
                bracket.stopped.to_string(),
                bracket.completed.to_string(),
                bracket.ended.to_string(),
                places,
                bracket.next.to_string(),
            ]
        })
        .collect();
    let header = [
        "BRACKET",
        "TRIALS",
        "TRAINING",
        "PAUSED",
        "PROMOTIONS",
        "STOPPED",
        "COMPLETED",
        "OTHERS",
        "PLACES",
        "NEXT",
    ];
    section("Brackets", &header, &rows)
}

fn rungs(explanation: &Explanation, unit: Unit) -> String {
    let unit = unit.plural().to_uppercase();
    let value = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |_| metric(value));
    let rows: Vec<Vec<String>> = explanation
        .brackets
        .iter()
        .flat_map(|bracket| {
            bracket.rungs.iter().map(|rung| {
                vec![
                    bracket.bracket.to_string(),
                    rung.units.to_string(),
                    rung.training.to_string(),
                    rung.results.to_string(),
                    rung.promoted.to_string(),
                    rung.paused.to_string(),
                    rung.ended.to_string(),
                    value(rung.cut_metric),
                    value(rung.best_metric),
                    rung.next.to_string(),
                ]
            })
        })
        .collect();
    let header = [
        "BRACKET", &unit, "TRAINING", "RESULTS", "PROMOTED", "PAUSED", "ENDED", "CUT-OFF", "BEST",
        "NEXT",
    ];
    section("Rungs", &header, &rows)
}

#[cfg(test)]
pub(crate) mod tests {
    use stoker_api::validate::validate_started;
    use stoker_engine::experiment::{Write, append};

    use super::*;

    /// Returns an experiment whose search has taken in one result of each of three trials.
    pub(crate) fn record() -> (Experiment, Vec<TrialRecord>) {
        let mut experiment: Experiment = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": { "name": "mnist", "namespace": "ml", "uid": "0b3f9c1e-77aa" },
            "spec": {
                "entrypoint": { "command": ["true"] },
                "hyperparameters": { "x": { "double": { "min": 0, "max": 1 } } },
                "searcher": {
                    "metric": "loss", "maxLength": { "epochs": 9 },
                    "asyncHalving": {
                        "maxTrials": 5, "numRungs": 2, "divisor": 3, "maxConcurrentTrials": 1,
                    },
                },
            },
            "status": {},
        }))
        .unwrap();
        let valid = validate_started("mnist", &experiment.spec).unwrap();
        let config = SearchConfig::new(&valid, experiment_seed(&valid, "0b3f9c1e-77aa"));
        let empty = Record { log: &[], trials: &Default::default(), trials_created: 0 };
        let mut ledger = Ledger::rebuild(&config, empty).unwrap().0;
        let mut trials: Vec<TrialRecord> = vec![];
        let mut writes = ledger.begin("1", vec![], "2026-11-21T19:00:00Z".parse().unwrap());
        for value in ["0.5", "0.3", "0.4", ""] {
            for write in std::mem::take(&mut writes) {
                match write {
                    Write::Log(entry) => {
                        append(&mut experiment.status.as_mut().unwrap().log, entry)
                    }
                    Write::Pin { .. } => {}
                    Write::Grant { trial, grant } => {
                        trials[trial as usize].spec.grants.push(grant);
                    }
                }
            }
            let missing: Vec<_> = ledger.missing().cloned().collect();
            for spec in missing {
                ledger.created(spec.index);
                trials.push(TrialRecord { spec, status: Default::default() });
            }
            if let Some(trial) = trials.last_mut().filter(|_| !value.is_empty()) {
                let result = json!({ "result": {
                    "units": 3, "metric": value, "at": "2026-11-21T19:05:00Z",
                } });
                trial.status.facts.push(serde_json::from_value(result).unwrap());
                let pending = ledger.pending(&trials);
                writes = ledger.advance(&pending[0]);
            }
        }
        (experiment, trials)
    }

    #[test]
    fn description_explains_brackets_rungs_and_decisions() {
        let (experiment, trials) = record();
        let explained = Explained::new(&experiment, &trials);
        let text = explained.search_sections();
        let expected = "

Brackets:
  BRACKET  TRIALS  TRAINING  PAUSED  PROMOTIONS  STOPPED  COMPLETED  OTHERS  PLACES  NEXT
  0        3 of 5  1         2       1           0        0          0       1       \
creates a trial when a place is free, 2 are left

Rungs:
  BRACKET  EPOCHS  TRAINING  RESULTS  PROMOTED  PAUSED  ENDED  CUT-OFF  BEST  NEXT
  0        3       0         3        1         2       0      0.3      0.3   \
promotes the next result below 0.3
  0        9       1         0        0         0       0      -        -     last rung";
        assert_eq!(text, expected);
        let expected = "

Decisions:
  ORDER  TIME                  DECISION
  2      2026-11-21T19:05:00Z  created because a place was free and no trial could be promoted; \
trains to 3 epochs
  3      2026-11-21T19:05:00Z  paused at 3 epochs: 0.4 ranks 2nd of 3 results, and the best one \
continues (it has 0.3)";
        assert_eq!(explained.trial_section(2), expected);
        let why = "promoted to 9 epochs: 0.3 ranks 1st of 3 results at 3 epochs, and the best one \
                   continues";
        assert_eq!(explained.why(1).unwrap(), why);
    }

    #[test]
    fn invalid_edit_does_not_hide_the_explanation() {
        let (mut experiment, trials) = record();
        let before = Explained::new(&experiment, &trials).search_sections();
        experiment.spec.searcher.async_halving.as_mut().unwrap().max_trials = 0;
        assert_eq!(Explained::new(&experiment, &trials).search_sections(), before);
    }

    #[test]
    fn json_contains_the_explanation() {
        let (experiment, trials) = record();
        let explained = Explained::new(&experiment, &trials);
        let object = explained.add_to_experiment(json!(experiment));
        assert_eq!(object["metadata"]["name"], "mnist");
        assert_eq!(object["explanation"]["brackets"][0]["next"]["action"], "creates");
        assert_eq!(object["explanation"]["trials"][2]["state"], "paused");
        let object = explained.add_to_trial(2, json!({}));
        assert_eq!(object["explanation"]["decisions"][1]["comparison"]["rank"], 2);
    }

    #[test]
    fn missing_explanation_names_its_reason() {
        let (mut experiment, trials) = record();
        experiment.status.as_mut().unwrap().log.clear();
        let explained = Explained::new(&experiment, &trials);
        let text = explained.trial_section(0);
        assert!(
            text.starts_with("\n\nDecisions: cannot read the record: the experiment"),
            "{text}"
        );
        assert_eq!(explained.why(0), None);
        let error = explained.add_to_trial(0, json!({}))["explanation"]["error"].to_string();
        assert!(error.contains("status.log"), "{error}");
    }
}
