//! Termination file of a process: exit code, message and unanswered reports, for the parent
//! process.

use std::path::Path;

use stoker_api::contract::{ExitCode, Report, ReportEvent, TERMINATION_BYTES_MAX, Termination};
use stoker_api::names::ENV_TERMINATION_FILE;

/// Maximum size of the message in the file, in bytes, if there are also reports.
const MESSAGE_BYTES_MAX: usize = 2_048;

/// Writes the termination file, if the environment specifies one.
pub(crate) fn record_exit(code: ExitCode, message: Option<&str>, unsent: Vec<Report>) {
    if let Some(path) = std::env::var_os(ENV_TERMINATION_FILE) {
        let message = message.map(str::to_owned);
        write(Path::new(&path), Termination { code: code as u8, message, unsent });
    }
}

/// Same as [`record_exit`], unless the file is already written: the first error is usually the
/// cause.
pub(crate) fn record_exit_if_missing(code: ExitCode, message: &str) {
    let file = std::env::var_os(ENV_TERMINATION_FILE);
    if file.is_none_or(|path| read(Path::new(&path)).is_none()) {
        record_exit(code, Some(message), vec![]);
    }
}

/// Writes as much of `termination` as fits. Logs an error without failing, since the exit code
/// carries the most important information.
pub(crate) fn write(path: &Path, termination: Termination) {
    if let Err(error) = std::fs::write(path, to_bytes(termination)) {
        eprintln!("stoker: cannot write {}: {error}", path.display());
    }
}

/// Reads the termination file of a process; `None` if it wrote none.
pub(crate) fn read(path: &Path) -> Option<Termination> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Encodes as JSON of at most [`TERMINATION_BYTES_MAX`]. Truncates the message and drops the least
/// important reports first.
pub(crate) fn to_bytes(mut termination: Termination) -> Vec<u8> {
    let mut unsent: Vec<_> =
        std::mem::take(&mut termination.unsent).into_iter().enumerate().collect();
    let bytes_max = if unsent.is_empty() { TERMINATION_BYTES_MAX } else { MESSAGE_BYTES_MAX };
    truncate_message(&mut termination, bytes_max);
    // Within a rank, prefer newer reports.
    unsent.sort_by_key(|(index, report)| (rank(report), std::cmp::Reverse(*index)));
    let mut taken: Vec<(usize, Report)> = vec![];
    for (index, report) in unsent {
        let at = taken.partition_point(|(other, _)| *other < index);
        taken.insert(at, (index, report));
        termination.unsent = taken.iter().map(|(_, report)| report.clone()).collect();
        if json(&termination).len() > TERMINATION_BYTES_MAX {
            taken.remove(at);
        }
    }
    termination.unsent = taken.into_iter().map(|(_, report)| report).collect();
    json(&termination)
}

/// Returns the rank of a report by importance; 0 is the most important.
fn rank(report: &Report) -> u8 {
    match report.event {
        ReportEvent::Validated { granted_units: Some(_), .. } => 0,
        ReportEvent::Checkpointed { .. } => 1,
        _ => 2,
    }
}

fn truncate_message(termination: &mut Termination, bytes_max: usize) {
    while json(termination).len() > bytes_max
        && let Some(message) = &mut termination.message
        && !message.is_empty()
    {
        let kept = message.chars().count() * 3 / 4;
        *message = message.chars().take(kept).collect();
    }
}

fn json(termination: &Termination) -> Vec<u8> {
    // Serialization of strings and numbers cannot fail.
    serde_json::to_vec(termination).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use stoker_api::contract::CONTRACT_VERSION;

    use super::*;

    fn report(batches: u64, event: ReportEvent) -> Report {
        Report { version: CONTRACT_VERSION, attempt: 0, batches, event }
    }

    fn validated(batches: u64, granted_units: Option<u64>) -> Report {
        let metrics = BTreeMap::from([("validation_loss".to_owned(), "0.25".to_owned())]);
        report(batches, ReportEvent::Validated { metrics, granted_units })
    }

    fn check(message: &str, unsent: Vec<Report>) -> Termination {
        let message = Some(message.to_owned());
        let bytes = to_bytes(Termination { code: 1, message, unsent });
        assert!(bytes.len() <= TERMINATION_BYTES_MAX, "{}", bytes.len());
        serde_json::from_slice(&bytes).unwrap()
    }

    #[test]
    fn short_termination_is_written_unchanged() {
        let unsent = vec![validated(1, None), validated(2, Some(2))];
        let actual = check("no", unsent.clone());
        assert_eq!(actual, Termination { code: 1, message: Some("no".into()), unsent });
    }

    #[test]
    fn long_messages_are_truncated() {
        for text in ["x", "\u{1b}", "ü", "\"\\"] {
            let actual = check(&text.repeat(9_000), vec![validated(7, Some(7))]);
            let message = actual.message.unwrap();
            assert!(message.len() > 200 && message.starts_with(text), "{text:?}");
            assert_eq!(actual.unsent.len(), 1, "{text:?}");
        }
    }

    #[test]
    fn results_precede_checkpoints_and_progress() {
        let checkpointed = |batches| {
            let name = format!("{batches:012}-0");
            let manifest_sha256 = "0".repeat(64);
            report(
                batches,
                ReportEvent::Checkpointed { name, manifest_sha256, bytes: 1, metric: None },
            )
        };
        let mut unsent = vec![validated(1, Some(1)), checkpointed(2)];
        unsent.extend((3..60).map(|batches| validated(batches, None)));
        unsent.push(validated(60, Some(60)));
        let kept = check("no", unsent).unsent;
        let batches: Vec<u64> = kept.iter().map(|report| report.batches).collect();
        assert!(batches.is_sorted(), "{batches:?}");
        assert_eq!((batches[0], batches[1], batches[batches.len() - 1]), (1, 2, 60));
        // Of the reports without a result, only the newest fit.
        assert!(batches.len() > 10 && batches[2] > 20, "{batches:?}");
    }
}
