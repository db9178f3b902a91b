//! Edits of an experiment by the user.
//!
//! The log has the settings with which the search began, and those of each edit. So a rebuilt
//! search takes in all turns with the settings of their time.

use stoker_api::decisions::{EditedEvent, LogEntry, LogEvent, SearchSettings};
use stoker_api::time::Timestamp;

use super::{Ledger, Write};
use crate::experiment::Summary;
use crate::search::SearchConfig;
use crate::search::turn::Event;

impl Ledger {
    /// Takes in an edit. `config` is the search of the current spec. An ended search continues,
    /// unless a limit still ends it. Returns nothing if nothing was edited.
    pub fn edit(&mut self, config: &SearchConfig, summary: &Summary, now: Timestamp) -> Vec<Write> {
        let settings = config.settings();
        // An earlier version has recorded no settings. An edit would not be noticed.
        let is_unknown = !self.has_settings && !self.book().is_finished();
        let is_edited = self.has_settings && settings != self.config.settings();
        if !self.has_begun || !(is_unknown || is_edited) {
            return vec![];
        }
        let before = std::mem::replace(&mut self.config, config.clone());
        let is_limited = self.limit_reached.is_some() && self.crossed(summary, now).is_some();
        let event = EditedEvent { settings, is_limited };
        let Some(turn) = self.search.advance(Event::Edited((&event).into())) else {
            self.config = before;
            return vec![];
        };
        self.log(turn, LogEvent::Edited(event), now)
    }
}

/// Returns whether the settings of the spec differ from the last recorded ones.
pub fn is_edited(config: &SearchConfig, log: &[LogEntry]) -> bool {
    log.iter().rev().find_map(settings).is_some_and(|recorded| *recorded != config.settings())
}

/// Returns the settings that an entry records.
pub(super) fn settings(entry: &LogEntry) -> Option<&SearchSettings> {
    match &entry.event {
        LogEvent::Began(event) => event.settings.as_ref(),
        LogEvent::Edited(event) => Some(&event.settings),
        LogEvent::Deleted(_) | LogEvent::LimitReached(_) | LogEvent::Answered(_) => None,
    }
}

#[cfg(test)]
mod tests;
