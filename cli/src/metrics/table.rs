//! Tables of curves: all metrics of a trial, or one metric of all trials.

use std::collections::BTreeMap;

use stoker_api::experiment::Searcher;
use stoker_storage::metrics::Row;

use super::curve::Curve;
use super::filter::smaller_is_better;
use crate::print;

/// Group that the table of an experiment prefers: searches compare validations.
const VALIDATION: &str = "validation";

/// Curves of trials.
#[derive(Debug, Default)]
pub(super) struct Curves(BTreeMap<Key, Curve>);

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Key {
    trial: u32,
    group: String,
    metric: String,
    /// Number of the attempt, if each attempt has its own curve.
    attempt: Option<u32>,
}

impl Curves {
    /// Adds rows of a trial, which are sorted by batches within each attempt.
    pub(super) fn add(&mut self, trial: u32, by_attempt: bool, rows: Vec<Row>) {
        for row in rows {
            let attempt = by_attempt.then_some(row.attempt);
            for (metric, value) in row.metrics {
                let key = Key { trial, group: row.group.clone(), metric, attempt };
                self.0.entry(key).or_default().push(row.batches, value);
            }
        }
    }

    /// Returns whether each attempt has its own curve.
    fn is_by_attempt(&self) -> bool {
        self.0.keys().any(|key| key.attempt.is_some())
    }
}

/// Returns the table of all metrics of a trial.
pub(super) fn of_trial(curves: &Curves, searcher: &Searcher) -> String {
    let mut header = vec!["GROUP", "METRIC", "POINTS", "FIRST", "BEST", "LAST", "CURVE"];
    let rows: Vec<Vec<String>> = curves
        .0
        .iter()
        .map(|(key, curve)| {
            let mut cells = vec![
                key.group.clone(),
                key.metric.clone(),
                curve.points(),
                curve.first(),
                curve.best(smaller_is_better(searcher, &key.metric)),
                curve.last(),
                curve.sparkline(),
            ];
            cells.splice(2..2, key.attempt.map(|attempt| attempt.to_string()));
            cells
        })
        .collect();
    if curves.is_by_attempt() {
        header.insert(2, "ATTEMPT");
    }
    print::table(&header, &rows)
}

/// Returns the table of one metric of all trials, best first. Of several groups with the metric,
/// shows the validation, or else the first one.
pub(super) fn of_experiment(curves: &Curves, trials: &[u32], searcher: &Searcher) -> String {
    let names = || curves.0.keys().map(|key| (key.group.as_str(), key.metric.as_str()));
    let Some((group, metric)) = names().min_by_key(|name| (name.0 != VALIDATION, *name)) else {
        return String::new();
    };
    let direction = smaller_is_better(searcher, metric);
    let is_shown = |key: &Key| key.group == group && key.metric == metric;
    let mut shown: Vec<(&Key, &Curve)> = curves.0.iter().filter(|(key, _)| is_shown(key)).collect();
    shown.sort_by(|(_, one), (_, other)| {
        let [one, other] = [one, other].map(|curve| sort_key(curve, direction));
        // A stable sort: equal curves stay in the order of trials and attempts.
        one.total_cmp(&other)
    });
    let is_by_attempt = curves.is_by_attempt();
    let mut rows: Vec<Vec<String>> = shown
        .iter()
        .map(|(key, curve)| {
            let mut cells = vec![
                key.trial.to_string(),
                curve.points(),
                curve.batches.to_string(),
                curve.first(),
                curve.best(direction),
                curve.last(),
                curve.sparkline(),
            ];
            cells.splice(1..1, key.attempt.map(|attempt| attempt.to_string()));
            cells
        })
        .collect();
    let mut header = vec!["TRIAL", "POINTS", "BATCHES", "FIRST", "BEST", "LAST", "CURVE"];
    if is_by_attempt {
        header.insert(1, "ATTEMPT");
    }
    let without = trials.iter().filter(|trial| shown.iter().all(|(key, _)| key.trial != **trial));
    rows.extend(without.map(|trial| {
        let mut cells = vec!["-".to_owned(); header.len() - 1];
        cells[0] = trial.to_string();
        cells[usize::from(is_by_attempt) + 1] = "0".to_owned();
        cells
    }));
    let order = match direction {
        Some(true) => "smaller is better",
        Some(false) => "greater is better",
        None => "in order of the trials",
    };
    format!("{metric} in {group}, {order}\n\n{}", print::table(&header, &rows))
}

/// Returns a sort key: smaller for a better curve, equal if the direction is unknown.
fn sort_key(curve: &Curve, smaller_is_better: Option<bool>) -> f64 {
    let Some(smaller_is_better) = smaller_is_better else { return 0.0 };
    match curve.best_value(smaller_is_better) {
        Some(best) if smaller_is_better => best,
        Some(best) => -best,
        None => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn searcher(metric: &str, smaller_is_better: bool) -> Searcher {
        serde_json::from_value(serde_json::json!({
            "metric": metric, "smallerIsBetter": smaller_is_better,
            "maxLength": {"batches": 1}, "single": {},
        }))
        .unwrap()
    }

    /// Values of one attempt and group, with this metric after 10, 20, ... batches.
    fn rows(attempt: u32, group: &str, metric: &str, values: &[f64]) -> Vec<Row> {
        let row = |(batches, value): (u64, &f64)| Row {
            group: group.to_owned(),
            batches,
            epoch: 0,
            attempt,
            time: None,
            metrics: [(metric.to_owned(), *value)].into(),
        };
        (10..).step_by(10).zip(values).map(row).collect()
    }

    #[track_caller]
    fn check(table: &str, expected: &[&str]) {
        assert_eq!(table.lines().collect::<Vec<_>>(), expected, "\n{table}");
    }

    #[test]
    fn trial_table_lists_metrics_of_each_group() {
        let mut curves = Curves::default();
        curves.add(0, false, rows(0, "training", "loss", &[1.0, 0.5, 0.75]));
        curves.add(0, false, rows(0, "training", "learning_rate", &[0.1, 0.2, f64::NAN]));
        curves.add(0, false, rows(0, "validation", "validation_loss", &[0.625]));
        check(
            &of_trial(&curves, &searcher("val_loss", true)),
            &[
                "GROUP       METRIC           POINTS            FIRST  BEST        LAST   CURVE",
                "training    learning_rate    3 (1 not finite)  0.1    0.1 to 0.2  NaN    ▁█",
                "training    loss             3                 1      0.5         0.75   █▁▅",
                "validation  validation_loss  1                 0.625  0.625       0.625  ▄",
            ],
        );
        let mut curves = Curves::default();
        curves.add(0, true, rows(0, "training", "loss", &[1.0, 0.5]));
        curves.add(0, true, rows(1, "training", "loss", &[0.75]));
        check(
            &of_trial(&curves, &searcher("loss", true)),
            &[
                "GROUP     METRIC  ATTEMPT  POINTS  FIRST  BEST  LAST  CURVE",
                "training  loss    0        2       1      0.5   0.5   █▁",
                "training  loss    1        1       0.75   0.75  0.75  ▄",
            ],
        );
    }

    #[test]
    fn experiment_table_shows_the_best_trial_first() {
        let mut curves = Curves::default();
        for (trial, values) in [&[0.5, 0.25][..], &[f64::NAN], &[0.125, 1.0]].iter().enumerate() {
            curves.add(trial as u32, false, rows(0, "validation", "loss", values));
            curves.add(trial as u32, false, rows(0, "training", "loss", &[9.0]));
        }
        let best = "2      2       20       0.125  0.125  1     ▁█";
        let second = "0      2       20       0.5    0.25   0.25  █▁";
        check(
            &of_experiment(&curves, &[0, 1, 2, 3], &searcher("loss", true)),
            &[
                "loss in validation, smaller is better",
                "",
                "TRIAL  POINTS            BATCHES  FIRST  BEST   LAST  CURVE",
                &best.replacen("2       ", "2                 ", 1),
                &second.replacen("2       ", "2                 ", 1),
                "1      1 (1 not finite)  10       NaN    NaN    NaN",
                "3      0                 -        -      -      -",
            ],
        );
    }

    #[test]
    fn experiment_table_follows_the_direction() {
        let mut curves = Curves::default();
        curves.add(0, true, rows(0, "training", "accuracy", &[0.5]));
        curves.add(1, true, rows(0, "training", "accuracy", &[0.75, 1.0]));
        curves.add(1, true, rows(1, "training", "accuracy", &[0.75]));
        check(
            &of_experiment(&curves, &[0, 1, 2], &searcher("accuracy", false)),
            &[
                "accuracy in training, greater is better",
                "",
                "TRIAL  ATTEMPT  POINTS  BATCHES  FIRST  BEST  LAST  CURVE",
                "1      0        2       20       0.75   1     1     ▁█",
                "1      1        1       10       0.75   0.75  0.75  ▄",
                "0      0        1       10       0.5    0.5   0.5   ▄",
                "2      -        0       -        -      -     -",
            ],
        );
        let unknown = of_experiment(&curves, &[0, 1], &searcher("loss", true));
        let begins = ["accuracy in training, in order of the trials", "0      0", "1      0"];
        assert!(begins.iter().all(|begin| unknown.lines().any(|line| line.starts_with(begin))));
        assert!(unknown.find("\n0 ") < unknown.find("\n1 "), "{unknown}");
    }
}
