//! Sentences of an explanation. They are predicates: `promoted to 4 epochs: ...`.

use std::fmt;

use stoker_api::experiment::Unit;

use super::{Cause, Comparison, Decision, Kind, MedianComparison, Next, RungNext, State};
use crate::search::view::{NextPromotion, Rule};

/// Returns a length with its unit, such as `1 epoch`.
pub fn length(units: u64, unit: Unit) -> String {
    let unit = match unit {
        Unit::Records => "record",
        Unit::Batches => "batch",
        Unit::Epochs => "epoch",
        Unit::Units => "unit",
    };
    let plural = match (units, unit) {
        (1, _) => "",
        (_, "batch") => "es",
        _ => "s",
    };
    format!("{units} {unit}{plural}")
}

/// Returns a metric with at most four decimals, or four significant digits if it is very small or
/// large. `None` is NaN.
pub fn metric(metric: Option<f64>) -> String {
    let Some(metric) = metric else { return "NaN".to_owned() };
    if metric != 0.0 && (metric.abs() < 1e-3 || metric.abs() >= 1e6) {
        return format!("{metric:.3e}");
    }
    let text = format!("{metric:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

pub(super) fn ordinal(number: u32) -> String {
    let suffix = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{suffix}")
}

fn count(number: u32, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Returns `trial 3`, `trials 3 and 5` or `trials 3, 5 and 9`.
fn trials(indexes: &[u32]) -> String {
    match indexes {
        [] => "no trial".to_owned(),
        [one] => format!("trial {one}"),
        [most @ .., last] => {
            let most: Vec<String> = most.iter().map(u32::to_string).collect();
            format!("trials {} and {last}", most.join(", "))
        }
    }
}

/// Returns `the best 3 continue`, and the metric of the last of them if the trial is not one of
/// them.
fn cut(comparison: &Comparison, adverb: &str) -> String {
    let Comparison { continuing, continues, missing, cut_metric, .. } = *comparison;
    let has_cut = !continues && missing == 0;
    match continuing {
        0 => "none continues".to_owned(),
        1 if has_cut => format!("{adverb}the best one continues (it has {})", metric(cut_metric)),
        1 => format!("{adverb}the best one continues"),
        num if has_cut => {
            let (last, metric) = (ordinal(num), metric(cut_metric));
            format!("{adverb}the best {num} continue (the {last} has {metric})")
        }
        num => format!("{adverb}the best {num} continue"),
    }
}

impl Decision {
    fn length(&self) -> String {
        length(self.units, self.unit)
    }

    /// Returns the decision as a sentence about its trial.
    pub fn sentence(&self) -> String {
        format!("Trial {} {self}", self.trial)
    }

    /// Returns `0.31 ranks 2nd of 9 results`.
    fn rank(&self, comparison: &Comparison) -> String {
        let Comparison { rank, results, rung, .. } = comparison;
        let of = match self.rule {
            Rule::Population => format!("{results} in round {rung}"),
            _ => count(*results, "result"),
        };
        format!("{} ranks {} of {of}", metric(comparison.metric), ordinal(*rank))
    }

    fn created(&self) -> String {
        let bracket = match (self.bracket, self.rule) {
            (None, _) => String::new(),
            (Some(round), Rule::Population) => format!(" in round {}", round + 1),
            (Some(bracket), _) => format!(" in bracket {bracket}"),
        };
        let why = match (&self.cause, self.source, self.rule) {
            (_, Some(source), _) => format!(" as a copy of trial {source}"),
            (_, None, Rule::External) => " by the external searcher".to_owned(),
            (Cause::Began, ..) => " when the search began".to_owned(),
            (Cause::Ended { trial }, _, Rule::Population) => format!(" to replace trial {trial}"),
            (_, _, Rule::Promotion | Rule::Synchronous) => {
                " because a place was free and no trial could be promoted".to_owned()
            }
            _ => " because a place was free".to_owned(),
        };
        format!("created{bracket}{why}; trains to {}", self.length())
    }

    fn promoted(&self) -> String {
        let verb = match self.rule {
            Rule::Promotion | Rule::Synchronous => "promoted",
            Rule::FullLength | Rule::StopOnce | Rule::Population | Rule::External => "continues",
        };
        let length = self.length();
        if self.rule == Rule::External {
            return format!("{verb} to {length}: the external searcher decided so");
        }
        let Some(comparison) = &self.comparison else { return format!("{verb} to {length}") };
        let rank = self.rank(comparison);
        let at = match self.rule {
            Rule::Population => String::new(),
            _ => format!(" at {}", super::sentences::length(comparison.units, self.unit)),
        };
        match comparison.missing {
            0 => format!("{verb} to {length}: {rank}{at}, and {}", cut(comparison, "")),
            missing => {
                let results = match missing {
                    1 => "with any value of the missing result".to_owned(),
                    missing => format!("with any values of the {missing} missing results"),
                };
                let num = comparison.continuing;
                let stays = format!("stays among the best {num} {results}");
                format!("{verb} to {length}: {rank}{at}, and {stays}")
            }
        }
    }

    fn counted_as_promoted(&self) -> String {
        let rank = self.comparison.as_ref().map(|comparison| {
            let at = super::sentences::length(comparison.units, self.unit);
            let (rank, results) = (ordinal(comparison.rank), count(comparison.results, "result"));
            format!("; it ranks {rank} of {results} at {at}")
        });
        let rank = rank.unwrap_or_default();
        format!("counts as promoted to {}, but has ended and does not train{rank}", self.length())
    }

    fn paused(&self) -> String {
        let length = self.length();
        if self.rule == Rule::External {
            return format!("paused at {length} by the external searcher");
        }
        let Some(comparison) = &self.comparison else { return format!("paused at {length}") };
        let rank = self.rank(comparison);
        let why = if comparison.continues {
            format!("{}, and it waits for a free place", cut(comparison, ""))
        } else if comparison.results < comparison.required {
            format!("and the first promotion needs {} results", comparison.required)
        } else if comparison.missing > 0 {
            let missing = match comparison.missing {
                1 => "1 result is".to_owned(),
                missing => format!("{missing} results are"),
            };
            format!("{}, and {missing} missing", cut(comparison, ""))
        } else {
            format!("and {}", cut(comparison, ""))
        };
        format!("paused at {length}: {rank}, {why}")
    }

    fn waits(&self) -> String {
        let length = self.length();
        let missing =
            self.comparison.as_ref().map(|comparison| (comparison.missing, comparison.rung));
        match missing {
            Some((missing @ 1.., round)) => {
                let trials = count(missing, "trial");
                let verb = if missing == 1 { "trains" } else { "train" };
                format!("waits at {length}: {trials} of round {round} still {verb}")
            }
            _ if self.rule == Rule::External => {
                format!("waits at {length} for the external searcher")
            }
            _ => format!("waits at {length} for a decision"),
        }
    }

    fn reopened(&self) -> String {
        let why = match self.cause {
            Cause::Edited => "after an edit of the search",
            _ => "by the user",
        };
        format!("reopened {why}; it may train to {}", self.length())
    }

    fn stopped(&self) -> String {
        let length = self.length();
        if let Some(MedianComparison { best_metric, median, others }) = self.median {
            let (best, median) = (metric(best_metric), metric(median));
            let others = count(others, "other trial");
            return format!(
                "stopped at {length}: its best metric {best} is worse than {median}, the median \
                 of the means of {others}"
            );
        }
        if self.cause == Cause::LimitReached {
            return format!("stopped on the way to {length}: a limit of the search was reached");
        }
        if self.rule == Rule::External {
            return format!("stopped at {length} by the external searcher");
        }
        let comparison = self.comparison.as_ref().filter(|comparison| !comparison.continues);
        let Some(comparison) = comparison else {
            return format!("stopped at {length} by the search");
        };
        let (rank, cut) = (self.rank(comparison), cut(comparison, "only "));
        match self.rule {
            Rule::Promotion | Rule::Synchronous => {
                format!("stopped at {length}: {rank}, {cut}, and no further result can arrive")
            }
            _ => format!("stopped at {length}: {rank}, and {cut}"),
        }
    }

    fn completed(&self) -> String {
        let length = self.length();
        match (&self.comparison, &self.cause) {
            (Some(comparison), _) => {
                format!("completed all {length}: {} there", self.rank(comparison))
            }
            (None, Cause::Result { trial, metric: result, .. }) if *trial == self.trial => {
                format!("completed all {length} with {}", metric(*result))
            }
            (None, _) => format!("completed all {length}"),
        }
    }

    /// Returns the end of a program. In a rung, it counts as the worst result.
    fn ended(&self, verb: &str) -> String {
        let length = self.length();
        match &self.comparison {
            Some(comparison) if comparison.metric.is_some() => format!("{verb} at {length}"),
            Some(_) if self.rule != Rule::Population => {
                format!("{verb} before {length}, and counts as the worst result there")
            }
            _ => format!("{verb} before {length}"),
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&match self.decision {
            Kind::Created => self.created(),
            Kind::Promoted => self.promoted(),
            Kind::CountedAsPromoted => self.counted_as_promoted(),
            Kind::Paused => self.paused(),
            Kind::Waits => self.waits(),
            Kind::Stopped => self.stopped(),
            Kind::Completed => self.completed(),
            Kind::EndedEarly => self.ended("ended by itself"),
            Kind::Failed => self.ended("failed"),
            Kind::Invalid => "rejected its hyperparameters, and leaves every comparison".to_owned(),
            Kind::Cancelled => self.ended("was cancelled"),
            Kind::Deleted => "was deleted, and its results leave every comparison".to_owned(),
            Kind::Reopened => self.reopened(),
        })
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Training => "training",
            Self::Waiting => "waiting",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Completed => "completed",
            Self::EndedEarly => "ended early",
            Self::Failed => "failed",
            Self::Invalid => "invalid",
            Self::Cancelled => "cancelled",
            Self::Deleted => "deleted",
        })
    }
}

impl fmt::Display for Next {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begins => f.write_str("creates the first trials"),
            Self::Promotes { trial, units, unit } => {
                let length = length(*units, *unit);
                write!(f, "promotes trial {trial} to {length} when a place is free")
            }
            Self::Creates { remaining: 1 } => {
                f.write_str("creates the last trial when a place is free")
            }
            Self::Creates { remaining } => {
                write!(f, "creates a trial when a place is free, {remaining} are left")
            }
            Self::CreatesAfterResult { remaining } => {
                let trials = count(*remaining, "trial");
                write!(f, "creates {trials} only after a result, because no ended trial has one")
            }
            Self::WaitsForAnswer { call } => {
                write!(f, "waits for the external searcher's answer to call {call}")
            }
            Self::WaitsFor { trials: waited, training, round } => {
                let waited = match *training as usize == waited.len() {
                    true => trials(waited),
                    false => count(*training, "trial"),
                };
                match (training, round) {
                    (0, _) => f.write_str("waits for a decision"),
                    (1, Some(round)) => write!(f, "round {round} ends when {waited} has a result"),
                    (_, Some(round)) => write!(f, "round {round} ends when {waited} have results"),
                    (1, None) => write!(f, "waits for the result of {waited}"),
                    (_, None) => write!(f, "waits for results of {waited}"),
                }
            }
            Self::Finished { trials: 1 } => f.write_str("finished, its trial has ended"),
            Self::Finished { trials } => write!(f, "finished, all {trials} trials have ended"),
        }
    }
}

impl fmt::Display for RungNext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value =
            |loss: crate::search::rung::Loss| metric(loss.to_metric(self.smaller_is_better));
        let side = if self.smaller_is_better { "below" } else { "above" };
        match self.next {
            NextPromotion::Top => f.write_str("last rung"),
            NextPromotion::Trial(trial) => write!(f, "promotes trial {trial} when a place is free"),
            NextPromotion::AtResults(required) => {
                let left = required - (self.results as usize).min(required);
                write!(f, "first promotion at {required} results, {left} to go")
            }
            NextPromotion::Below(loss) => {
                write!(f, "promotes the next result {side} {}", value(loss))
            }
            NextPromotion::AtMost(loss) => {
                write!(f, "continues the next result at or {side} {}", value(loss))
            }
            NextPromotion::AfterResults(missing) => {
                write!(f, "waits for {}", count(missing as u32, "result"))
            }
            NextPromotion::Closed => f.write_str("closed, every result is in"),
        }
    }
}
