//! Explains a search: why each trial was created, promoted, paused or stopped, and what each
//! bracket does next.
//!
//! ```text
//!   turn + search after it -> decisions   (explainer)
//!   decisions + search now -> explanation (explainer, brackets)
//!   explanation            -> sentences   (sentences), JSON
//! ```
//!
//! An explanation follows from recorded turns alone. Sentences are a pure function of the data.

mod brackets;
mod display;
mod explainer;
mod json;
mod sentences;

use serde::Serialize;
use stoker_api::experiment::Unit;
use stoker_api::time::Timestamp;

pub use self::display::DisplayState;
pub(super) use self::explainer::{Context, Explainer, decisions};
pub use self::sentences::{length, metric};
use crate::search::view::{NextPromotion, Rule};

/// Search of an experiment, explained.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// Trials by index.
    pub trials: Vec<TrialExplanation>,
    /// Brackets by index.
    pub brackets: Vec<BracketExplanation>,
}

impl TrialExplanation {
    /// Returns the state, including an end that the search has not taken in.
    pub fn state(&self) -> State {
        self.end.unwrap_or(self.state)
    }

    /// Returns the reason for the state as a sentence without its subject.
    pub fn reason(&self) -> String {
        let why = self.why.as_ref().map(ToString::to_string);
        match (self.end, why) {
            (None, Some(why)) => why,
            (Some(end), Some(why)) => format!("{end}; the last decision was: {why}"),
            (_, None) => self.state().to_string(),
        }
    }
}

impl Explanation {
    /// Takes in that the experiment has ended: nothing follows, even if the search has not ended.
    pub fn close(&mut self) {
        for bracket in &mut self.brackets {
            bracket.next = Next::Finished { trials: bracket.created };
            let below_top = bracket.rungs.len().saturating_sub(1);
            for rung in &mut bracket.rungs[..below_top] {
                rung.next.next = NextPromotion::Closed;
            }
        }
    }

    /// Returns all decisions in the order in which they were made.
    pub fn decisions(&self) -> Vec<&Decision> {
        let mut decisions: Vec<&Decision> =
            self.trials.iter().flat_map(|trial| &trial.decisions).collect();
        decisions.sort_by_key(|decision| (decision.order, decision.position));
        decisions
    }
}

/// State of a trial, and why it has that state.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialExplanation {
    /// Index of the trial.
    pub trial: u32,
    /// Bracket of the trial; for a population, the round in which it began. From 0.
    pub bracket: u32,
    /// State that follows from the decisions.
    pub state: State,
    /// State by a recorded end that no turn has taken in, such as after the user's cancel.
    pub end: Option<State>,
    /// Granted length.
    pub units: u64,
    /// Reason for the state. A paused trial is compared with the results that are there now. Unset
    /// if the turn that created the trial was deleted.
    pub why: Option<Decision>,
    /// All decisions about the trial, oldest first.
    pub decisions: Vec<Decision>,
}

/// State of a trial in its search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum State {
    /// Trains to its granted length, or waits for slots.
    Training,
    /// Has a result, and waits for a decision.
    Waiting,
    /// Holds no slots, and may continue.
    Paused,
    /// Stopped by the search before the full length.
    Stopped,
    /// Has the full length.
    Completed,
    /// The program ended by itself.
    EndedEarly,
    /// The program failed.
    Failed,
    /// The program rejected its hyperparameters.
    Invalid,
    /// Cancelled or killed by the user.
    Cancelled,
    /// Deleted by the user.
    Deleted,
}

/// Kind of a decision about a trial, or of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// Created.
    Created,
    /// Trains to a greater length.
    Promoted,
    /// Promoted after its end: it keeps its rank, and does not train.
    CountedAsPromoted,
    /// Paused.
    Paused,
    /// Waits for the results of other trials.
    Waits,
    /// Stopped by the search before the full length.
    Stopped,
    /// Completed the full length.
    Completed,
    /// Ended by itself.
    EndedEarly,
    /// Failed.
    Failed,
    /// Rejected its hyperparameters.
    Invalid,
    /// Cancelled by the user.
    Cancelled,
    /// Deleted by the user.
    Deleted,
    /// Continues after its end.
    Reopened,
}

/// One decision about a trial, with all that it follows from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Position of the turn in the order of the experiment.
    pub order: u64,
    /// Position among the decisions of the turn.
    #[serde(skip)]
    pub position: u32,
    /// Time of the event that led to the decision. Unset in records of earlier versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// Index of the trial.
    pub trial: u32,
    /// Bracket of the trial; for a population, the round in which it began. From 0. Unset if there
    /// is only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bracket: Option<u32>,
    /// Kind of the decision.
    pub decision: Kind,
    /// New length for `created`, `promoted` and `countedAsPromoted`, otherwise the length of the
    /// decision; for `reopened`, the granted length.
    pub units: u64,
    /// Unit of all lengths.
    pub unit: Unit,
    /// Event that led to the decision.
    pub cause: Cause,
    /// Trial that a new one copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<u32>,
    /// Rule by which trials continue.
    #[serde(serialize_with = "json::rule")]
    pub rule: Rule,
    /// Comparison with the other trials, if the method compares them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
    /// Comparison by which median stopping stopped the trial.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub median: Option<MedianComparison>,
}

/// Event that led to a decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum Cause {
    /// The search began.
    Began,
    /// A trial had a result.
    Result {
        /// Index of the trial.
        trial: u32,
        /// Length of the result.
        units: u64,
        /// Searched metric; `None` for NaN.
        metric: Option<f64>,
    },
    /// A trial ended by itself or by the user.
    Ended {
        /// Index of the trial.
        trial: u32,
    },
    /// The user deleted trials.
    Deleted {
        /// Indexes of the trials.
        trials: Vec<u32>,
    },
    /// A limit of the search was reached.
    LimitReached,
    /// The user edited the search.
    Edited,
    /// The external searcher answered a question.
    Answered {
        /// Number of the question.
        call: u64,
    },
    /// The user asked to continue trials that had ended.
    Reopened,
    /// The event is of another kind, or its record was deleted.
    Other,
}

/// Comparison of a trial with the running means of the others, at the time of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MedianComparison {
    /// Best metric of the trial so far.
    pub best_metric: Option<f64>,
    /// Median of the other trials' means up to the same length.
    pub median: Option<f64>,
    /// Number of the other trials.
    pub others: u32,
}

/// Comparison of a trial with the others of its rung, at the time of a decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// Rung, from 1; for a population, the round.
    pub rung: u32,
    /// Number of rungs of the bracket.
    pub rungs: u32,
    /// Length of the rung.
    pub units: u64,
    /// Searched metric at this length. `None` for NaN, and for a trial that ended before.
    pub metric: Option<f64>,
    /// Rank, from 1.
    pub rank: u32,
    /// Number of results in the rung.
    pub results: u32,
    /// Number of trials of the rung that continue.
    pub continuing: u32,
    /// Whether this trial is one of them.
    pub continues: bool,
    /// Metric of the worst trial that continues by the results that are there. `None` for NaN, and
    /// if no trial continues yet.
    pub cut_metric: Option<f64>,
    /// Number of results before which no trial continues; 0 if any number suffices.
    pub required: u32,
    /// Number of results that the decision does not know yet, if the method waits for them.
    pub missing: u32,
    /// The best other trials of the rung, at most eight, best first.
    pub compared_with: Vec<Peer>,
}

/// A trial in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peer {
    /// Index of the trial.
    pub trial: u32,
    /// Searched metric at the same length. `None` for NaN, and for a trial that ended before.
    pub metric: Option<f64>,
}

/// Counts of a bracket, its rungs, and what it does next.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BracketExplanation {
    /// Index of the bracket, from 0.
    pub bracket: u32,
    /// Number of trials created.
    pub created: u32,
    /// Number of trials still to be created.
    pub remaining: u32,
    /// Number of trials that train or wait for slots.
    pub training: u32,
    /// Number of trials that wait for a decision.
    pub waiting: u32,
    /// Number of paused trials.
    pub paused: u32,
    /// Number of promotions.
    pub promotions: u32,
    /// Number of trials that the search stopped before the full length.
    pub stopped: u32,
    /// Number of trials that have the full length.
    pub completed: u32,
    /// Number of trials that ended otherwise.
    pub ended: u32,
    /// Maximum number of trials that train or wait. `None` means no limit. Synchronous brackets
    /// share it.
    pub places: Option<u32>,
    /// Next action of the bracket.
    #[serde(serialize_with = "json::with_text")]
    pub next: Next,
    /// Rungs, shortest first. Empty if all trials train to the full length.
    pub rungs: Vec<RungExplanation>,
}

/// Next action of a bracket.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum Next {
    /// The search has not begun.
    Begins,
    /// Promotes a trial when a place is free.
    Promotes {
        /// Index of the trial.
        trial: u32,
        /// Length of the next rung.
        units: u64,
        /// Unit of the length.
        unit: Unit,
    },
    /// Creates a trial when a place is free.
    Creates {
        /// Number of trials still to be created.
        remaining: u32,
    },
    /// Creates no trial before another one has a result, because all trials that ended have failed.
    CreatesAfterResult {
        /// Number of trials still to be created.
        remaining: u32,
    },
    /// Waits for the answer of the external searcher.
    WaitsForAnswer {
        /// Number of the question.
        call: u64,
    },
    /// Waits for results.
    WaitsFor {
        /// The first trials that train, at most eight.
        trials: Vec<u32>,
        /// Number of trials that train.
        training: u32,
        /// Round that ends with these results, from 1, in a population.
        #[serde(skip_serializing_if = "Option::is_none")]
        round: Option<u32>,
    },
    /// All trials have ended.
    Finished {
        /// Number of trials.
        trials: u32,
    },
}

/// A rung of a bracket.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RungExplanation {
    /// Rung, from 1; for a population, the round.
    pub rung: u32,
    /// Length of the rung.
    pub units: u64,
    /// Number of trials that train to this length.
    pub training: u32,
    /// Number of results. A trial that ended on the way to this length counts as the worst.
    pub results: u32,
    /// Number of trials that were promoted from this rung.
    pub promoted: u32,
    /// Number of trials that are paused or wait here.
    pub paused: u32,
    /// Number of trials that ended here.
    pub ended: u32,
    /// Metric of the worst trial that continues. `None` for NaN, and if no trial continues.
    pub cut_metric: Option<f64>,
    /// Best metric. `None` without one.
    pub best_metric: Option<f64>,
    /// Next promotion.
    #[serde(serialize_with = "json::with_text")]
    pub next: RungNext,
}

/// Next promotion from a rung.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RungNext {
    next: NextPromotion,
    results: u32,
    smaller_is_better: bool,
}

#[cfg(test)]
mod tests;
