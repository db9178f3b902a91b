//! Metrics reported so far, by group (pure).

use std::collections::BTreeMap;

use stoker_api::contract::short_metric_name;

use crate::Result;
use crate::callback::Logs;

/// Group whose metrics determine the search.
pub(crate) const VALIDATION: &str = "validation";
/// Maximum length of a group name, in characters.
const GROUP_CHARS_MAX: usize = 63;

/// The last batch of each group, with its metrics.
#[derive(Debug, Default)]
pub(crate) struct ReportedMetrics {
    groups: BTreeMap<String, (u64, Logs)>,
    /// Whether the last validation has not been reported to the runner.
    is_unreported: bool,
}

/// A complete validation: its batch, and its metrics as named in reports.
pub(crate) type CompleteValidation = (u64, Logs);

impl ReportedMetrics {
    /// Adds metrics of a group; reports of the same batch are merged. Returns the metrics under
    /// their full names, and the previous validation, which is complete now.
    pub(crate) fn add(
        &mut self,
        group: &str,
        batches: u64,
        metrics: impl IntoIterator<Item = (String, f64)>,
    ) -> Result<(Logs, Option<CompleteValidation>)> {
        check_group(group)?;
        let mut named = Logs::new();
        for (name, value) in metrics {
            if name.is_empty() {
                return Err(format!("group {group}: a metric name is empty").into());
            }
            let full = full_name(group, &name);
            if named.insert(full, value).is_some() {
                let text = format!("group {group} at batch {batches}: {name} appears twice");
                return Err(text.into());
            }
        }
        if let Some((last, seen)) = self.groups.get(group) {
            if batches < *last {
                let text = format!(
                    "group {group} is already at batch {last}: cannot report batch {batches}; \
                     report the batches of a group in order"
                );
                return Err(text.into());
            }
            let again: Vec<_> = match *last == batches {
                true => named.keys().filter(|name| seen.contains_key(*name)).cloned().collect(),
                false => vec![],
            };
            if !again.is_empty() {
                let text = format!(
                    "group {group} at batch {batches}: {} was already reported; a metric has one \
                     value per batch",
                    again.join(", ")
                );
                return Err(text.into());
            }
        }
        let is_validation = group == VALIDATION;
        let is_new = self.groups.get(group).is_none_or(|(last, _)| *last < batches);
        let complete =
            if is_validation && is_new { self.take_unreported_validation() } else { None };
        let entry = self.groups.entry(group.to_owned()).or_default();
        if is_new {
            *entry = (batches, Logs::new());
        }
        entry.1.extend(named.clone());
        self.is_unreported |= is_validation;
        Ok((named, complete))
    }

    /// Records metrics that one of our loops has written and reported.
    pub(crate) fn record(&mut self, group: &str, batches: u64, metrics: &Logs) {
        self.groups.insert(group.to_owned(), (batches, metrics.clone()));
    }

    /// Takes the last validation if it has not been reported to the runner.
    pub(crate) fn take_unreported_validation(&mut self) -> Option<CompleteValidation> {
        let is_unreported = std::mem::take(&mut self.is_unreported);
        self.groups.get(VALIDATION).filter(|_| is_unreported).cloned()
    }

    /// Returns the last validation if it was at this batch, whether or not it was reported.
    pub(crate) fn validation_at(&self, batches: u64) -> Option<&Logs> {
        self.groups.get(VALIDATION).filter(|(last, _)| *last == batches).map(|(_, metrics)| metrics)
    }
}

/// Returns the full name: `validation_loss` for `loss` and `val_loss` of a validation.
pub(crate) fn full_name(group: &str, name: &str) -> String {
    if group != VALIDATION {
        return name.to_owned();
    }
    format!("validation_{}", short_metric_name(name))
}

fn check_group(group: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match !group.is_empty() && group.len() <= GROUP_CHARS_MAX && group.chars().all(is_plain) {
        true => Ok(()),
        false => Err(format!(
            "invalid metrics group {group:?}: use 1 to {GROUP_CHARS_MAX} letters, digits, _ and -"
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs(metrics: &[(&str, f64)]) -> Logs {
        metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn reports_merge_and_reject_second_values() {
        let mut reported = ReportedMetrics::default();
        let mut add = |group: &str, batches, metrics: &[(&str, f64)]| {
            let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value));
            let metrics: Vec<_> = metrics.collect();
            reported.add(group, batches, metrics).map_err(|error| error.to_string())
        };
        let written = |metrics| Ok((logs(metrics), None));
        assert_eq!(add("training", 3, &[("loss", 1.0)]), written(&[("loss", 1.0)]));
        assert_eq!(add("training", 3, &[("accuracy", 0.5)]), written(&[("accuracy", 0.5)]));
        let error = add("training", 3, &[("top5", 1.0), ("loss", 1.0)]).unwrap_err();
        assert_eq!(
            error,
            "group training at batch 3: loss was already reported; a metric has one value per batch"
        );
        // The rejected report has added nothing.
        assert_eq!(add("training", 3, &[("top5", 1.0)]), written(&[("top5", 1.0)]));
        assert!(add("training", 2, &[]).unwrap_err().contains("cannot report batch 2"));
        // Groups are independent of each other.
        let first = [("validation_loss", 2.0)];
        assert_eq!(add("validation", 1, &[("val_loss", 2.0)]), written(&first));
        let error = add("validation", 1, &[("loss", 2.0)]).unwrap_err();
        assert!(error.contains("validation_loss was already reported"), "{error}");
        let error = add("validation", 2, &[("loss", 2.0), ("val_loss", 2.0)]).unwrap_err();
        assert!(error.contains("val_loss appears twice"), "{error}");
        assert!(add("validation", 2, &[("", 2.0)]).unwrap_err().contains("metric name is empty"));
        for group in ["", "a.b", "a/b", "ä", &"a".repeat(64)] {
            assert!(add(group, 1, &[]).unwrap_err().contains("invalid metrics group"), "{group}");
        }
    }

    #[test]
    fn complete_validations_are_reported_once() {
        let mut reported = ReportedMetrics::default();
        let add = |reported: &mut ReportedMetrics, batches, name: &str| {
            reported.add(VALIDATION, batches, [(name.to_owned(), 1.0)]).unwrap().1
        };
        assert_eq!(add(&mut reported, 1, "loss"), None);
        assert_eq!(add(&mut reported, 1, "accuracy"), None);
        let complete = (1, logs(&[("validation_accuracy", 1.0), ("validation_loss", 1.0)]));
        assert_eq!(add(&mut reported, 2, "loss"), Some(complete));
        assert_eq!(reported.validation_at(1), None);
        assert_eq!(
            reported.take_unreported_validation(),
            Some((2, logs(&[("validation_loss", 1.0)])))
        );
        assert_eq!(reported.take_unreported_validation(), None);
        assert_eq!(reported.validation_at(2), Some(&logs(&[("validation_loss", 1.0)])));
        assert_eq!(add(&mut reported, 3, "loss"), None);
    }
}
