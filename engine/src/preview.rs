//! What a search would do if every trial went well.

use serde::Serialize;
use serde_json::Value;
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use crate::search::{Action, Draw, Event, Search, SearchConfig};

/// How many trials train how long, and the draws of the first ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Preview {
    /// Trials by the length they train to, shortest first.
    pub lengths: Vec<LengthCount>,
    /// The first trials, in the order of their creation.
    pub samples: Vec<Sample>,
}

/// Trials that train to one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LengthCount {
    /// The length, in the experiment's unit.
    pub units: u64,
    /// How many trials train to it.
    pub trials: u64,
}

/// What is drawn for one trial.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// The trial's index.
    pub index: u32,
    /// The trial's seed.
    pub seed: u32,
    /// The values drawn.
    pub hyperparameters: Value,
}

impl Preview {
    /// The sum of all trials' lengths, in the experiment's unit.
    pub fn total_units(&self) -> u64 {
        let units = self.lengths.iter().map(|it| it.units.saturating_mul(it.trials));
        units.fold(0, u64::saturating_add)
    }
}

/// Foretells a search, with the draws of its first `samples` trials.
pub fn preview(config: &SearchConfig, samples: u32) -> Preview {
    let mut search = Search::new(at_a_time(config, samples));
    let counts = search.lengths().into_iter().filter(|it| it.1 > 0);
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

/// The same search, of which no more trials are drawn at a time than are wanted: what is drawn does
/// not depend on that.
fn at_a_time(config: &SearchConfig, samples: u32) -> SearchConfig {
    let few = |max_concurrent| match max_concurrent {
        0 => samples.max(1),
        max => samples.clamp(1, max),
    };
    let method = match config.method {
        Method::Single => Method::Single,
        Method::Random { max_trials, max_concurrent } => {
            Method::Random { max_trials, max_concurrent: few(max_concurrent) }
        }
        Method::Grid { max_concurrent } => Method::Grid { max_concurrent: few(max_concurrent) },
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
        let written = serde_json::to_value(&preview).unwrap();
        assert_eq!(written["lengths"], lengths);
        let found: Vec<_> = preview.samples.iter().map(|it| it.index).collect();
        assert_eq!(found, indices);
    }

    #[test]
    fn all_trials_have_the_longest_length_and_the_first_are_drawn() {
        let random = Method::Random { max_trials: 5, max_concurrent: 2 };
        check(random, 3, json!([{ "units": 9, "trials": 5 }]), &[0, 1, 2]);
        check(random, 9, json!([{ "units": 9, "trials": 5 }]), &[0, 1, 2, 3, 4]);
        check(random, 0, json!([{ "units": 9, "trials": 5 }]), &[]);
        check(Method::Single, 9, json!([{ "units": 9, "trials": 1 }]), &[0]);
        let grid = Method::Grid { max_concurrent: 0 };
        check(grid, 2, json!([{ "units": 9, "trials": 6 }]), &[0, 1]);
    }

    #[test]
    fn only_the_trials_that_are_shown_are_drawn() {
        let check = |method, samples, expected| {
            let mut search = Search::new(at_a_time(&config(method), samples));
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
    fn samples_have_the_fields_of_the_documented_json() {
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
    fn the_total_adds_up_all_trials() {
        let preview = preview(&config(Method::Random { max_trials: 5, max_concurrent: 2 }), 0);
        assert_eq!(preview.total_units(), 45);
    }
}
