//! Limits of an experiment's log. The schema of `Experiment` bounds its length.
//!
//! | entries | consequence |
//! |---|---|
//! | from 768 | edits, and requests to reopen trials, are refused |
//! | from 1,016 | deleted trials are not taken in |
//!
//! The rest is for a limit and the answers of an external searcher, which add few entries. So facts
//! of trials always lead to decisions.

use stoker_api::decisions::LogEntry;
use stoker_api::experiment::ReopenRequest;

use super::edits::{EDIT_REFUSED, is_edited};
use crate::experiment::Refusal;
use crate::search::SearchConfig;

/// Number of entries from which on edits are refused.
const EDITS_MAX: usize = 768;
/// Number of entries from which on deleted trials are not taken in.
const DELETIONS_MAX: usize = 1016;
/// Reason of a log without space for deleted trials.
pub const LOG_FULL: &str = "LogFull";

/// Returns why the log has no space for the edit or the request of the user; `None` if it has, or
/// there is neither. The search continues without it.
pub fn full_log(
    config: &SearchConfig,
    request: Option<ReopenRequest>,
    log: &[LogEntry],
) -> Option<Refusal> {
    let num = log.len();
    let is_refused = num >= EDITS_MAX && is_edited(config, request, log);
    is_refused.then(|| {
        let message = format!(
            "status.log: too long for an edit or a request to continue trials ({num} entries, at \
             least {EDITS_MAX}); create another experiment. The search continues without it"
        );
        Refusal { reason: EDIT_REFUSED.to_owned(), message }
    })
}

/// Returns why the log has no space for trials that were deleted; `None` if it has. The search
/// continues without their deletions.
pub fn refused_deletions(log: &[LogEntry]) -> Option<Refusal> {
    let num = log.len();
    (num >= DELETIONS_MAX).then(|| {
        let message = format!(
            "status.log: too long for deletions of trials ({num} entries, at least \
             {DELETIONS_MAX}); if the search waits for a deleted trial, cancel the experiment"
        );
        Refusal { reason: LOG_FULL.to_owned(), message }
    })
}

#[cfg(test)]
mod tests {
    use stoker_api::decisions::SearchSettings;
    use stoker_api::experiment::ReopenedTrials;

    use super::super::tests::case::{Case, random};
    use super::*;

    #[test]
    fn log_keeps_space_for_deletions_and_limits() {
        let case = Case::new(random(2));
        let longer = SearchSettings { max_length: 12, ..case.config.settings() };
        let edited = case.config.with(&longer);
        let request = Some(ReopenRequest { number: 1, trials: ReopenedTrials::Failed });
        let check = |num: usize, expected: [Option<&str>; 3]| {
            let log: Vec<LogEntry> = case.log.iter().cycle().take(num).cloned().collect();
            let reason = |config: &SearchConfig, request: Option<ReopenRequest>| {
                full_log(config, request, &log).map(|refusal| refusal.reason)
            };
            let found =
                [reason(&case.config, None), reason(&edited, None), reason(&case.config, request)];
            assert_eq!(found.each_ref().map(Option::as_deref), expected, "{num}");
            let is_refused =
                refused_deletions(&log).is_some_and(|refusal| refusal.reason == LOG_FULL);
            assert_eq!(is_refused, num >= DELETIONS_MAX, "{num}");
        };
        check(1, [None; 3]);
        check(EDITS_MAX - 1, [None; 3]);
        check(EDITS_MAX, [None, Some(EDIT_REFUSED), Some(EDIT_REFUSED)]);
        check(DELETIONS_MAX - 1, [None, Some(EDIT_REFUSED), Some(EDIT_REFUSED)]);
        check(DELETIONS_MAX, [None, Some(EDIT_REFUSED), Some(EDIT_REFUSED)]);
    }
}
