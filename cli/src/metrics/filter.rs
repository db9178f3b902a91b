//! Metrics and groups to print, and the direction of a metric.

use std::collections::BTreeSet;

use stoker_api::contract::{is_metric, short_metric_name};
use stoker_api::experiment::Searcher;
use stoker_storage::metrics::Row;

use crate::failure::Failure;

/// Maximum number of names in an error.
const NAMES_MAX: usize = 20;

/// Selection of metrics by name and group.
#[derive(Debug)]
pub(super) struct Filter<'a> {
    metric: Option<&'a str>,
    group: Option<&'a str>,
    /// Groups and metrics of all rows, for the error if none is selected.
    names: BTreeSet<(String, String)>,
    /// Number of selected values.
    pub(super) num_printed: u64,
}

impl<'a> Filter<'a> {
    /// Creates a filter. `None` selects all metrics or groups.
    pub(super) fn new(metric: Option<&'a str>, group: Option<&'a str>) -> Self {
        Self { metric, group, names: BTreeSet::new(), num_printed: 0 }
    }

    /// Returns the rows with the selected metrics only. Rows without any are left out.
    pub(super) fn apply(&mut self, mut rows: Vec<Row>) -> Vec<Row> {
        rows.retain_mut(|row| {
            let has_group = self.group.is_none_or(|group| group == row.group);
            row.metrics.retain(|name, _| {
                let is_selected =
                    has_group && self.metric.is_none_or(|metric| is_metric(name, metric));
                if !is_selected && self.num_printed == 0 {
                    self.names.insert((row.group.clone(), name.clone()));
                }
                self.num_printed += u64::from(is_selected);
                is_selected
            });
            !row.metrics.is_empty()
        });
        rows
    }

    /// Returns an error if rows were read but none was selected.
    pub(super) fn check_names(&self, name: &str) -> Result<(), Failure> {
        if self.names.is_empty() {
            return Ok(());
        }
        let mut names: Vec<String> =
            self.names.iter().map(|(group, metric)| format!("{metric} in {group}")).collect();
        if names.len() > NAMES_MAX {
            names.truncate(NAMES_MAX);
            names.push("...".to_owned());
        }
        let metric =
            self.metric.map_or("metrics".to_owned(), |metric| format!("metric `{metric}`"));
        let group = self.group.map(|group| format!(" in group `{group}`")).unwrap_or_default();
        let names = names.join(", ");
        Err(Failure::Input(format!("{metric}{group} of {name} not found; available: {names}")))
    }
}

/// Returns whether smaller values of a metric are better: known for objectives of the search, and
/// for the same metrics of other groups.
pub(super) fn smaller_is_better(searcher: &Searcher, metric: &str) -> Option<bool> {
    let of_others = searcher.other_objectives().iter();
    let others = of_others.map(|other| (other.metric.as_str(), other.smaller_is_better));
    let searched = (searcher.metric.as_str(), searcher.smaller_is_better);
    let mut objectives = std::iter::once(searched).chain(others);
    let (_, smaller) =
        objectives.find(|(name, _)| short_metric_name(name) == short_metric_name(metric))?;
    Some(smaller)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn row(group: &str, metrics: &[&str]) -> Row {
        let metrics: BTreeMap<String, f64> =
            metrics.iter().map(|name| ((*name).to_owned(), 1.0)).collect();
        Row { group: group.to_owned(), batches: 1, epoch: 0, attempt: 0, time: None, metrics }
    }

    fn check(
        (metric, group): (Option<&str>, Option<&str>),
        expected: Result<&[(&str, &[&str])], &str>,
    ) {
        let rows = vec![
            row("training", &["loss", "accuracy"]),
            row("validation", &["validation_loss", "validation_accuracy"]),
        ];
        let mut filter = Filter::new(metric, group);
        let selected = filter.apply(rows);
        match expected {
            Ok(expected) => {
                let expected: Vec<Row> =
                    expected.iter().map(|(group, metrics)| row(group, metrics)).collect();
                assert_eq!(selected, expected, "{metric:?} {group:?}");
            }
            Err(part) => {
                let error = filter.check_names("trial a-0").unwrap_err().to_string();
                assert!(filter.num_printed == 0 && error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn metrics_are_selected_by_name_and_group() {
        let training = ("training", &["loss", "accuracy"][..]);
        let validation = ("validation", &["validation_loss", "validation_accuracy"][..]);
        check((None, None), Ok(&[training, validation]));
        check((None, Some("training")), Ok(&[training]));
        check((Some("loss"), None), Ok(&[("training", &["loss"])]));
        check((Some("val_loss"), None), Ok(&[("validation", &["validation_loss"])]));
        let names = "accuracy in training, loss in training, validation_accuracy in validation, \
                     validation_loss in validation";
        let error = "metric `loss` in group `validation` of trial a-0 not found; available: ";
        check((Some("loss"), Some("validation")), Err(&format!("{error}{names}")));
        check((None, Some("other")), Err("metrics in group `other` of trial a-0 not found"));
    }

    #[test]
    fn direction_is_known_for_objectives() {
        let searcher: Searcher = serde_json::from_value(serde_json::json!({
            "metric": "validation_loss", "maxLength": {"batches": 1}, "single": {},
            "objectives": [
                {"metric": "validation_loss"},
                {"metric": "val_accuracy", "smallerIsBetter": false},
            ],
        }))
        .unwrap();
        let check = |metric: &str, expected: Option<bool>| {
            assert_eq!(smaller_is_better(&searcher, metric), expected, "{metric}");
        };
        check("validation_loss", Some(true));
        check("loss", Some(true));
        check("validation_accuracy", Some(false));
        check("learning_rate", None);
    }
}
