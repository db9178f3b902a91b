//! Edits of an experiment by the user.
//!
//! The log has the settings with which the search began, and those of each edit. So a rebuilt
//! search takes in all turns with the settings of their time.

use stoker_api::decisions::{EditedEvent, LogEntry, LogEvent, SearchSettings};
use stoker_api::experiment::{ReopenRequest, Searcher};
use stoker_api::time::Timestamp;
use stoker_api::validate::check_max_trials;

use super::reopened::{Continued, last_request};
use super::{Ledger, Write};
use crate::experiment::{Refusal, Summary, recorded};
use crate::search::SearchConfig;
use crate::search::turn::{Event, Step};
use crate::trial::TrialRecord;

/// Reason of an edit that the search cannot follow.
pub const EDIT_REFUSED: &str = "EditRefused";
/// Maximum size of an experiment in bytes of JSON, with the decisions on an edit. etcd stores
/// objects of at most 1.5 MiB; the rest is for later decisions and for the status.
const EXPERIMENT_BYTES_MAX: usize = 1_500_000;

/// An edit that the search has not taken in.
#[derive(Debug)]
enum DueEdit {
    /// Nothing was edited.
    Nothing,
    /// Trials that will continue have not ended yet.
    Waits,
    /// The event, and the trials that continue.
    Now(EditedEvent, Vec<u32>),
}

impl Ledger {
    /// Takes in an edit. `config` is the search of the current spec, and `record_of` returns the
    /// record of a trial. An ended search continues, unless a limit still ends it. Trials that a
    /// limit has stopped continue once the user grants more and no limit is reached any more, and
    /// completed trials continue to a greater length.
    ///
    /// Returns no writes if nothing was edited, and `None` while trials that will continue have not
    /// ended yet. Nothing may be decided before they have.
    pub fn edit<'a>(
        &mut self,
        config: &SearchConfig,
        summary: &Summary,
        record_of: impl Fn(u32) -> Option<&'a TrialRecord> + Copy,
        now: Timestamp,
    ) -> Option<Vec<Write>> {
        let (event, continued) = match self.due_edit(config, summary, record_of, now) {
            DueEdit::Nothing => return Some(vec![]),
            DueEdit::Waits => return None,
            DueEdit::Now(event, continued) => (event, continued),
        };
        self.config = config.clone();
        self.place_facts(&continued, record_of);
        let turn = self.search.reopen(Event::Edited((&event).into()), continued);
        Some(turn.map(|turn| self.log(turn, LogEvent::Edited(event), now)).unwrap_or_default())
    }

    /// Returns why an experiment of `num_bytes` bytes of JSON cannot record the trials that an edit
    /// creates and continues; `None` if it can, or nothing was edited. The search continues with
    /// the settings before the edit. Only clusters have this limit.
    pub fn large_edit<'a>(
        &self,
        config: &SearchConfig,
        summary: &Summary,
        record_of: impl Fn(u32) -> Option<&'a TrialRecord>,
        num_bytes: usize,
        now: Timestamp,
    ) -> Option<Refusal> {
        // Settings that an earlier version did not record are recorded in any case.
        if !self.has_settings {
            return None;
        }
        let due = self.due_edit(config, summary, record_of, now);
        let DueEdit::Now(event, continued) = due else { return None };
        let num_free = EXPERIMENT_BYTES_MAX.saturating_sub(num_bytes);
        let (mut next, mut num_added) = (self.book().next_index(), 0);
        self.search.clone().preview(&Event::Edited((&event).into()), continued, |step| {
            // The end of the search fits in any case.
            if *step != Step::Finish {
                num_added += recorded::num_bytes(step, next);
            }
            next += u32::from(matches!(step, Step::Create { .. }));
            num_added <= num_free
        });
        (num_added > num_free).then(|| {
            let message = format!(
                "spec.searcher: creates or continues more trials at once than the experiment can \
                 record ({num_bytes} of {EXPERIMENT_BYTES_MAX} bytes are in use); lower \
                 maxConcurrentTrials, or create another experiment. The search continues with the \
                 settings before this edit"
            );
            Refusal { reason: EDIT_REFUSED.to_owned(), message }
        })
    }

    fn due_edit<'a>(
        &self,
        config: &SearchConfig,
        summary: &Summary,
        record_of: impl Fn(u32) -> Option<&'a TrialRecord>,
        now: Timestamp,
    ) -> DueEdit {
        let (before, settings) = (self.config.settings(), config.settings());
        // An earlier version has recorded no settings. An edit would not be noticed.
        let is_unknown = !self.has_settings && !self.book().is_finished();
        let is_edited = self.has_settings && settings != before;
        if !self.has_begun || !(is_unknown || is_edited) {
            return DueEdit::Nothing;
        }
        let is_limited = self.stays_limited(config, summary, now);
        let is_freed = self.limit_reached.is_some() && !is_limited;
        // A limit may have kept an earlier edit from continuing completed trials.
        let length = self.continued_length;
        let shorter = Some(length).filter(|length| *length < settings.max_length);
        let continued = match is_limited {
            true => Continued::default(),
            false => self.continued_by_edit(is_freed, shorter, record_of),
        };
        if continued.waits {
            return DueEdit::Waits;
        }
        let bracket_trials = self.search.bracket_trials();
        DueEdit::Now(EditedEvent { settings, is_limited, bracket_trials }, continued.trials)
    }
}

/// Returns the settings of the search that the log recorded last, at its beginning or in an edit;
/// `None` if an earlier version began the search, and it was not edited since.
pub fn recorded_settings(log: &[LogEntry]) -> Option<&SearchSettings> {
    log.iter().rev().find_map(settings)
}

/// Returns whether the settings of the spec differ from the last recorded ones, or a request to
/// reopen trials is new.
pub fn is_edited(config: &SearchConfig, request: Option<ReopenRequest>, log: &[LogEntry]) -> bool {
    let recorded = recorded_settings(log);
    recorded.is_some_and(|recorded| *recorded != config.settings()) || is_requested(request, log)
}

/// Returns whether a request to reopen trials is new.
pub fn is_requested(request: Option<ReopenRequest>, log: &[LogEntry]) -> bool {
    request.is_some_and(|request| request.number > last_request(log))
}

/// Returns why the search cannot follow an edit; `None` if it can. The search continues with the
/// settings before it.
pub fn refused_edit(searcher: &Searcher, log: &[LogEntry], trials_created: u32) -> Option<Refusal> {
    let before = recorded_settings(log)?.max_trials?;
    let error = check_max_trials(searcher, before, trials_created)?;
    let message = format!("{error}. The search continues with {before} until this is corrected");
    Some(Refusal { reason: EDIT_REFUSED.to_owned(), message })
}

/// Returns the settings that an entry records.
pub(super) fn settings(entry: &LogEntry) -> Option<&SearchSettings> {
    match &entry.event {
        LogEvent::Began(event) => event.settings.as_ref(),
        LogEvent::Edited(event) => Some(&event.settings),
        LogEvent::Deleted(_)
        | LogEvent::LimitReached(_)
        | LogEvent::Answered(_)
        | LogEvent::Reopened(_) => None,
    }
}

#[cfg(test)]
mod tests;
