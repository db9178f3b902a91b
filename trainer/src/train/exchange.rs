//! The exchange of a step: counts, metrics and stop requests travel with the gradients.
//!
//! They are the head of the all-reduce, numbers in double precision:
//!
//! ```text
//! position | stop requests | new names | per metric: sum, count, ranks | counts of the gradients
//! ```
//!
//! Each rank adds its numbers, and all ranks read the same sums. The sums of integers are exact to
//! 2^53. Other sums are added in rank order, also without gradients: `sum_f64` adds many numbers in
//! another order.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use burn::module::Module;

use super::directives::{STOP_NUMBERS, StopState};
use super::run::Run;
use crate::Result;
use crate::collective::{Collective, all_gather_cbor};
use crate::optim::GradientSum;
use crate::step::{Metrics, UnreadMetrics};

/// Number of names that are kept although the current step may not have them. A program that
/// changes its names in each step would otherwise collect them.
const NAMES_MAX: usize = 256;
/// Numbers per metric.
const METRIC_NUMBERS: usize = 3;
/// Sum or count of a metric on a rank that lacks it. Adding it to any number, also to -0, returns
/// that number.
const NOTHING: f64 = -0.0;

/// Names of the metrics of steps that all ranks know, in order.
#[derive(Debug, Default)]
pub(super) struct MetricNames(Vec<String>);

impl MetricNames {
    fn contain(&self, metrics: &Metrics) -> bool {
        metrics.names().all(|name| self.0.binary_search(name).is_ok())
    }

    fn to_numbers(&self, metrics: &Metrics) -> impl Iterator<Item = f64> {
        self.0.iter().flat_map(move |name| match metrics.sum_and_count(name) {
            Some((sum, count)) => [sum, count, 1.0],
            None => [NOTHING, NOTHING, 0.0],
        })
    }

    /// Returns the metrics over all ranks, except names that no rank has.
    fn read_sums(&self, sums: &[f64]) -> Metrics {
        let mut metrics = Metrics::default();
        for (name, sums) in self.0.iter().zip(sums.chunks_exact(METRIC_NUMBERS)) {
            if sums[2] > 0.0 {
                metrics.insert(name, sums[0], sums[1]);
            }
        }
        metrics
    }

    /// Adds the names of all ranks.
    fn agree(&mut self, ranks: &dyn Collective, local: &Metrics) -> Result<()> {
        let local: Vec<String> = local.names().cloned().collect();
        let mut names = all_gather_cbor(ranks, "names of metrics", local)?.concat();
        if self.0.len() <= NAMES_MAX {
            names.append(&mut self.0);
        }
        names.sort_unstable();
        names.dedup();
        self.0 = names;
        Ok(())
    }
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// All-reduces the metrics of a step, and the gradients if there are any. Stop requests travel
    /// with them, so that all ranks see them at the same point of the program. With one rank,
    /// returns its metrics unread.
    ///
    /// # Errors
    ///
    /// Fails if another rank exited, or is at a different position.
    pub(super) fn exchange_step(
        &mut self,
        position: &str,
        local: UnreadMetrics,
        gradients: Option<GradientSum>,
    ) -> Result<(UnreadMetrics, Option<GradientSum>)> {
        let (context, ranks) = (self.context, self.context.distributed().collective());
        if ranks.size() == 1 {
            return Ok((local, gradients));
        }
        let local = local.read();
        let mut head = self.head(position, &local);
        let gradients = match gradients {
            Some(sum) => {
                let compression = context.config.gradient_compression;
                let (model, state) = (&*self.model, &mut self.all_reduce);
                Some(sum.all_reduce(model, ranks, &mut head, compression, state)?)
            }
            None => {
                ranks.sum_segments(&mut head, &mut [])?;
                None
            }
        };
        check_position(ranks, position, head[0])?;
        if head[NEW_NAMES] > 0.0 {
            self.metric_names.agree(ranks, &local)?;
            head = self.head(position, &local);
            ranks.sum_segments(&mut head, &mut [])?;
        }
        let mut stop_state = [0.0; STOP_NUMBERS];
        stop_state.copy_from_slice(&head[1..NEW_NAMES]);
        self.stop_state = StopState::from_sums(stop_state);
        Ok((self.metric_names.read_sums(&head[NEW_NAMES + 1..]).into(), gradients))
    }

    /// Returns this rank's numbers, except the counts of its gradients.
    fn head(&self, position: &str, local: &Metrics) -> Vec<f64> {
        let rank = self.context.distributed().rank();
        let mut head = vec![position_number(position)];
        head.extend(self.local_stop_state().to_numbers(rank));
        head.push((!self.metric_names.contain(local)).into());
        head.extend(self.metric_names.to_numbers(local));
        head
    }
}

/// Index of the number of ranks that have a metric that the others may not know.
const NEW_NAMES: usize = 1 + STOP_NUMBERS;

/// Returns a number that identifies a position, so that its sum over all ranks is exact.
fn position_number(position: &str) -> f64 {
    let mut hasher = DefaultHasher::new();
    position.hash(&mut hasher);
    f64::from((hasher.finish() >> 32) as u32)
}

/// Fails if ranks are at different positions: their sums would be silently wrong.
fn check_position(ranks: &dyn Collective, position: &str, sum: f64) -> Result<()> {
    if sum == position_number(position) * ranks.size() as f64 {
        return Ok(());
    }
    // Names the rank that is elsewhere.
    all_gather_cbor(ranks, position, ())?;
    Err(format!("another rank is not at `{position}`; make the same calls on all ranks").into())
}
