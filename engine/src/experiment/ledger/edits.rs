//! Edits of an experiment by the user.
//!
//! The log has the settings with which the search began, and those of each edit. So a rebuilt
//! search takes in all turns with the settings of their time.

use stoker_api::decisions::{EditedEvent, LogEntry, LogEvent, SearchSettings};
use stoker_api::experiment::{ReopenRequest, Searcher};
use stoker_api::time::Timestamp;
use stoker_api::validate::{ValidExperiment, check_max_trials, check_num_at_once};

use super::reopened::{Continued, last_request};
use super::{Ledger, Write};
use crate::experiment::{Refusal, Summary};
use crate::search::SearchConfig;
use crate::search::turn::Event;
use crate::trial::TrialRecord;

/// Reason of an edit that the search cannot follow.
pub const EDIT_REFUSED: &str = "EditRefused";

impl Ledger {
    /// Takes in an edit. `config` is the search of the current spec, and `record_of` returns the
    /// record of a trial. An ended search continues, unless a limit still ends it. Trials that a
    /// limit has stopped continue once it is not reached any more, and completed trials continue to
    /// a greater length.
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
        let settings = config.settings();
        // An earlier version has recorded no settings. An edit would not be noticed.
        let is_unknown = !self.has_settings && !self.book().is_finished();
        let is_edited = self.has_settings && settings != self.config.settings();
        if !self.has_begun || !(is_unknown || is_edited) {
            return Some(vec![]);
        }
        let before = std::mem::replace(&mut self.config, config.clone());
        let is_limited = self.limit_reached.is_some() && self.crossed(summary, now).is_some();
        let is_freed = self.limit_reached.is_some() && !is_limited;
        let shorter = Some(before.units_max).filter(|length| *length < config.units_max);
        let continued = match is_limited {
            true => Continued::default(),
            false => self.continued_by_edit(is_freed, shorter, record_of),
        };
        if continued.waits {
            self.config = before;
            return None;
        }
        self.place_facts(&continued.trials, record_of);
        let event =
            EditedEvent { settings, is_limited, bracket_trials: self.search.bracket_trials() };
        let edit = Event::Edited((&event).into());
        let turn = self.search.reopen(edit, continued.trials);
        Some(turn.map(|turn| self.log(turn, LogEvent::Edited(event), now)).unwrap_or_default())
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

/// Returns why an edit of numbers of trials or of the length would create more trials than the log
/// can record at once; `None` if it would not, or none of these was edited. The search continues
/// with the settings before the edit.
///
/// Rungs count as for a new search. An edited search may keep its brackets, and then creates
/// another number.
pub fn large_edit(
    valid: &ValidExperiment,
    config: &SearchConfig,
    log: &[LogEntry],
    trials_created: u32,
) -> Option<Refusal> {
    let of = |settings: &SearchSettings| {
        (settings.max_trials, settings.max_concurrent_trials, settings.max_length)
    };
    if of(recorded_settings(log)?) == of(&config.settings()) {
        return None;
    }
    let error = check_num_at_once(valid, trials_created)?;
    let message = format!("{error}. The search continues with the settings before this edit");
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
