//! What was reported of each group: pure.

use std::collections::BTreeMap;

use crate::Result;
use crate::callback::Logs;

/// The group that a search goes by.
pub(crate) const VALIDATION: &str = "validation";
/// Characters of a group's name.
const GROUP_CHARS_MAX: usize = 63;

/// The last batches of each group, with what was reported of them.
#[derive(Debug, Default)]
pub(crate) struct Reported {
    groups: BTreeMap<String, (u64, Logs)>,
    /// Whether the runner was not told of the last validation yet.
    is_untold: bool,
}

/// A validation that is whole: its batches, and metrics by the names that reports use.
pub(crate) type WholeValidation = (u64, Logs);

impl Reported {
    /// Adds metrics of a group; several reports of the same batches are one. Gives the names under which
    /// they are written, and the validation before, which is whole now.
    pub(crate) fn add(
        &mut self,
        group: &str,
        batches: u64,
        metrics: impl IntoIterator<Item = (String, f64)>,
    ) -> Result<(Logs, Option<WholeValidation>)> {
        check_group(group)?;
        let mut named = Logs::new();
        for (name, value) in metrics {
            if name.is_empty() {
                return Err(format!("group {group}: a metric has no name").into());
            }
            let full = full_name(group, &name);
            if named.insert(full, value).is_some() {
                let text = format!("group {group} at batch {batches}: {name} is given twice");
                return Err(text.into());
            }
        }
        if let Some((last, seen)) = self.groups.get(group) {
            if batches < *last {
                let text = format!(
                    "group {group} is at batch {last}: a report of batch {batches} comes too late; report \
                     the batches of a group in order"
                );
                return Err(text.into());
            }
            let again: Vec<_> = match *last == batches {
                true => named.keys().filter(|it| seen.contains_key(*it)).cloned().collect(),
                false => vec![],
            };
            if !again.is_empty() {
                let text = format!(
                    "group {group} at batch {batches}: {} was reported before; a metric has one value at a \
                     batch",
                    again.join(", ")
                );
                return Err(text.into());
            }
        }
        let is_validation = group == VALIDATION;
        let is_new = self.groups.get(group).is_none_or(|(last, _)| *last < batches);
        let whole = if is_validation && is_new { self.whole() } else { None };
        let entry = self.groups.entry(group.to_owned()).or_default();
        if is_new {
            *entry = (batches, Logs::new());
        }
        entry.1.extend(named.clone());
        self.is_untold |= is_validation;
        Ok((named, whole))
    }

    /// Notes what a loop of ours has written and told.
    pub(crate) fn note(&mut self, group: &str, batches: u64, metrics: &Logs) {
        self.groups.insert(group.to_owned(), (batches, metrics.clone()));
    }

    /// The last validation, if the runner is to be told of it now.
    pub(crate) fn whole(&mut self) -> Option<WholeValidation> {
        let is_untold = std::mem::take(&mut self.is_untold);
        self.groups.get(VALIDATION).filter(|_| is_untold).cloned()
    }

    /// The last validation, told or not, if it was at this batch.
    pub(crate) fn validation_at(&self, batches: u64) -> Option<&Logs> {
        self.groups.get(VALIDATION).filter(|(last, _)| *last == batches).map(|(_, metrics)| metrics)
    }
}

/// `validation_loss` for `loss` and `val_loss` of a validation.
pub(crate) fn full_name(group: &str, name: &str) -> String {
    if group != VALIDATION {
        return name.to_owned();
    }
    let name =
        name.strip_prefix("validation_").or_else(|| name.strip_prefix("val_")).unwrap_or(name);
    format!("validation_{name}")
}

fn check_group(group: &str) -> Result<()> {
    let is_plain = |it: char| it.is_ascii_alphanumeric() || it == '_' || it == '-';
    match !group.is_empty() && group.len() <= GROUP_CHARS_MAX && group.chars().all(is_plain) {
        true => Ok(()),
        false => Err(format!(
            "{group:?} is no group of metrics: 1 to {GROUP_CHARS_MAX} letters, digits, `_` and `-`"
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
    fn reports_of_the_same_batches_are_one_and_a_second_value_is_refused() {
        let mut reported = Reported::default();
        let mut add = |group: &str, batches, metrics: &[(&str, f64)]| {
            let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value));
            let metrics: Vec<_> = metrics.collect();
            reported.add(group, batches, metrics).map_err(|it| it.to_string())
        };
        let written = |metrics| Ok((logs(metrics), None));
        assert_eq!(add("training", 3, &[("loss", 1.0)]), written(&[("loss", 1.0)]));
        assert_eq!(add("training", 3, &[("accuracy", 0.5)]), written(&[("accuracy", 0.5)]));
        let error = add("training", 3, &[("top5", 1.0), ("loss", 1.0)]).unwrap_err();
        assert_eq!(
            error,
            "group training at batch 3: loss was reported before; a metric has one value at a batch"
        );
        // What was refused is not there.
        assert_eq!(add("training", 3, &[("top5", 1.0)]), written(&[("top5", 1.0)]));
        assert!(add("training", 2, &[]).unwrap_err().contains("comes too late"));
        // Groups do not wait for each other.
        let first = [("validation_loss", 2.0)];
        assert_eq!(add("validation", 1, &[("val_loss", 2.0)]), written(&first));
        let error = add("validation", 1, &[("loss", 2.0)]).unwrap_err();
        assert!(error.contains("validation_loss was reported before"), "{error}");
        let error = add("validation", 2, &[("loss", 2.0), ("val_loss", 2.0)]).unwrap_err();
        assert!(error.contains("val_loss is given twice"), "{error}");
        assert!(add("validation", 2, &[("", 2.0)]).unwrap_err().contains("has no name"));
        for group in ["", "a.b", "a/b", "ä", &"a".repeat(64)] {
            assert!(add(group, 1, &[]).unwrap_err().contains("is no group"), "{group}");
        }
    }

    #[test]
    fn the_runner_is_told_of_a_validation_once_it_is_whole() {
        let mut reported = Reported::default();
        let add = |reported: &mut Reported, batches, name: &str| {
            reported.add(VALIDATION, batches, [(name.to_owned(), 1.0)]).unwrap().1
        };
        assert_eq!(add(&mut reported, 1, "loss"), None);
        assert_eq!(add(&mut reported, 1, "accuracy"), None);
        let whole = (1, logs(&[("validation_accuracy", 1.0), ("validation_loss", 1.0)]));
        assert_eq!(add(&mut reported, 2, "loss"), Some(whole));
        assert_eq!(reported.validation_at(1), None);
        assert_eq!(reported.whole(), Some((2, logs(&[("validation_loss", 1.0)]))));
        assert_eq!(reported.whole(), None);
        assert_eq!(reported.validation_at(2), Some(&logs(&[("validation_loss", 1.0)])));
        assert_eq!(add(&mut reported, 3, "loss"), None);
    }
}
