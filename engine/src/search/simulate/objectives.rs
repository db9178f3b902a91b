//! Objectives after the searched metric, and the Pareto front.

use stoker_api::experiment::Objective;

use super::{ParetoPoint, Run};
use crate::search::pareto;
use crate::search::rung::Loss;

impl Run<'_> {
    /// Returns the losses of the objectives after the searched metric. A missing value ranks last.
    pub(super) fn others(&self, trial: u32, units: u64) -> Vec<Loss> {
        let loss = |objective: &Objective| {
            Loss::of_metric(self.value(objective, trial, units), objective.smaller_is_better)
        };
        self.config.other_objectives.iter().map(loss).collect()
    }

    /// Returns the value of an objective after the searched metric. NaN if the curve has none at or
    /// below this length.
    fn value(&self, objective: &Objective, trial: u32, units: u64) -> f64 {
        let values = self.curves[trial as usize].others.get(&objective.metric);
        let latest = values.and_then(|values| values.range(..=units).next_back());
        latest.map_or(f64::NAN, |(_, value)| *value)
    }

    /// Returns the trials that no other one surpasses, by their latest results. `None` with one
    /// objective.
    pub(super) fn pareto(&self) -> Option<Vec<ParetoPoint>> {
        if self.config.other_objectives.is_empty() {
            return None;
        }
        let (mut trials, mut losses): (Vec<(u32, u64)>, Vec<Vec<Loss>>) = (vec![], vec![]);
        for (trial, entry) in (0_u32..).zip(self.search.book().trials()) {
            if let Some((units, loss)) = entry.results.last()
                && let Some(others) = entry.others.last()
            {
                trials.push((trial, *units));
                losses.push(std::iter::once(*loss).chain(others.iter().copied()).collect());
            }
        }
        let all: Vec<usize> = (0..trials.len()).collect();
        let front = pareto::front(&losses, &all).into_iter().map(|i| trials[i]);
        Some(front.map(|(trial, units)| self.point(trial, units)).collect())
    }

    fn point(&self, trial: u32, units: u64) -> ParetoPoint {
        let others = self.config.other_objectives.iter();
        let others = others.map(|objective| self.value(objective, trial, units));
        // The metric exists, because the trial has a result.
        let metric = self.metric(trial, units).unwrap_or(f64::NAN);
        ParetoPoint { trial, units, values: std::iter::once(metric).chain(others).collect() }
    }
}
