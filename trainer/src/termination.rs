//! The last words of a process: its exit code, why, and the reports that had no answer, for whoever
//! started it.

use std::path::Path;

use stoker_api::contract::{ExitCode, Report, ReportEvent, TERMINATION_BYTES_MAX, Termination};
use stoker_api::names::ENV_TERMINATION_FILE;

/// What a message may take of the file where reports wait for the rest.
const MESSAGE_BYTES_MAX: usize = 2_048;

/// Writes the file that the environment names, if it names one.
pub(crate) fn leave(code: ExitCode, message: Option<&str>, unsent: Vec<Report>) {
    if let Some(path) = std::env::var_os(ENV_TERMINATION_FILE) {
        let message = message.map(str::to_owned);
        write(Path::new(&path), Termination { code: code as u8, message, unsent });
    }
}

/// As [`leave`], where nothing was left yet: the first word says most.
pub(crate) fn leave_if_silent(code: ExitCode, message: &str) {
    let file = std::env::var_os(ENV_TERMINATION_FILE);
    if file.is_none_or(|it| read(Path::new(&it)).is_none()) {
        leave(code, Some(message), vec![]);
    }
}

/// Writes `termination`, as much of it as fits. A failure is said and ends nothing: the exit code
/// tells the most of it.
pub(crate) fn write(path: &Path, termination: Termination) {
    if let Err(error) = std::fs::write(path, to_bytes(termination)) {
        eprintln!("stoker: {} cannot be written: {error}", path.display());
    }
}

/// What a process has left in its file; `None` where it has left nothing.
pub(crate) fn read(path: &Path) -> Option<Termination> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// As JSON of at most [`TERMINATION_BYTES_MAX`]: a message is cut, and reports are left out, those
/// first that decide the least.
pub(crate) fn to_bytes(mut termination: Termination) -> Vec<u8> {
    let mut unsent: Vec<_> =
        std::mem::take(&mut termination.unsent).into_iter().enumerate().collect();
    let room = if unsent.is_empty() { TERMINATION_BYTES_MAX } else { MESSAGE_BYTES_MAX };
    cut_message(&mut termination, room);
    // Newest first among those that decide as much.
    unsent.sort_by_key(|(place, report)| (rank(report), std::cmp::Reverse(*place)));
    let mut taken: Vec<(usize, Report)> = vec![];
    for (place, report) in unsent {
        let at = taken.partition_point(|(other, _)| *other < place);
        taken.insert(at, (place, report));
        termination.unsent = taken.iter().map(|(_, report)| report.clone()).collect();
        if json(&termination).len() > TERMINATION_BYTES_MAX {
            taken.remove(at);
        }
    }
    termination.unsent = taken.into_iter().map(|(_, report)| report).collect();
    json(&termination)
}

/// How little depends on a report.
fn rank(report: &Report) -> u8 {
    match report.event {
        ReportEvent::Validated { granted_units: Some(_), .. } => 0,
        ReportEvent::Checkpointed { .. } => 1,
        _ => 2,
    }
}

fn cut_message(termination: &mut Termination, bytes_max: usize) {
    while json(termination).len() > bytes_max
        && let Some(message) = &mut termination.message
        && !message.is_empty()
    {
        let kept = message.chars().count() * 3 / 4;
        *message = message.chars().take(kept).collect();
    }
}

fn json(termination: &Termination) -> Vec<u8> {
    // Of strings and numbers alone: it always has a form.
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
    fn what_fits_is_written_as_it_is() {
        let unsent = vec![validated(1, None), validated(2, Some(2))];
        let found = check("no", unsent.clone());
        assert_eq!(found, Termination { code: 1, message: Some("no".into()), unsent });
    }

    #[test]
    fn a_long_message_is_cut_whatever_it_is_made_of() {
        for text in ["x", "\u{1b}", "ü", "\"\\"] {
            let found = check(&text.repeat(9_000), vec![validated(7, Some(7))]);
            let message = found.message.unwrap();
            assert!(message.len() > 200 && message.starts_with(text), "{text:?}");
            assert_eq!(found.unsent.len(), 1, "{text:?}");
        }
    }

    #[test]
    fn results_stay_before_checkpoints_and_those_before_progress_in_their_order() {
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
        let found = check("no", unsent).unsent;
        let batches: Vec<u64> = found.iter().map(|it| it.batches).collect();
        assert!(batches.is_sorted(), "{batches:?}");
        assert_eq!((batches[0], batches[1], batches[batches.len() - 1]), (1, 2, 60));
        // Of those that decide nothing, the newest.
        assert!(batches.len() > 10 && batches[2] > 20, "{batches:?}");
    }
}
