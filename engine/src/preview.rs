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
    /// Returns the sum of all trials' lengths, in the experiment's unit.
    pub fn total_units(&self) -> u64 {
        self.lengths.iter().map(LengthCount::total_units).fold(0, u64::saturating_add)
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
        return Preview { lengths: vec![], samples: vec![] };
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
    Preview { lengths, samples: draws.into_iter().map(sample).collect() }
}

/// Limits concurrency to the number of samples, so that not all trials are sampled. Sampled values
/// do not depend on concurrency.
fn limit_concurrency(config: &SearchConfig, samples: u32) -> SearchConfig {
    let mut limited = config.clone();
    let concurrency = match &mut limited.method {
        Method::Single => return limited,
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
    use stoker_api::experiment::AsyncHalvingSearch;

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

    #[test]
    fn total_sums_all_trials() {
        let preview = preview(&config(Method::Random { max_trials: 5, max_concurrent: 2 }), 0);
        assert_eq!(preview.total_units(), 45);
    }
}
