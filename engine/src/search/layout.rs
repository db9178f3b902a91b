//! Rungs and brackets of the methods that stop trials early.

use std::collections::BTreeMap;

use stoker_api::experiment::SearchMode;
use stoker_api::validate::sizes::{self, bracket_rungs, integer_log, rung_lengths, split_trials};

use super::methods::{AsyncHalvingConfig, BracketConfig};

/// Size of an adaptive ASHA search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptiveAsha {
    /// Full length of a trial.
    pub units: u64,
    /// Trials in all.
    pub max_trials: u32,
    /// Brackets, if `bracket_rungs` is empty.
    pub mode: SearchMode,
    /// Ratio between the sizes of neighboring rungs, at least 2.
    pub divisor: u32,
    /// Maximum number of rungs.
    pub max_rungs: u32,
    /// Numbers of rungs of the brackets.
    pub bracket_rungs: Vec<u32>,
    /// Active trials of all brackets; 0 means that each bracket determines it.
    pub concurrency: u32,
    /// Whether trials are stopped instead of paused.
    pub stop_once: bool,
}

impl AdaptiveAsha {
    /// Returns the brackets, the one with the most rungs first.
    ///
    /// Source: Determined's `adaptive_asha.go`, with exact arithmetic.
    pub fn brackets(&self) -> Vec<AsyncHalvingConfig> {
        let Self { units, max_trials, divisor, .. } = *self;
        let log = |value: u64| integer_log(divisor, value) + 1;
        let rungs_max = self.max_rungs.min(log(units)).min(log(u64::from(max_trials)));
        let mut rungs = self.bracket_rungs.clone();
        if rungs.is_empty() {
            rungs = bracket_rungs(self.mode, rungs_max);
        }
        rungs.sort_unstable_by(|one, other| other.cmp(one));
        let trials = split_trials(max_trials, divisor, &rungs);
        let places = split_concurrency(self.concurrency, divisor, &trials);
        let configs = (0..).zip(rungs).zip(trials.into_iter().zip(places));
        configs
            .map(|((group, num_rungs), (max_trials, concurrency))| AsyncHalvingConfig {
                group,
                lengths: rung_lengths(units, divisor, num_rungs),
                max_trials,
                divisor,
                concurrency,
                stop_once: self.stop_once,
            })
            .collect()
    }
}

/// Splits places over brackets with these numbers of trials; 0 means that each bracket determines
/// its own number.
pub fn split_concurrency(concurrency: u32, divisor: u32, trials: &[u32]) -> Vec<u32> {
    let num_brackets = trials.len() as u32;
    if concurrency == 0 {
        let last = trials.last().copied().unwrap_or(1);
        return vec![last.max(divisor); trials.len()];
    }
    split_evenly(concurrency.max(num_brackets), num_brackets)
}

/// Splits a number evenly; the first parts get one more if it is not divisible.
pub fn split_evenly(total: u32, parts: u32) -> Vec<u32> {
    (0..parts).map(|part| total / parts + u32::from(part < total % parts)).collect()
}

/// Splits trials as [`AdaptiveAsha::brackets`] does, but gives no bracket less than it has made.
pub fn split_trials_above(max_trials: u32, divisor: u32, rungs: &[u32], made: &[u32]) -> Vec<u32> {
    let mut trials = made.to_vec();
    let mut open: Vec<usize> = (0..rungs.len()).collect();
    loop {
        let fixed = (0..rungs.len()).filter(|bracket| !open.contains(bracket));
        let rest = max_trials.saturating_sub(fixed.map(|bracket| made[bracket]).sum());
        if open.is_empty() || rest == 0 {
            return trials;
        }
        let open_rungs: Vec<u32> = open.iter().map(|bracket| rungs[*bracket]).collect();
        let shares: BTreeMap<usize, u32> =
            open.iter().copied().zip(split_trials(rest, divisor, &open_rungs)).collect();
        let num_open = open.len();
        open.retain(|bracket| shares[bracket] >= made[*bracket]);
        if open.len() == num_open {
            shares.into_iter().for_each(|(bracket, share)| trials[bracket] = share);
            return trials;
        }
    }
}

/// Returns the lengths of rungs above `longest`, each `divisor` times the one before. The last one
/// is `units`; none if that is not longer.
pub fn lengths_above(longest: u64, units: u64, divisor: u32) -> Vec<u64> {
    let next = |length: &u64| length.checked_mul(divisor.into());
    let between = std::iter::successors(next(&longest), next).take_while(|length| *length < units);
    between.chain([units]).filter(|length| *length > longest).collect()
}

/// Returns the number of places of one bracket of asynchronous halving. A `concurrency` of 0 means
/// `d^(n-1)`, but at most one for each trial.
pub fn places(concurrency: u32, divisor: u32, num_rungs: u32, max_trials: u32) -> u32 {
    match concurrency {
        0 => divisor.saturating_pow(num_rungs - 1).min(max_trials).max(1),
        concurrency => concurrency,
    }
}

/// Returns one bracket of asynchronous halving. A `concurrency` of 0 means `d^(n-1)` places, but at
/// most one for each trial.
pub fn async_halving(
    units: u64,
    divisor: u32,
    num_rungs: u32,
    max_trials: u32,
    concurrency: u32,
    stop_once: bool,
) -> AsyncHalvingConfig {
    let places = places(concurrency, divisor, num_rungs, max_trials);
    let lengths = rung_lengths(units, divisor, num_rungs);
    AsyncHalvingConfig { group: 0, lengths, max_trials, divisor, concurrency: places, stop_once }
}

/// Returns a synchronous bracket that trains about `budget` units in all.
pub fn sync_halving(units: u64, divisor: u32, num_rungs: u32, budget: u64) -> BracketConfig {
    let sizes = sizes::budget_sizes(units, divisor, num_rungs, budget);
    BracketConfig {
        lengths: rung_lengths(units, divisor, num_rungs),
        sizes: sizes.into_iter().map(to_size).collect(),
    }
}

/// Validation refuses larger brackets.
fn to_size(num_trials: u128) -> u32 {
    u32::try_from(num_trials).unwrap_or(u32::MAX)
}

/// Returns the brackets of an adaptive search with a budget, the one with the most rungs first.
pub fn adaptive(units: u64, divisor: u32, rungs: &[u32], budget: u64) -> Vec<BracketConfig> {
    let share = budget / rungs.len().max(1) as u64;
    rungs.iter().map(|num| sync_halving(units, divisor, *num, share)).collect()
}

/// Returns the brackets of a simple adaptive search, which has trials instead of a budget.
pub fn adaptive_simple(
    units: u64,
    divisor: u32,
    rungs: &[u32],
    max_trials: u32,
) -> Vec<BracketConfig> {
    let trials = split_evenly(max_trials, rungs.len() as u32);
    let bracket = |(num_rungs, trials): (&u32, u32)| {
        let trials = u64::from(trials.max(1));
        let size = |rung| (trials / u64::from(divisor).saturating_pow(rung)).max(1) as u32;
        BracketConfig {
            lengths: rung_lengths(units, divisor, *num_rungs),
            sizes: (0..*num_rungs).map(size).collect(),
        }
    };
    rungs.iter().zip(trials).map(bracket).collect()
}

/// Returns the brackets of Hyperband, most trials first; the first `num_brackets` of them, 0 for
/// all.
pub fn hyperband(units: u64, divisor: u32, num_brackets: u32) -> Vec<BracketConfig> {
    let brackets = sizes::hyperband_sizes(units, divisor, num_brackets).into_iter();
    brackets
        .map(|sizes| BracketConfig {
            lengths: rung_lengths(units, divisor, sizes.len() as u32),
            sizes: sizes.into_iter().map(to_size).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn hyperband_of_81_has_five_brackets() {
        let trials: Vec<u32> = hyperband(81, 3, 0).iter().map(|bracket| bracket.sizes[0]).collect();
        assert_eq!(trials, [81, 34, 15, 8, 5]);
    }

    /// Large weights do not overflow.
    #[test]
    fn sixteen_brackets_of_sixteen_rungs() {
        assert_eq!(split_trials(100_000, 16, &[16; 16]), [6250; 16]);
        let rungs: Vec<u32> = (1..=16).rev().collect();
        assert_eq!(
            split_trials(100_000, 16, &rungs)[2..],
            [416, 28, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        );
    }

    #[test]
    fn edited_totals_are_split_anew() {
        let check = |max_trials: u32, made: &[u32], expected: &[u32]| {
            let trials = split_trials_above(max_trials, 3, &[3, 2, 1], made);
            assert_eq!(trials, expected, "{max_trials} {made:?}");
        };
        assert_eq!(split_trials(11, 3, &[3, 2, 1]), [6, 3, 2]);
        check(11, &[0, 0, 0], &[6, 3, 2]);
        check(22, &[6, 3, 2], &[12, 6, 4]);
        // The last bracket has made more than its share, so the others share the rest.
        check(11, &[3, 1, 5], &[4, 2, 5]);
        check(9, &[3, 1, 5], &[3, 1, 5]);
        check(2, &[3, 1, 5], &[3, 1, 5]);
        // The others have made all trials, so the second bracket gets none.
        check(8, &[3, 0, 5], &[3, 0, 5]);
    }

    #[test]
    fn longer_trials_get_rungs_above() {
        assert_eq!(lengths_above(9, 81, 3), [27, 81]);
        assert_eq!(lengths_above(9, 30, 3), [27, 30]);
        assert_eq!(lengths_above(9, 10, 3), [10]);
        assert!(lengths_above(9, 9, 3).is_empty());
        assert!(lengths_above(9, 3, 3).is_empty());
    }

    #[test]
    fn default_concurrency_follows_from_rungs_and_trials() {
        for (concurrency, num_rungs, max_trials, expected) in [
            (0, 3, 100, 9),
            (0, 1, 100, 1),
            (0, 3, 5, 5),
            (0, 3, 0, 1),
            (0, 40, u32::MAX, u32::MAX),
            (4, 3, 2, 4),
        ] {
            let actual = places(concurrency, 3, num_rungs, max_trials);
            assert_eq!(actual, expected, "{concurrency} {num_rungs} {max_trials}");
        }
    }

    /// 9 trials of 1 unit, 3 more of them for 2 units and 1 more for 6 units train 21 units.
    #[test]
    fn budget_determines_the_sizes_of_rungs() {
        let bracket = |lengths: &[u64], sizes: &[u32]| BracketConfig {
            lengths: lengths.to_vec(),
            sizes: sizes.to_vec(),
        };
        let three = |sizes| bracket(&[1, 3, 9], sizes);
        assert_eq!(sync_halving(9, 3, 3, 210), three(&[90, 30, 10]));
        assert_eq!(sync_halving(9, 3, 3, 60), three(&[25, 8, 2]));
        assert_eq!(sync_halving(9, 3, 3, 1), three(&[1, 1, 1]));
        // Both brackets get 30 units.
        assert_eq!(adaptive(9, 3, &[3, 1], 60), [three(&[12, 4, 1]), bracket(&[9], &[3])]);
        assert_eq!(adaptive_simple(9, 3, &[3, 1], 19), [three(&[10, 3, 1]), bracket(&[9], &[9])]);
    }

    /// Checks the brackets of Determined, computed by its own code.
    #[test]
    fn adaptive_asha_has_determineds_brackets() {
        let cases: Vec<Value> = serde_json::from_str(include_str!("brackets.json")).unwrap();
        assert_eq!(cases.len(), 60);
        for case in &cases {
            let number = |name: &str| case[name].as_u64().unwrap() as u32;
            let search = AdaptiveAsha {
                units: case["max_time"].as_u64().unwrap(),
                max_trials: number("max_trials"),
                mode: match case["mode"].as_str().unwrap() {
                    "conservative" => SearchMode::Conservative,
                    "standard" => SearchMode::Standard,
                    _ => SearchMode::Aggressive,
                },
                divisor: number("divisor"),
                max_rungs: number("max_rungs"),
                bracket_rungs: vec![],
                concurrency: number("max_concurrent_trials"),
                stop_once: false,
            };
            let brackets: Vec<Value> = search
                .brackets()
                .into_iter()
                .map(|bracket| {
                    serde_json::json!({
                        "rungs": bracket.lengths, "max_trials": bracket.max_trials,
                        "max_concurrent": bracket.concurrency,
                    })
                })
                .collect();
            assert_eq!(Value::Array(brackets), case["brackets"], "{case}");
        }
    }
}
