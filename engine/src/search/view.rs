//! Rungs as a search method sees them, to explain its decisions.

use super::book::{Book, TrialState};
use super::rung::{Loss, Rung};

/// Number of other trials that a [`Standing`] names.
pub const PEERS_MAX: usize = 8;

/// Rule by which a method continues trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Every trial trains to the full length.
    FullLength,
    /// A trial continues while it is among the best of its rung. Others are paused.
    Promotion,
    /// A trial continues if it is among the best of its rung at its result. Others are stopped.
    StopOnce,
    /// A trial continues once no missing result can change that it is among the best.
    Synchronous,
    /// All trials of a round are compared after its last result.
    Population,
    /// A service of the user decides.
    External,
}

/// Rank of a trial among the results at one length.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// Rung, from 0.
    pub rung: usize,
    /// Number of rungs of the bracket.
    pub num_rungs: usize,
    /// Length of the rung.
    pub units: u64,
    /// Loss of the trial.
    pub loss: Loss,
    /// Rank of the trial, from 1.
    pub rank: usize,
    /// Number of results in the rung.
    pub num_results: usize,
    /// Number of trials of the rung that continue.
    pub num_continuing: usize,
    /// Whether the trial is one of those that continue, by the results that are there.
    pub continues: bool,
    /// Loss of the worst trial that continues.
    pub cut: Option<Loss>,
    /// Number of results before which no trial continues.
    pub num_required: usize,
    /// Number of results that can still arrive, if the method waits for them.
    pub num_missing: usize,
    /// The best other trials of the rung, at most [`PEERS_MAX`], best first.
    pub peers: Vec<(u32, Loss)>,
}

/// Comparison of a stopped trial with the running means of the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MedianStanding {
    /// Best loss of the trial.
    pub best: Loss,
    /// Median of the other trials' running means at the same length.
    pub median: Loss,
    /// Number of the other trials.
    pub num_others: usize,
}

/// Next promotion of a rung.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NextPromotion {
    /// The rung is the last one.
    Top,
    /// This trial continues when a place is free.
    Trial(u32),
    /// No trial continues before this number of results.
    AtResults(usize),
    /// The next result continues if it is better than this loss.
    Below(Loss),
    /// The next result continues if it is at least as good as this loss.
    AtMost(Loss),
    /// The rung waits for this number of results.
    AfterResults(usize),
    /// No further result can arrive.
    Closed,
}

/// A rung of a bracket.
#[derive(Clone, Debug, PartialEq)]
pub struct RungView {
    /// Length of the rung.
    pub units: u64,
    /// Number of trials that train to this length.
    pub num_training: usize,
    /// Number of results.
    pub num_results: usize,
    /// Number of trials that were promoted from here.
    pub num_promoted: usize,
    /// Number of paused or waiting trials.
    pub num_paused: usize,
    /// Number of other trials, all of which have ended.
    pub num_ended: usize,
    /// Loss of the worst trial that continues.
    pub cut: Option<Loss>,
    /// Best loss.
    pub best: Option<Loss>,
    /// Next promotion.
    pub next: NextPromotion,
}

impl RungView {
    /// Returns a rung with these entries.
    pub(super) fn new(
        units: u64,
        num_training: usize,
        rung: &Rung,
        next: NextPromotion,
        book: &Book,
    ) -> Self {
        let waits = |trial: u32| {
            matches!(book.trial(trial).state, TrialState::Paused | TrialState::Waiting)
        };
        let num_promoted = rung.promoted().count();
        let num_paused =
            rung.ranking().filter(|(trial, _)| waits(*trial) && !rung.is_promoted(*trial)).count();
        Self {
            units,
            num_training,
            num_results: rung.len(),
            num_promoted,
            num_paused,
            num_ended: rung.len() - num_promoted - num_paused,
            cut: rung.cut(),
            best: rung.ranking().next().map(|(_, loss)| loss),
            next,
        }
    }
}

/// Trials that share rungs and are compared with each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BracketView {
    /// Rungs, shortest first. Empty if all trials train to the full length.
    pub rungs: Vec<RungView>,
    /// Number of trials still to be created.
    pub num_missing: u32,
    /// Maximum number of active trials; `None` means no limit. Brackets may share it.
    pub places: Option<u32>,
}
