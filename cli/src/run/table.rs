//! Table of trials at the end of a run.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;

use serde_json::Value;
use stoker_api::experiment::Searcher;
use stoker_engine::trial::TrialRecord;

use super::display::{MetricRanking, format_metric};
use crate::cluster::text;
use crate::explain::Explained;
use crate::print;

/// Maximum width of the hyperparameters in the table on a terminal, in characters.
const HYPERPARAMETERS_CHARS_MAX: usize = 60;
/// Index of the column for the best result, if there is one.
const BEST_COLUMN: usize = 3;

/// Returns the table of trials. If results of several lengths differ, it has a column for the best
/// one, by which the trials are sorted.
pub(super) fn of_trials(
    trials: &[&TrialRecord],
    explained: &Explained,
    ranking: &MetricRanking<'_>,
    searcher: &Searcher,
) -> String {
    let chars_max = std::io::stdout().is_terminal().then_some(HYPERPARAMETERS_CHARS_MAX);
    table(trials, explained, ranking, position_header(searcher), chars_max)
}

fn table(
    trials: &[&TrialRecord],
    explained: &Explained,
    ranking: &MetricRanking<'_>,
    count: &str,
    chars_max: Option<usize>,
) -> String {
    let metric = ranking.metric.to_uppercase();
    let mut header = vec!["TRIAL", "STATE", &metric, count, "HYPERPARAMETERS", "CHECKPOINT"];
    let has_best = ranking.has_other_best(trials);
    if has_best {
        header.insert(BEST_COLUMN, "BEST");
    }
    let text = |metric: Option<String>| {
        metric.map_or_else(|| "-".to_owned(), |metric| format_metric(&metric))
    };
    let row = |(trial, values): (&&TrialRecord, String)| {
        let latest = trial.status.checkpoints.last();
        let mut cells = vec![
            trial.spec.index.to_string(),
            explained.state(trial).as_str().to_owned(),
            text(ranking.metric_of(trial)),
            trial.status.batches.to_string(),
            chars_max.map_or_else(|| values.clone(), |chars_max| truncate(&values, chars_max)),
            latest.map_or_else(|| "-".to_owned(), |checkpoint| checkpoint.name.clone()),
        ];
        if has_best {
            cells.insert(BEST_COLUMN, text(ranking.best_of(trial)));
        }
        cells
    };
    let rows: Vec<Vec<String>> = trials.iter().zip(differences(trials)).map(row).collect();
    print::table(&header, &rows)
}

/// Returns each trial's hyperparameters without those that are equal in all trials, unless all are.
fn differences(trials: &[&TrialRecord]) -> Vec<String> {
    let of_trials: Vec<Vec<String>> =
        trials.iter().map(|trial| assignments(&trial.spec.hyperparameters)).collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for assignment in of_trials.iter().flatten() {
        *counts.entry(assignment).or_default() += 1;
    }
    let is_constant = |assignment: &str| counts.get(assignment) == Some(&trials.len());
    let shows_all = counts.keys().all(|assignment| is_constant(assignment));
    let line = |all: &Vec<String>| {
        let shown = all.iter().map(String::as_str).filter(|one| shows_all || !is_constant(one));
        shown.collect::<Vec<_>>().join(" ")
    };
    of_trials.iter().map(line).collect()
}

/// Returns the header of the trained lengths: batches, or the program's own count.
pub(crate) fn position_header(searcher: &Searcher) -> &'static str {
    match (searcher.max_length.units, &searcher.time_metric) {
        (Some(_), None) => "UNITS",
        _ => "BATCHES",
    }
}

/// Formats hyperparameters in one line: `a=1 b.c=2`.
pub(crate) fn hyperparameters(value: &Value) -> String {
    assignments(value).join(" ")
}

fn assignments(value: &Value) -> Vec<String> {
    let part = |(path, value): (String, &Value)| format!("{path}={}", text::short_value(value));
    flatten(value).into_iter().map(part).collect()
}

/// Returns each hyperparameter with its path, such as `net.width`.
pub(crate) fn flatten(value: &Value) -> Vec<(String, &Value)> {
    let mut parts = Vec::new();
    flatten_into("", value, &mut parts);
    parts
}

fn flatten_into<'a>(path: &str, value: &'a Value, parts: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                flatten_into(&format!("{path}{dot}{name}"), value, parts);
            }
        }
        other => parts.push((path.to_owned(), other)),
    }
}

pub(crate) fn truncate(text: &str, chars_max: usize) -> String {
    if text.chars().count() <= chars_max {
        return text.to_owned();
    }
    let kept: String = text.chars().take(chars_max - 3).collect();
    format!("{kept}...")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::explain::tests::record;

    #[test]
    fn trial_with_the_best_result_is_first() {
        let (experiment, mut records) = record();
        let value = |x: f64| json!({ "x": x, "batch": 8, "net": { "width": 3 } });
        for (trial, x) in records.iter_mut().zip([0.25, 0.5, 0.75]) {
            trial.spec.hyperparameters = value(x);
        }
        // Trial 1 was promoted with 0.3 at 3 epochs.
        let last = json!([{ "result": { "units": 3, "metric": "0.3" } },
            { "result": { "units": 9, "metric": "0.6" } }]);
        records[1].status.facts = serde_json::from_value(last).unwrap();
        let ranking = MetricRanking { metric: "loss", smaller_is_better: true };
        let mut trials: Vec<&TrialRecord> = records.iter().collect();
        trials.sort_by(|a, b| ranking.compare(a, b));
        let explained = Explained::new(&experiment, &records);
        let text = table(&trials, &explained, &ranking, "BATCHES", Some(4));
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().take(6).collect()).collect();
        assert_eq!(rows[0], ["TRIAL", "STATE", "LOSS", "BEST", "BATCHES", "HYPERPARAMETERS"]);
        let row = |at: usize| (rows[at][0], rows[at][2], rows[at][3], rows[at][5]);
        assert_eq!(row(1), ("1", "0.60000", "0.30000", "x..."), "{text}");
        assert_eq!(row(2), ("2", "0.40000", "0.40000", "x..."), "{text}");
        assert_eq!(row(3), ("0", "0.50000", "0.50000", "x..."), "{text}");
        let one = table(&trials[1..], &explained, &ranking, "BATCHES", None);
        assert!(!one.contains("BEST") && one.contains(" x=0.75 "), "{one}");
        assert_eq!(differences(&trials[..1]), ["batch=8 net.width=3 x=0.5"]);
    }

    #[test]
    fn hyperparameters_are_one_short_line() {
        let value = json!({"lr": 0.1, "net": {"width": 3, "kind": "mlp"}});
        assert_eq!(hyperparameters(&value), "lr=0.1 net.kind=mlp net.width=3");
        assert_eq!(truncate("abcdefgh", 6), "abc...");
    }
}
