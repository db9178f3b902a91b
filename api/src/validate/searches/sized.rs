//! Rules of methods whose number of trials follows from lengths.

use serde_json::{Value, json};

use super::super::{TRIALS_MAX, sizes};
use super::Checker;
use crate::experiment::{AdaptiveSearch, HyperbandSearch, SyncHalvingSearch};

/// Remedy for a budget of too many trials.
const LOWER: &str = "lower it, or raise maxLength";

impl Checker<'_> {
    /// Checks synchronous halving, and returns the units of its budget.
    pub(super) fn check_sync_halving(&mut self, search: &SyncHalvingSearch) -> Option<u64> {
        let SyncHalvingSearch { divisor, num_rungs, budget, .. } = search;
        self.check_divisor("syncHalving.divisor", *divisor);
        self.check_rungs("syncHalving.numRungs", *num_rungs, *divisor);
        let units = self.check_budget("syncHalving.budget", budget)?;
        self.check_num_trials("syncHalving.budget", &json!(budget), LOWER, |length| {
            sizes::budget_sizes(length, *divisor, *num_rungs, units)[0]
        });
        Some(units)
    }

    /// Checks adaptive brackets with a budget, and returns its units.
    pub(super) fn check_adaptive(&mut self, search: &AdaptiveSearch) -> Option<u64> {
        let AdaptiveSearch { divisor, budget, .. } = search;
        self.check_divisor("adaptive.divisor", *divisor);
        self.check_max_rungs("adaptive.maxRungs", search.max_rungs);
        self.check_bracket_rungs("adaptive", &search.bracket_rungs, *divisor);
        let units = self.check_budget("adaptive.budget", budget)?;
        self.check_num_trials("adaptive.budget", &json!(budget), LOWER, |length| {
            let rungs = search.rungs(length);
            let share = units / rungs.len() as u64;
            let size = |rungs: &u32| sizes::budget_sizes(length, *divisor, *rungs, share)[0];
            rungs.iter().map(size).sum()
        });
        Some(units)
    }

    pub(super) fn check_hyperband(&mut self, search: &HyperbandSearch) {
        let HyperbandSearch { divisor, num_brackets, .. } = *search;
        self.check_divisor("hyperband.divisor", divisor);
        let remedy = "raise it, or give maxLength in larger units";
        self.check_num_trials("hyperband.divisor", &json!(divisor), remedy, |length| {
            let brackets = sizes::hyperband_sizes(length, divisor, num_brackets);
            brackets.iter().map(|sizes| sizes[0]).sum()
        });
    }

    /// Checks the number of trials that follows from the full length of a trial, unless the search
    /// has other errors.
    fn check_num_trials(
        &mut self,
        path: &str,
        value: &Value,
        remedy: &str,
        num_trials: impl FnOnce(u64) -> u128,
    ) {
        let Some((_, units)) = self.searcher.max_length.get().filter(|(_, units)| *units > 0)
        else {
            return;
        };
        if self.errors.len() > self.num_errors {
            return;
        }
        let num_trials = num_trials(units);
        if num_trials > u128::from(TRIALS_MAX) {
            let rule = format!("leads to {num_trials} trials, more than {TRIALS_MAX}; {remedy}");
            self.push(path, value, &rule);
        }
    }
}
