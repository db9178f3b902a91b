//! Limits on the resources of a search.
//!
//! | limit | spent |
//! |---|---|
//! | `seconds` | time since the first entry of the log |
//! | `slotSeconds` | slots of a trial, times the time for which attempts held them |
//! | `units` | lengths of the latest results of all trials; of a copy, from its source |
//!
//! Deleted trials no longer count.

use stoker_api::decisions::{LimitReachedEvent, LogEvent, SearchLimit};
use stoker_api::time::Timestamp;

use super::{Ledger, Write};
use crate::experiment::Summary;
use crate::search::SearchConfig;
use crate::search::turn::Event;

impl Ledger {
    /// Ends the search if a limit is reached: stops all trials. Facts that the search has not taken
    /// in have no effect afterwards. Returns nothing if no limit is reached.
    pub fn reach_limit(&mut self, summary: &Summary, now: Timestamp) -> Vec<Write> {
        let reached = self.crossed(summary, now).filter(|_| self.has_begun);
        let Some(event) = reached else { return vec![] };
        let turn = self.search.advance(Event::LimitReached);
        turn.map(|turn| self.log(turn, LogEvent::LimitReached(event), now)).unwrap_or_default()
    }

    /// Returns the seconds until a limit is reached if all live attempts go on; `None` if no limit
    /// depends on time. No limit is reached earlier, unless an attempt begins or reports a result.
    pub fn seconds_to_limit(&self, summary: &Summary, now: Timestamp) -> Option<u64> {
        let seconds = |(limit, maximum): (SearchLimit, u64)| {
            let left = maximum.saturating_sub(self.spent(limit, summary, now));
            match limit {
                SearchLimit::Seconds => self.began_at.map(|_| left),
                SearchLimit::SlotSeconds => match self.slots(summary.num_attempts().into()) {
                    0 => None,
                    slots => Some(left.div_ceil(slots)),
                },
                SearchLimit::Units => None,
            }
        };
        let is_over = !self.has_begun || self.book().is_finished();
        self.config.limits.all().filter(|_| !is_over).filter_map(seconds).min()
    }

    /// Returns the limit that ended the search, if one did.
    pub fn limit_reached(&self) -> Option<&LimitReachedEvent> {
        self.limit_reached.as_ref()
    }

    /// Returns the first limit that is reached, even if the search has ended otherwise.
    pub fn crossed(&self, summary: &Summary, now: Timestamp) -> Option<LimitReachedEvent> {
        self.crossed_of(&self.config, summary, now)
    }

    /// Returns whether the search stays ended by a limit after an edit to `config`: a limit is
    /// reached, or the edit grants nothing. What is spent may have become less since the end:
    /// trials were deleted, or an earlier version counted the inherited length of copies.
    pub(super) fn stays_limited(
        &self,
        config: &SearchConfig,
        summary: &Summary,
        now: Timestamp,
    ) -> bool {
        let Some(reached) = self.limit_reached else { return false };
        let (before, after) = (self.config.settings(), config.settings());
        let is_kept = |(limit, maximum): (SearchLimit, u64)| {
            limit == reached.limit && maximum <= reached.maximum
        };
        let grants_more = after.max_trials > before.max_trials
            || after.max_length > before.max_length
            || !after.limits.all().any(is_kept);
        !grants_more || self.crossed_of(config, summary, now).is_some()
    }

    /// Same as [`crossed`](Self::crossed), with the limits of an edited search.
    fn crossed_of(
        &self,
        config: &SearchConfig,
        summary: &Summary,
        now: Timestamp,
    ) -> Option<LimitReachedEvent> {
        config.limits.all().find_map(|(limit, maximum)| {
            let spent = self.spent(limit, summary, now);
            (spent >= maximum).then_some(LimitReachedEvent { limit, maximum, spent })
        })
    }

    fn spent(&self, limit: SearchLimit, summary: &Summary, now: Timestamp) -> u64 {
        match limit {
            SearchLimit::Seconds => self.began_at.map_or(0, |began_at| now.seconds_since(began_at)),
            SearchLimit::SlotSeconds => self.slots(summary.attempt_seconds(now)),
            SearchLimit::Units => summary.units(),
        }
    }

    fn slots(&self, num_trials: u64) -> u64 {
        num_trials.saturating_mul(self.config.slots.into())
    }
}

#[cfg(test)]
mod tests;
