//! Numbers of a search that the user may edit.

use stoker_api::decisions::{EditedEvent, SearchSettings};
use stoker_api::validate::Method;

use super::SearchConfig;
use super::turn::Edit;

impl SearchConfig {
    /// Returns the numbers that the user may edit.
    pub fn settings(&self) -> SearchSettings {
        let mut method = self.method.clone();
        let (max_trials, max_concurrent_trials) = numbers(&mut method);
        SearchSettings {
            max_trials: max_trials.copied(),
            max_concurrent_trials: max_concurrent_trials.copied(),
            max_length: self.units_max,
            limits: self.limits,
            release_seconds: self.release_seconds,
        }
    }

    /// Returns the same search with these numbers.
    #[must_use]
    pub fn with(&self, settings: &SearchSettings) -> Self {
        let mut config = self.clone();
        let (max_trials, max_concurrent) = numbers(&mut config.method);
        if let (Some(number), Some(given)) = (max_trials, settings.max_trials) {
            *number = given;
        }
        if let (Some(number), Some(given)) = (max_concurrent, settings.max_concurrent_trials) {
            *number = given;
        }
        config.units_max = settings.max_length;
        config.limits = settings.limits;
        config.release_seconds = settings.release_seconds;
        config
    }
}

impl From<&EditedEvent> for Edit {
    fn from(event: &EditedEvent) -> Self {
        Self {
            max_trials: event.settings.max_trials,
            max_concurrent: event.settings.max_concurrent_trials,
            units_max: event.settings.max_length,
            is_limited: event.is_limited,
            bracket_trials: event.bracket_trials.clone(),
        }
    }
}

/// Returns the number of trials and the number of concurrent trials of a method.
fn numbers(method: &mut Method) -> (Option<&mut u32>, Option<&mut u32>) {
    match method {
        Method::Single | Method::Pbt { .. } => (None, None),
        Method::Random { max_trials, max_concurrent } => (Some(max_trials), Some(max_concurrent)),
        Method::Grid { max_concurrent } => (None, Some(max_concurrent)),
        Method::AsyncHalving(search) => {
            (Some(&mut search.max_trials), Some(&mut search.max_concurrent_trials))
        }
        Method::AdaptiveAsha(search) => {
            (Some(&mut search.max_trials), Some(&mut search.max_concurrent_trials))
        }
        Method::Tpe(search) => {
            (Some(&mut search.max_trials), Some(&mut search.max_concurrent_trials))
        }
        Method::Sobol(search) => {
            (Some(&mut search.max_trials), Some(&mut search.max_concurrent_trials))
        }
        Method::External(search) => {
            (Some(&mut search.max_trials), Some(&mut search.max_concurrent_trials))
        }
        Method::SyncHalving { search, .. } => (None, Some(&mut search.max_concurrent_trials)),
        Method::Adaptive { search, .. } => (None, Some(&mut search.max_concurrent_trials)),
        // Its brackets are fixed, and so is the number of trials.
        Method::AdaptiveSimple(search) => (None, Some(&mut search.max_concurrent_trials)),
        Method::Hyperband(search) => (None, Some(&mut search.max_concurrent_trials)),
    }
}
