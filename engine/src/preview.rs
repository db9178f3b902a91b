//! Simulates a search in which every trial succeeds.

use serde::Serialize;
use serde_json::Value;
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use crate::search::state::{SearchState, Turn};
use crate::search::turn::Event;
use crate::search::{Draw, SearchConfig};

/// Number of trials by length, and sampled hyperparameters of the first trials.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Preview {
    /// Trials by the length they train to, shortest first.
    pub lengths: Vec<LengthCount>,
    /// Length that copies take over from other trials instead of training it themselves.
    #[serde(rename = "copiedUnits", skip_serializing_if = "is_zero")]
    pub copied_units: u64,
    /// First trials, in creation order.
    pub samples: Vec<Sample>,
}

/// Number of trials that train to one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LengthCount {
    /// Length, in the experiment's unit.
    pub units: u64,
    /// Number of trials that train to this length.
    pub trials: u64,
}

/// Index, seed and hyperparameters of one trial.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// Index of the trial.
    pub index: u32,
    /// Seed of the trial.
    pub seed: u32,
    /// Sampled hyperparameters.
    pub hyperparameters: Value,
}

impl Preview {
    /// Returns the sum of all trials' lengths, in the experiment's unit. What a copy takes over
    /// from another trial counts once.
    pub fn total_units(&self) -> u64 {
        let sum = self.lengths.iter().map(LengthCount::total_units).fold(0, u64::saturating_add);
        sum.saturating_sub(self.copied_units)
    }
}

impl LengthCount {
    /// Returns the sum of these trials' lengths.
    pub fn total_units(&self) -> u64 {
        self.units.saturating_mul(self.trials)
    }
}

/// Counts the trials of a search, and samples its first `samples` trials. Nothing is known about an
/// external searcher, which is not asked.
pub fn preview(config: &SearchConfig, samples: u32) -> Preview {
    if matches!(config.method, Method::External(_)) {
        return Preview { lengths: vec![], samples: vec![], copied_units: 0 };
    }
    let lengths = SearchState::of(config).forecast().into_iter();
    let lengths = lengths.map(|(units, trials)| LengthCount { units, trials }).collect();
    let mut search = SearchState::of(&limit_concurrency(config, samples));
    let mut draws = vec![];
    let mut next = Some(Event::Began).filter(|_| samples > 0);
    let mut trial = 0;
    while let Some(event) = next {
        draws.extend(search.advance(event).into_iter().flat_map(|turn: Turn| turn.created));
        let is_next = draws.len() < samples as usize && trial < draws.len();
        next =
            is_next.then_some(Event::Closed { trial: trial as u32, cause: CloseCause::Completed });
        trial += 1;
    }
    draws.truncate(samples as usize);
    let samples = draws.into_iter().map(sample).collect();
    Preview { lengths, copied_units: copied_units(&config.method), samples }
}

/// Returns the length that the copies of a population take over from their sources.
fn copied_units(method: &Method) -> u64 {
    let Method::Pbt { search, units_per_round } = method else { return 0 };
    let rounds = 1..u64::from(search.num_rounds);
    let copied = rounds.sum::<u64>().saturating_mul(search.num_truncated().into());
    copied.saturating_mul(*units_per_round)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Limits concurrency to the number of samples, so that not all trials are sampled. Sampled values
/// do not depend on concurrency.
fn limit_concurrency(config: &SearchConfig, samples: u32) -> SearchConfig {
    let mut limited = config.clone();
    let concurrency = match &mut limited.method {
        Method::Single | Method::Pbt { .. } => return limited,
        Method::Random { max_concurrent, .. } | Method::Grid { max_concurrent } => max_concurrent,
        Method::AsyncHalving(search) => &mut search.max_concurrent_trials,
        Method::AdaptiveAsha(search) => &mut search.max_concurrent_trials,
        Method::SyncHalving { search, .. } => &mut search.max_concurrent_trials,
        Method::Adaptive { search, .. } => &mut search.max_concurrent_trials,
        Method::AdaptiveSimple(search) => &mut search.max_concurrent_trials,
        Method::Hyperband(search) => &mut search.max_concurrent_trials,
        Method::Tpe(search) => &mut search.max_concurrent_trials,
        Method::Sobol(search) => &mut search.max_concurrent_trials,
        Method::External(search) => &mut search.max_concurrent_trials,
    };
    *concurrency = match *concurrency {
        0 => samples.max(1),
        max => samples.clamp(1, max),
    };
    limited
}

fn sample(draw: Draw) -> Sample {
    let Draw { index, seed, hyperparameters, .. } = draw;
    Sample { index, seed, hyperparameters }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::experiment::{AsyncHalvingSearch, Length, PbtSearch, Unit};

    use super::*;
    use crate::fixture::config;

    fn check(method: Method, samples: u32, lengths: Value, indices: &[u32]) {
        let preview = preview(&config(method), samples);
        let json = serde_json::to_value(&preview).unwrap();
        assert_eq!(json["lengths"], lengths);
        let sampled: Vec<_> = preview.samples.iter().map(|sample| sample.index).collect();
        assert_eq!(sampled, indices);
    }

    fn asha(max_trials: u32) -> Method {
        Method::AsyncHalving(AsyncHalvingSearch {
            max_trials,
            num_rungs: 3,
            divisor: 3,
            max_concurrent_trials: 16,
            stop_once: false,
        })
    }

    #[test]
    fn preview_counts_all_trials_and_samples_the_first() {
        let random = Method::Random { max_trials: 5, max_concurrent: 2 };
        check(random.clone(), 3, json!([{ "units": 9, "trials": 5 }]), &[0, 1, 2]);
        check(random.clone(), 9, json!([{ "units": 9, "trials": 5 }]), &[0, 1, 2, 3, 4]);
        check(random, 0, json!([{ "units": 9, "trials": 5 }]), &[]);
        check(Method::Single, 9, json!([{ "units": 9, "trials": 1 }]), &[0]);
        let grid = Method::Grid { max_concurrent: 0 };
        check(grid, 2, json!([{ "units": 9, "trials": 6 }]), &[0, 1]);
        let lengths = json!([
            { "units": 1, "trials": 54 }, { "units": 3, "trials": 18 }, { "units": 9, "trials": 9 },
        ]);
        check(asha(81), 3, lengths, &[0, 1, 2]);
    }

    #[test]
    fn samples_do_not_depend_on_concurrency() {
        let many = Method::Random { max_trials: u32::MAX, max_concurrent: 0 };
        assert_eq!(preview(&config(many), 5).samples.len(), 5);
        let random = |max_concurrent| Method::Random { max_trials: 9, max_concurrent };
        let all = preview(&config(random(0)), 9);
        assert_eq!(preview(&config(random(0)), 4).samples, all.samples[..4]);
        assert_eq!(preview(&config(random(2)), 9), all);
        assert_eq!(preview(&config(asha(9)), 9).samples, all.samples);
    }

    #[test]
    fn json_fields_match_the_documentation() {
        let config = config(Method::Grid { max_concurrent: 1 });
        let preview = preview(&config, 1);
        let seed = preview.samples[0].seed;
        let lengths = r#"{"lengths":[{"units":9,"trials":6}]"#;
        let values = r#"{"depth":3,"net":{"rate":1}}"#;
        let expected = format!(
            r#"{lengths},"samples":[{{"index":0,"seed":{seed},"hyperparameters":{values}}}]}}"#
        );
        assert_eq!(serde_json::to_string(&preview).unwrap(), expected);
    }

    /// Three rounds of four trials train 3 * 4 * 3 units, although six trials are created.
    #[test]
    fn copies_count_once_in_the_total() {
        let search = PbtSearch {
            population_size: 4,
            length_per_round: Length::new(Unit::Epochs, 3),
            num_rounds: 3,
            truncate_fraction: 0.25,
            resample_probability: 0.2,
            perturb_factor: 0.2,
        };
        let method = Method::Pbt { search, units_per_round: 3 };
        let lengths = json!([
            { "units": 3, "trials": 1 }, { "units": 6, "trials": 1 }, { "units": 9, "trials": 4 },
        ]);
        check(method.clone(), 2, lengths, &[0, 1]);
        let preview = preview(&config(method), 0);
        assert_eq!((preview.copied_units, preview.total_units()), (9, 36));
    }

    #[test]
    fn total_sums_all_trials() {
        let preview = preview(&config(Method::Random { max_trials: 5, max_concurrent: 2 }), 0);
        assert_eq!(preview.total_units(), 45);
    }
}
