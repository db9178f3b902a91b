//! Trials that ended with an error, in the overview of an experiment.

use std::collections::BTreeMap;

use super::head::badges;
use crate::store::Run;
use crate::text;
use crate::views::{ErrorGroup, FirstError};

/// Maximum number of groups on the page.
const GROUPS_MAX: usize = 20;
/// Maximum number of ranges of trials in a group.
const RANGES_MAX: usize = 6;

/// Failed or invalid trials with the same message: state and message, and the trials.
type Group = ((&'static str, String), Vec<u32>);

/// Returns failed and invalid trials, grouped by state and message, the largest group first, and
/// the number of all groups.
pub(crate) fn errors(run: &Run) -> (Vec<ErrorGroup>, usize) {
    let group = |((class, message), trials): Group| ErrorGroup {
        badge: if class == "failed" { crate::state::FAILED } else { crate::state::INVALID },
        count: trials.len(),
        message,
        which: ranges(&trials),
        href: run.trial_base(trials[0]),
        logs_href: format!("{}/logs", run.trial_base(trials[0])),
    };
    let groups = grouped(run);
    let total = groups.len();
    (groups.into_iter().take(GROUPS_MAX).map(group).collect(), total)
}

fn grouped(run: &Run) -> Vec<Group> {
    let mut groups = BTreeMap::<(&'static str, String), Vec<u32>>::new();
    let badges = badges(run);
    for (index, trial) in &*run.trials {
        let badge = &badges[index];
        if matches!(badge.class, "failed" | "invalid") {
            let message = trial.status.message.clone().unwrap_or_else(|| "no message".to_owned());
            groups.entry((badge.class, text::escape(&message))).or_default().push(*index);
        }
    }
    let mut groups: Vec<Group> = groups.into_iter().collect();
    groups.sort_by_key(|(_, trials)| std::cmp::Reverse(trials.len()));
    groups
}

/// Returns ascending numbers as ranges, such as `0–3, 5–15`. Of many, returns the first ranges and
/// the number of others.
fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match parts.last_mut() {
            Some((_, end)) if *end + 1 == *number => *end = *number,
            _ => parts.push((*number, *number)),
        }
    }
    let part = |(begin, end): &(u32, u32)| match begin == end {
        true => begin.to_string(),
        false => format!("{begin}–{end}"),
    };
    let shown = &parts[..parts.len().min(RANGES_MAX)];
    let ranges = shown.iter().map(part).collect::<Vec<_>>().join(", ");
    let num_shown: u32 = shown.iter().map(|(begin, end)| end - begin + 1).sum();
    match numbers.len() - num_shown as usize {
        0 => ranges,
        others => format!("{ranges} and {} more", text::count(others as u64)),
    }
}

/// Returns an attempt whose logs show why trials failed: the latest attempt of the first trial with
/// the most frequent error. Failed trials precede invalid ones. `None` if none of these trials has
/// an attempt.
pub(crate) fn first_error(run: &Run) -> Option<FirstError> {
    let mut groups = grouped(run);
    groups.sort_by_key(|((class, _), _)| *class != "failed");
    let mut trials = groups.into_iter().flat_map(|(_, trials)| trials);
    let attempted = trials
        .find_map(|index| Some((index, run.trials.get(&index)?.status.attempts.last()?.number)));
    attempted.map(|(trial, attempt)| {
        let logs = format!("{}/logs", run.trial_base(trial));
        FirstError {
            trial,
            attempt,
            source: format!("{logs}.json?attempt={attempt}&around=error"),
            logs_href: format!("{logs}?attempt={attempt}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::run;

    #[test]
    fn ranges_are_short() {
        assert_eq!(ranges(&[0, 1, 2, 3, 5, 7, 8]), "0–3, 5, 7–8");
        assert_eq!(ranges(&[]), "");
        let even: Vec<u32> = (0..2_000).step_by(2).collect();
        assert_eq!(ranges(&even), "0, 2, 4, 6, 8, 10 and 994 more");
        assert_eq!(ranges(&even[..6]), "0, 2, 4, 6, 8, 10");
    }

    #[test]
    fn groups_of_errors_are_limited() {
        let failed = |number: usize| {
            json!({"phase": "Failed", "message": format!("error {number}"),
                "facts": [{"closed": {"cause": "Failed"}}]})
        };
        let trials: Vec<Value> = (0..30).map(failed).collect();
        let (groups, total) = errors(&run(json!({}), json!({}), &trials));
        assert_eq!((groups.len(), total), (GROUPS_MAX, 30));
    }

    #[test]
    fn first_error_is_of_the_largest_group() {
        let failed = |message: &str, attempts: u32| {
            let attempt = |number| json!({"number": number});
            let facts = json!([{"closed": {"cause": "Failed"}}]);
            json!({"phase": "Failed", "message": message, "facts": facts,
                "attempts": (0..attempts).map(attempt).collect::<Vec<_>>()})
        };
        let of = |trials: &[Value]| {
            let run = run(json!({}), json!({}), trials);
            first_error(&run).map(|first| (first.trial, first.attempt, first.logs_href))
        };
        let logs = |trial: u32, attempt: u32| {
            let href = format!("/experiments/ml/iris-01234567/trials/{trial}/logs");
            Some((trial, attempt, format!("{href}?attempt={attempt}")))
        };
        assert_eq!(of(&[json!({})]), None);
        assert_eq!(of(&[failed("a", 1), failed("b", 3), failed("b", 1)]), logs(1, 2));
        assert_eq!(of(&[failed("never started", 0)]), None);
        assert_eq!(of(&[failed("b", 0), failed("a", 1), failed("b", 1)]), logs(2, 0));
        let invalid = json!({"message": "c", "attempts": [{"number": 0}],
            "facts": [{"closed": {"cause": "InvalidHyperparameters"}}]});
        let trials = [invalid.clone(), invalid.clone(), failed("a", 1)];
        assert_eq!(of(&trials), logs(2, 0), "failed before invalid");
        assert_eq!(of(&[invalid]), logs(0, 0));
    }
}
