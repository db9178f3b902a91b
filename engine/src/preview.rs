//! Simulates a search in which every trial succeeds.

use serde::Serialize;
use serde_json::Value;
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use crate::search::{Action, Draw, Event, Search, SearchConfig};

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
        let units = self.lengths.iter().map(|length| length.units.saturating_mul(length.trials));
        units.fold(0, u64::saturating_add)
    }
}

/// Simulates a search, and samples its first `samples` trials.
pub fn preview(config: &SearchConfig, samples: u32) -> Preview {
    let mut search = Search::new(limit_concurrency(config, samples));
    let counts = search.lengths().into_iter().filter(|(_, trials)| *trials > 0);
    let lengths = counts.map(|(units, trials)| LengthCount { units, trials }).collect();
    let samples_max = samples as usize;
    let mut samples = Vec::new();
    if samples_max > 0 {
        samples.extend(search.start().into_iter().filter_map(sample));
    }
    let mut trial = 0;
    while samples.len() < samples_max && (trial as usize) < samples.len() {
        let event = Event::Closed { trial, cause: CloseCause::Completed };
        samples.extend(search.handle(event).into_iter().filter_map(sample));
        trial += 1;
    }
    samples.truncate(samples_max);
    Preview { lengths, samples }
}

/// Limits concurrency to the number of samples, so that no other trials are sampled. Sampled values
/// do not depend on concurrency.
fn limit_concurrency(config: &SearchConfig, samples: u32) -> SearchConfig {
    let limited = |max_concurrent| match max_concurrent {
        0 => samples.max(1),
        max => samples.clamp(1, max),
    };
    let method = match config.method {
        Method::Single => Method::Single,
        Method::Random { max_trials, max_concurrent } => {
            Method::Random { max_trials, max_concurrent: limited(max_concurrent) }
        }
        Method::Grid { max_concurrent } => Method::Grid { max_concurrent: limited(max_concurrent) },
    };
    SearchConfig { method, ..config.clone() }
}

fn sample(action: Action) -> Option<Sample> {
    match action {
        Action::Create(Draw { index, seed, hyperparameters, .. }) => {
            Some(Sample { index, seed, hyperparameters })
        }
        Action::Continue { .. } | Action::Stop { .. } | Action::Shutdown { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::config;

    fn check(method: Method, samples: u32, lengths: Value, indices: &[u32]) {
        let preview = preview(&config(method), samples);
        let json = serde_json::to_value(&preview).unwrap();
        assert_eq!(json["lengths"], lengths);
        let sampled: Vec<_> = preview.samples.iter().map(|sample| sample.index).collect();
        assert_eq!(sampled, indices);
    }

    #[test]
    fn preview_counts_all_trials_and_samples_the_first() {
        let random = Method::Random { max_trials: 5, max_concurrent: 2 };
        check(random, 3, json!([{ "units": 9, "trials": 5 }]), &[0, 1, 2]);
        check(random, 9, json!([{ "units": 9, "trials": 5 }]), &[0, 1, 2, 3, 4]);
        check(random, 0, json!([{ "units": 9, "trials": 5 }]), &[]);
        check(Method::Single, 9, json!([{ "units": 9, "trials": 1 }]), &[0]);
        let grid = Method::Grid { max_concurrent: 0 };
        check(grid, 2, json!([{ "units": 9, "trials": 6 }]), &[0, 1]);
    }

    #[test]
    fn only_shown_trials_are_sampled() {
        let check = |method, samples, expected| {
            let mut search = Search::new(limit_concurrency(&config(method), samples));
            assert_eq!(search.start().len(), expected, "{method:?} {samples}");
        };
        check(Method::Random { max_trials: u32::MAX, max_concurrent: 0 }, 5, 5);
        check(Method::Random { max_trials: u32::MAX, max_concurrent: 3 }, 5, 3);
        check(Method::Grid { max_concurrent: 0 }, 5, 5);
        check(Method::Grid { max_concurrent: 0 }, 0, 1);
        let random = |max_concurrent| Method::Random { max_trials: 9, max_concurrent };
        let all = preview(&config(random(0)), 9);
        assert_eq!(preview(&config(random(0)), 4).samples, all.samples[..4]);
        assert_eq!(preview(&config(random(2)), 9), all);
    }

    #[test]
    fn json_fields_match_the_documentation() {
        let config = config(Method::Grid { max_concurrent: 1 });
        let started = Search::new(config.clone()).start();
        let Some(Action::Create(Draw { seed, .. })) = started.first() else { panic!("no trial") };
        let lengths = r#"{"lengths":[{"units":9,"trials":6}]"#;
        let values = r#"{"depth":3,"net":{"rate":1}}"#;
        let expected = format!(
            r#"{lengths},"samples":[{{"index":0,"seed":{seed},"hyperparameters":{values}}}]}}"#
        );
        assert_eq!(serde_json::to_string(&preview(&config, 1)).unwrap(), expected);
    }

    #[test]
    fn total_sums_all_trials() {
        let preview = preview(&config(Method::Random { max_trials: 5, max_concurrent: 2 }), 0);
        assert_eq!(preview.total_units(), 45);
    }
}
