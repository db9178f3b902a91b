//! Limits of a simulated search, and what it has spent.

use stoker_api::decisions::SearchLimit;

use super::Run;

/// Resources that a search has spent.
#[derive(Debug, Default)]
pub(super) struct Spent {
    /// Seconds since the search began.
    pub(super) time: f64,
    /// Seconds for which trials have held workers, until `time`.
    held_seconds: f64,
    /// Lengths of the latest results; of a copy, from its source.
    units: u64,
    /// Length of each trial's latest result. Without one, the length of its source, or 0.
    pub(super) lengths: Vec<u64>,
}

impl Run<'_> {
    /// Advances the time. The busy workers were held since the time before.
    pub(super) fn pass_to(&mut self, time: f64) {
        let spent = &mut self.spent;
        spent.held_seconds += f64::from(self.num_busy) * (time - spent.time);
        spent.time = time;
    }

    /// Returns the limit that time reaches next if no leg ends before, and when. `None` if the
    /// search has ended, or if no limit depends on time.
    pub(super) fn next_limit(&self) -> Option<(SearchLimit, f64)> {
        if self.search.book().is_finished() {
            return None;
        }
        let limits = self.config.limits.all();
        let due = limits.filter_map(|(limit, maximum)| Some((limit, self.due(limit, maximum)?)));
        due.min_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    fn due(&self, limit: SearchLimit, maximum: u64) -> Option<f64> {
        let Spent { time, held_seconds, .. } = self.spent;
        match limit {
            SearchLimit::Seconds => Some(maximum as f64),
            SearchLimit::SlotSeconds => {
                let slots = f64::from(self.config.slots);
                let left = maximum as f64 - slots * held_seconds;
                let slots_held = slots * f64::from(self.num_busy);
                match left > 0.0 {
                    true => (slots_held > 0.0).then(|| time + left / slots_held),
                    false => Some(time),
                }
            }
            SearchLimit::Units => None,
        }
    }

    /// Counts the result of a trial. If it reaches the limit on units, returns the first limit, in
    /// the order of the fields, that is reached now.
    pub(super) fn add_result(&mut self, trial: u32, units: u64) -> Option<SearchLimit> {
        let spent = &mut self.spent;
        let length = &mut spent.lengths[trial as usize];
        spent.units = spent.units.saturating_add(units.saturating_sub(*length));
        *length = units.max(*length);
        let (now, spent_units) = (spent.time, spent.units);
        let is_reached = self.config.limits.units.is_some_and(|maximum| spent_units >= maximum);
        let of_time = self.next_limit().filter(|(_, time)| *time <= now);
        is_reached.then(|| of_time.map_or(SearchLimit::Units, |(limit, _)| limit))
    }
}
