//! Lines for events of trials.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use stoker_api::trial::AttemptEnd;

use super::format_metric;
use crate::json;
use crate::run::state::Happening;

/// Maximum number of messages that are kept to recognize equal ones.
const MESSAGES_MAX: usize = 64;

/// Texts for the ends of attempts. An error of several trials is printed once.
#[derive(Debug, Default)]
pub(crate) struct EndTexts {
    /// First trial and number of ends, by message.
    errors: BTreeMap<String, (u32, u32)>,
}

impl EndTexts {
    fn text(&mut self, index: u32, word: &str, is_error: bool, message: Option<&str>) -> String {
        let Some(message) = message else { return word.to_owned() };
        if is_error {
            let is_full = self.errors.len() >= MESSAGES_MAX;
            match self.errors.get_mut(message) {
                Some((first, num)) => {
                    *num += 1;
                    if *first != index {
                        return format!("{word}: same message as trial {first} ({num} times)");
                    }
                }
                None if is_full => {}
                None => _ = self.errors.insert(message.to_owned(), (index, 1)),
            }
        }
        match message.contains(word) {
            true => message.to_owned(),
            false => format!("{word}: {message}"),
        }
    }
}

/// Returns how an attempt ended. The trial may have failed although its program exited with code 0.
fn end_word(end: AttemptEnd, is_failure: bool) -> &'static str {
    match end {
        AttemptEnd::Completed if is_failure => "failed",
        AttemptEnd::Completed => "completed",
        AttemptEnd::Preempted => "preempted",
        AttemptEnd::InvalidHyperparameters => "invalid hyperparameters",
        AttemptEnd::UserError => "program error",
        AttemptEnd::Infrastructure => "infrastructure error",
        // A runner that prints this has killed the program.
        AttemptEnd::RunnerLost => "killed",
        AttemptEnd::NotStarted => "not started",
    }
}

pub(super) fn text_line(index: u32, event: &Happening, ends: &mut EndTexts) -> String {
    match event {
        Happening::Started { attempt: 0, from: None, .. } => format!("trial {index}: started"),
        Happening::Started { attempt, from, refused } => {
            let from = from.as_ref();
            let from = from.map_or("scratch".to_owned(), |name| format!("checkpoint {name}"));
            let refused: String = refused
                .iter()
                .map(|(name, why)| format!("; checkpoint {name} was skipped: {why}"))
                .collect();
            format!("trial {index}: attempt {attempt} started from {from}{refused}")
        }
        Happening::Validated { batches, metrics } => {
            let metrics: Vec<String> = metrics
                .iter()
                .map(|(name, value)| format!("{name} {}", format_metric(value)))
                .collect();
            format!("trial {index}: batch {batches}: {}", metrics.join(", "))
        }
        Happening::Checkpointed { batches, name } => {
            format!("trial {index}: batch {batches}: checkpoint {name}")
        }
        Happening::Ended { attempt, end, is_failure, message } => {
            let is_error = matches!(
                end,
                AttemptEnd::InvalidHyperparameters
                    | AttemptEnd::UserError
                    | AttemptEnd::Infrastructure
            );
            let word = end_word(*end, *is_failure);
            let text = ends.text(index, word, *is_failure || is_error, message.as_deref());
            format!("trial {index}: attempt {attempt} ended: {text}")
        }
    }
}

pub(super) fn json_line(index: u32, event: &Happening) -> Value {
    match event {
        Happening::Started { attempt, from, refused } => {
            json!({"event": "started", "trial": index, "attempt": attempt, "checkpoint": from,
                "refused": refused})
        }
        Happening::Validated { batches, metrics } => {
            let metrics: BTreeMap<&String, Value> =
                metrics.iter().map(|(name, value)| (name, json::metric(value))).collect();
            json!({"event": "validated", "trial": index, "batches": batches, "metrics": metrics})
        }
        Happening::Checkpointed { batches, name } => {
            json!({"event": "checkpointed", "trial": index, "batches": batches, "checkpoint": name})
        }
        Happening::Ended { attempt, end, is_failure: _, message } => {
            json!({"event": "ended", "trial": index, "attempt": attempt, "end": end,
                "message": message})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(ends: &mut EndTexts, index: u32, end: AttemptEnd, message: &str, expected: &str) {
        let message = Some(message.to_owned()).filter(|message| !message.is_empty());
        let is_failure = end == AttemptEnd::Completed && message.is_some();
        let event = Happening::Ended { attempt: 1, end, is_failure, message };
        let expected = format!("trial {index}: attempt 1 ended: {expected}");
        assert_eq!(text_line(index, &event, ends), expected);
    }

    #[test]
    fn ends_of_attempts_are_words() {
        let mut ends = EndTexts::default();
        let mut check = |end, message, expected| check(&mut ends, 0, end, message, expected);
        check(AttemptEnd::Completed, "", "completed");
        check(AttemptEnd::Completed, "no validation", "failed: no validation");
        check(AttemptEnd::RunnerLost, "killed by request", "killed by request");
        check(AttemptEnd::UserError, "exit code 1", "program error: exit code 1");
    }

    #[test]
    fn equal_errors_of_trials_are_printed_once() {
        let mut ends = EndTexts::default();
        let invalid = AttemptEnd::InvalidHyperparameters;
        let mut check = |index, message, expected| {
            check(&mut ends, index, invalid, message, expected);
        };
        let message = "invalid hyperparameters: no batch size";
        check(4, message, message);
        check(5, "hidden is 0", "invalid hyperparameters: hidden is 0");
        check(6, message, "invalid hyperparameters: same message as trial 4 (2 times)");
        check(7, message, "invalid hyperparameters: same message as trial 4 (3 times)");
        check(4, message, message);
    }
}
