//! Trials of an experiment: numbers by state, and a table with the reasons of their states.

use std::collections::BTreeSet;

use stoker_api::experiment::Searcher;
use stoker_api::number;
use stoker_engine::experiment::explain::{DisplayState, metric};
use stoker_engine::trial::{TrialRecord, granted_units};

use crate::cluster::text::section;
use crate::explain::Explained;
use crate::run::MetricRanking;

/// Maximum number of trials in the table.
const TRIALS_MAX: usize = 20;
/// Maximum number of trials in the table because they train, or because of an error.
const OPEN_MAX: usize = 8;
const ERRORS_MAX: usize = 3;

/// Trials with the explanation of their states.
#[derive(Clone, Copy)]
pub(super) struct TrialTable<'a> {
    pub(super) trials: &'a [&'a TrialRecord],
    pub(super) explained: &'a Explained,
}

impl TrialTable<'_> {
    /// Returns the number of trials by state.
    pub(super) fn counts(&self) -> String {
        let states: Vec<DisplayState> =
            self.trials.iter().map(|trial| self.explained.state(trial)).collect();
        let parts: Vec<String> = DisplayState::ALL
            .iter()
            .map(|state| (state, states.iter().filter(|of| *of == state).count()))
            .filter(|(_, num)| *num > 0)
            .map(|(state, num)| format!("{num} {}", state.as_str().to_lowercase()))
            .collect();
        match self.trials.len() {
            0 => "none".to_owned(),
            num => format!("{num}: {}", parts.join(", ")),
        }
    }

    /// Returns the table of trials, the best first. If results of several lengths differ, it has a
    /// column for the best one.
    pub(super) fn section(&self, searcher: &Searcher, id: &str) -> String {
        let ranking = MetricRanking {
            metric: &searcher.metric,
            smaller_is_better: searcher.smaller_is_better,
        };
        let mut trials = self.trials.to_vec();
        trials.sort_by(|one, other| ranking.compare(one, other));
        let has_best = ranking.has_other_best(&trials);
        let shown = self.shown(&trials);
        let rows: Vec<Vec<String>> = trials
            .iter()
            .filter(|trial| shown.contains(&trial.spec.index))
            .map(|trial| self.row(trial, &ranking, has_best))
            .collect();
        let title = match shown.len() < trials.len() {
            false => "Trials".to_owned(),
            true => format!(
                "Trials ({} of {}; `stoker trial list {id}` lists all)",
                shown.len(),
                trials.len()
            ),
        };
        let unit = searcher.max_length.get().map_or("length", |(unit, _)| unit.plural());
        let (metric, unit) = (searcher.metric.to_uppercase(), unit.to_uppercase());
        let mut header = vec!["TRIAL", "STATE", &metric, &unit, "WHY"];
        if has_best {
            header.insert(3, "BEST");
        }
        section(&title, &header, &rows)
    }

    /// Returns the indices of the trials to show: some that train and the latest with an error, and
    /// the best of the others. `trials` are sorted.
    fn shown(&self, trials: &[&TrialRecord]) -> BTreeSet<u32> {
        let index = |trial: &&TrialRecord| trial.spec.index;
        if trials.len() <= TRIALS_MAX {
            return trials.iter().map(index).collect();
        }
        let is_open = |trial: &&&TrialRecord| {
            use DisplayState::{Queued, Running, Waiting};
            matches!(self.explained.state(trial), Running | Queued | Waiting)
        };
        let has_failed = |trial: &&&TrialRecord| {
            matches!(self.explained.state(trial), DisplayState::Failed | DisplayState::Invalid)
        };
        let open = self.trials.iter().filter(is_open);
        let errors = self.trials.iter().rev().filter(has_failed);
        let chosen = open.take(OPEN_MAX).chain(errors.take(ERRORS_MAX));
        let mut shown: BTreeSet<u32> = chosen.map(index).collect();
        let num_best = TRIALS_MAX - shown.len();
        let best: Vec<u32> = trials
            .iter()
            .map(index)
            .filter(|trial| !shown.contains(trial))
            .take(num_best)
            .collect();
        shown.extend(best);
        shown
    }

    fn row(&self, trial: &TrialRecord, ranking: &MetricRanking<'_>, has_best: bool) -> Vec<String> {
        let dash = || "-".to_owned();
        let value =
            |text: Option<String>| text.map_or_else(dash, |text| metric(number::parse(&text)));
        let mut cells = vec![
            trial.spec.index.to_string(),
            self.explained.state(trial).as_str().to_owned(),
            value(ranking.metric_of(trial)),
            granted_units(&trial.spec).to_string(),
            self.explained.why(trial.spec.index).unwrap_or_else(dash),
        ];
        if has_best {
            cells.insert(3, value(ranking.best_of(trial)));
        }
        cells
    }
}
