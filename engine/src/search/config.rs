//! Creates the search of an experiment.

use stoker_api::experiment::{AdaptiveAshaSearch, SamplerSpec, SobolSearch, TpeSearch};
use stoker_api::validate::Method;

use super::SearchConfig;
use super::layout::{self, AdaptiveAsha};
use super::methods::{
    AsyncHalving, External, FixedLength, Median, Pbt, PbtConfig, SyncHalving, Tournament,
};
use super::samplers::{Explore, Sampler};
use super::state::{AnyMethod, SearchState};

impl SearchState {
    /// Returns the search of an experiment, before its first event.
    pub fn of(config: &SearchConfig) -> Self {
        let sampler = sampler(config);
        let num_points = match &sampler {
            Sampler::Grid { num_points, .. } => u32::try_from(*num_points).unwrap_or(u32::MAX),
            _ => 0,
        };
        let method = method(config, num_points);
        let method = match config.median_stopping {
            Some(rule) => AnyMethod::Median(Median::new(method, rule)),
            None => method,
        };
        Self::new(method, sampler, config.seed)
    }
}

fn sampler(config: &SearchConfig) -> Sampler {
    let space = config.space.clone();
    match (&config.method, config.sampler) {
        (Method::Grid { .. }, _) => Sampler::grid(space),
        (Method::Tpe(search), _) => Sampler::tpe(space, search.multivariate),
        (Method::Sobol(_), _) => Sampler::sobol(space, config.seed),
        (Method::Pbt { search, .. }, _) => Sampler::explore(Explore {
            space,
            resample_probability: search.resample_probability,
            perturb_factor: search.perturb_factor,
        }),
        (_, Some(SamplerSpec { tpe: Some(tpe), .. })) => Sampler::tpe(space, tpe.multivariate),
        (_, Some(SamplerSpec { sobol: Some(_), .. })) => Sampler::sobol(space, config.seed),
        (_, Some(_) | None) => Sampler::Random(space),
    }
}

fn adaptive_asha(search: &AdaptiveAshaSearch, units: u64) -> AnyMethod {
    let search = AdaptiveAsha {
        units,
        max_trials: search.max_trials,
        mode: search.mode,
        divisor: search.divisor,
        max_rungs: search.max_rungs,
        bracket_rungs: search.bracket_rungs.clone(),
        concurrency: search.max_concurrent_trials,
        stop_once: search.stop_once,
    };
    AnyMethod::Tournament(Tournament::new(search.brackets()))
}

fn method(config: &SearchConfig, num_points: u32) -> AnyMethod {
    let units = config.units_max;
    let sync =
        |brackets, concurrency| AnyMethod::SyncHalving(SyncHalving::new(brackets, concurrency));
    match &config.method {
        Method::Single => AnyMethod::FixedLength(FixedLength::new(units, 1, 1, false)),
        Method::Random { max_trials, max_concurrent } => {
            AnyMethod::FixedLength(FixedLength::new(units, *max_trials, *max_concurrent, true))
        }
        Method::Grid { max_concurrent } => {
            AnyMethod::FixedLength(FixedLength::new(units, num_points, *max_concurrent, false))
        }
        Method::AsyncHalving(search) => {
            AnyMethod::AsyncHalving(AsyncHalving::new(layout::async_halving(
                units,
                search.divisor,
                search.num_rungs,
                search.max_trials,
                search.max_concurrent_trials,
                search.stop_once,
            )))
        }
        Method::AdaptiveAsha(search) => adaptive_asha(search, units),
        Method::SyncHalving { search, budget } => {
            let bracket = layout::sync_halving(units, search.divisor, search.num_rungs, *budget);
            sync(vec![bracket], search.max_concurrent_trials)
        }
        Method::Adaptive { search, budget } => {
            let brackets = layout::adaptive(units, search.divisor, &search.rungs(units), *budget);
            sync(brackets, search.max_concurrent_trials)
        }
        Method::AdaptiveSimple(search) => {
            let rungs = search.rungs(units);
            let brackets =
                layout::adaptive_simple(units, search.divisor, &rungs, search.max_trials);
            sync(brackets, search.max_concurrent_trials)
        }
        Method::Hyperband(search) => {
            let brackets = layout::hyperband(units, search.divisor, search.num_brackets);
            sync(brackets, search.max_concurrent_trials)
        }
        Method::Pbt { search, units_per_round } => AnyMethod::Pbt(Pbt::new(PbtConfig {
            population_size: search.population_size,
            units_per_round: *units_per_round,
            num_rounds: search.num_rounds,
            num_truncated: search.num_truncated(),
        })),
        Method::Tpe(TpeSearch { max_trials, max_concurrent_trials, .. })
        | Method::Sobol(SobolSearch { max_trials, max_concurrent_trials }) => {
            let concurrency = *max_concurrent_trials;
            AnyMethod::FixedLength(FixedLength::new(units, *max_trials, concurrency, true))
        }
        Method::External(search) => {
            AnyMethod::External(External::new(units, search, config.space.clone()))
        }
    }
}
