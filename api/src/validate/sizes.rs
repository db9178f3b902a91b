//! Numbers of trials of the methods that decide them.

use crate::experiment::SearchMode;

/// Returns the largest `k` with `divisor^k <= value`; 0 for a value of 0.
pub fn integer_log(divisor: u32, value: u64) -> u32 {
    value.checked_ilog(u64::from(divisor)).unwrap_or(0)
}

/// Returns the lengths of `num_rungs` rungs, shortest first: `max(floor(units / d^(n-1-r)), 1)`.
pub fn rung_lengths(units: u64, divisor: u32, num_rungs: u32) -> Vec<u64> {
    let power = |exponent| u64::from(divisor).checked_pow(exponent);
    let length = |exponent| power(exponent).map_or(0, |power| units / power).max(1);
    (0..num_rungs).rev().map(length).collect()
}

/// Returns the numbers of rungs of the brackets, most first.
pub fn bracket_rungs(mode: SearchMode, rungs_max: u32) -> Vec<u32> {
    let least = match mode {
        SearchMode::Conservative => 1,
        SearchMode::Standard => (rungs_max - 1) / 2 + 1,
        SearchMode::Aggressive => rungs_max,
    };
    (least..=rungs_max).rev().collect()
}

/// Returns the numbers of rungs of synchronous brackets, most first: those that are given, or those
/// of the mode. The shortest rung has at least one of the `units`.
pub fn sync_bracket_rungs(
    given: &[u32],
    mode: SearchMode,
    max_rungs: u32,
    units: u64,
    divisor: u32,
) -> Vec<u32> {
    if given.is_empty() {
        return bracket_rungs(mode, max_rungs.min(integer_log(divisor, units) + 1));
    }
    let mut rungs = given.to_vec();
    rungs.sort_unstable_by(|one, other| other.cmp(one));
    rungs
}

/// Returns how many trials reach each rung of a synchronous bracket that trains about `budget`
/// units in all.
pub fn budget_sizes(units: u64, divisor: u32, num_rungs: u32, budget: u64) -> Vec<u128> {
    let lengths = rung_lengths(units, divisor, num_rungs);
    let bases: Vec<u128> =
        (0..num_rungs).rev().map(|exponent| u128::from(divisor).pow(exponent)).collect();
    let mut spent = 0;
    let mut before = 0;
    for (length, base) in lengths.iter().zip(&bases) {
        spent += u128::from(length - before) * base;
        before = *length;
    }
    let sizes = bases.iter().map(|base| (u128::from(budget) * base / spent).max(1));
    sizes.collect()
}

/// Returns how many trials reach each rung of the brackets of Hyperband, most trials first; of the
/// first `num_brackets`, 0 for all.
///
/// Source: Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization"
/// (JMLR 2018), Algorithm 1.
pub fn hyperband_sizes(units: u64, divisor: u32, num_brackets: u32) -> Vec<Vec<u128>> {
    let most = integer_log(divisor, units);
    let limit = if num_brackets == 0 { u32::MAX } else { num_brackets };
    let bracket = |s: u32| {
        let power = |exponent| u128::from(divisor).pow(exponent);
        let trials = (u128::from(most + 1) * power(s)).div_ceil(u128::from(s + 1));
        (0..=s).map(|rung| (trials / power(rung)).max(1)).collect()
    };
    (0..=most).rev().take(limit as usize).map(bracket).collect()
}

/// Splits trials over brackets by the weights `d^(n-1) / n`, at least one each. The first bracket
/// gets the rest.
pub fn split_trials(max_trials: u32, divisor: u32, rungs: &[u32]) -> Vec<u32> {
    // With a common denominator, all weights are integers. That of 1 to 16 is 720,720.
    let denominator = rungs.iter().fold(1, |multiple, num| lcm(multiple, u128::from(*num)));
    let weight = |num: u32| u128::from(divisor).pow(num - 1) * (denominator / u128::from(num));
    let total: u128 = rungs.iter().map(|num| weight(*num)).sum();
    let share = |num: &u32| (u128::from(max_trials) * weight(*num) / total).max(1) as u32;
    let mut trials: Vec<u32> = rungs.iter().map(share).collect();
    let sum: u32 = trials.iter().sum();
    if let Some(first) = trials.first_mut() {
        *first += max_trials.saturating_sub(sum);
    }
    trials
}

/// Returns the least common multiple of two positive numbers.
fn lcm(one: u128, other: u128) -> u128 {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    one / divisor * other
}
