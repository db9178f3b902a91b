//! Random faults for minutes. Results are bit-identical to those of an undisturbed run.

mod faults;
mod results;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_test_cluster::{Cluster, wait_within};

use super::{NAMESPACE, cluster, mnist, state};
use faults::{Fault, FaultKind};

/// Minutes of faults. `cargo xtask soak` sets it.
const ENV_MINUTES: &str = "STOKER_TEST_SOAK_MINUTES";
/// Seed of the faults' kinds, order and durations. `cargo xtask soak` sets it.
const ENV_SEED: &str = "STOKER_TEST_SOAK_SEED";

const DEFAULT_MINUTES: f64 = 30.0;

/// Timeout of a round. A round takes a few minutes without faults.
const ROUND: Duration = Duration::from_secs(1800);
/// Timeout of the cleanup, which waits for a minute after each failed pod.
const CLEAN_UP: Duration = Duration::from_secs(600);
/// Timeout of a write. Outages of the API server are shorter.
const API: Duration = Duration::from_secs(300);

/// Prints events with the time of day and the seconds since the start.
#[derive(Debug)]
struct Log(Instant);

impl Log {
    fn print(&self, event: &str) {
        let now = now();
        println!("{now} {:5} s  {event}", self.0.elapsed().as_secs());
    }
}

fn now() -> stoker_api::time::Timestamp {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    stoker_api::time::Timestamp(since.as_secs() as i64)
}

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    let number = text.parse().ok();
    Some(number.unwrap_or_else(|| panic!("cannot read {variable} ({text}); set it to a number")))
}

#[test]
#[ignore = "takes 30 minutes; run `cargo xtask soak`"]
fn random_faults_change_no_result() {
    let minutes = number(ENV_MINUTES).unwrap_or(DEFAULT_MINUTES);
    let seed = number(ENV_SEED).unwrap_or_else(|| now().0.unsigned_abs());
    println!("soak: {minutes} minutes of faults, seed {seed}; starting the cluster");
    let (cluster, _turn) = cluster();
    let log = Log(Instant::now());
    log.print("undisturbed round");
    apply(cluster, "calm").unwrap();
    wait_for_end(cluster, "calm").unwrap_or_else(|error| panic!("{error}\n{}", state(cluster)));
    log.print("undisturbed round has ended; faults begin");

    let length = Duration::from_secs_f64(minutes * 60.0);
    let (rounds, faults) = run_with_faults(cluster, seed, length, &log);
    for round in &rounds {
        wait_for_clean_up(cluster, round);
    }
    let expected = results::of(cluster, "calm");
    let outcomes: Vec<_> = rounds.iter().map(|round| results::of(cluster, round)).collect();
    let differences: Vec<String> = std::iter::zip(&rounds, &outcomes)
        .flat_map(|(round, actual)| results::differences(round, &expected, actual))
        .collect();
    let attempts = results::Attempts::of(&outcomes);
    let unexplained = attempts.unexplained(&faults);

    println!(
        "\nsoak: {minutes} minutes, seed {seed}, {} rounds of {NUM_TRIALS} trials",
        rounds.len()
    );
    println!(
        "soak: {} faults: {}",
        faults.len(),
        counts(faults.iter().map(|fault| fault.kind.name()))
    );
    println!("soak: {attempts}");
    println!(
        "soak: results {} those of the undisturbed round",
        if differences.is_empty() { "equal" } else { "differ from" }
    );
    let problems = [differences, unexplained].concat();
    assert!(problems.is_empty(), "seed {seed}:\n{}", problems.join("\n"));
    let missing: Vec<_> = FaultKind::ALL
        .iter()
        .filter(|kind| faults.iter().all(|fault| fault.kind != **kind))
        .collect();
    assert!(missing.is_empty(), "too short for these faults: {missing:?}; set more minutes");
}

/// Runs rounds of experiments under faults until the time is up. Returns the names of the rounds
/// and the faults.
fn run_with_faults(
    cluster: &Cluster,
    seed: u64,
    length: Duration,
    log: &Log,
) -> (Vec<String>, Vec<Fault>) {
    let deadline = Instant::now() + length;
    let is_over = AtomicBool::new(false);
    let (rounds, faults) = std::thread::scope(|scope| {
        let faults = scope.spawn(|| {
            let keeps_going = || Instant::now() < deadline && !is_over.load(Ordering::Relaxed);
            faults::inject(cluster, seed, keeps_going, log)
        });
        let mut rounds = vec![];
        let result = loop {
            let round = format!("round-{}", rounds.len());
            let result = apply(cluster, &round).and_then(|()| wait_for_end(cluster, &round));
            log.print(&format!("{round} has ended"));
            rounds.push(round);
            // Without faults there is nothing to wait for: the injector has failed.
            if result.is_err() || Instant::now() >= deadline || faults.is_finished() {
                break result;
            }
        };
        is_over.store(true, Ordering::Relaxed);
        (
            result.map(|()| rounds),
            faults.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        )
    });
    let rounds = rounds.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{}", state(cluster)));
    (rounds, faults.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{}", state(cluster))))
}

/// Number of trials of one round.
const NUM_TRIALS: usize = 7;

/// Returns the experiments of a round: gangs of two pods, and single pods. Rounds differ only in
/// names.
fn experiments(round: &str) -> [Value; 2] {
    let spec = |batches: u64, trials: u32, resources: Value, group: &str| {
        let near = json!({
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": { "matchLabels": { "stoker.dev/experiment": group } },
        });
        json!({
            "hyperparameters": {
                "model": "mlp", "global_batch_size": 64,
                "learning_rate": { "log": { "base": 10, "min": -4, "max": -2 } },
                "dropout": { "double": { "min": 0.1, "max": 0.5 } },
            },
            "searcher": {
                "metric": "validation_accuracy", "smallerIsBetter": false,
                "maxLength": { "batches": batches },
                "random": { "maxTrials": trials, "maxConcurrentTrials": 2 },
            },
            "minValidationPeriod": { "batches": batches / 4 },
            "minCheckpointPeriod": { "batches": 100 },
            "schedulingUnit": 20,
            "resources": resources,
            "maxRestarts": 0,
            "pod": { "affinity": { "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution":
                    [{ "weight": 100, "podAffinityTerm": near }],
            } } },
        })
    };
    let (gangs, singles) = (format!("{round}-gangs"), format!("{round}-singles"));
    let of_gangs = spec(1500, 3, json!({ "slotsPerTrial": 2, "slotsPerPod": 1 }), &gangs);
    let of_singles = spec(2500, 4, json!({ "slotsPerTrial": 1 }), &singles);
    [mnist(&gangs, &of_gangs), mnist(&singles, &of_singles)]
}

fn names(round: &str) -> [String; 2] {
    experiments(round).map(|experiment| experiment["metadata"]["name"].as_str().unwrap().to_owned())
}

/// Applies a round's experiments. Retries while the API server is unavailable.
fn apply(cluster: &Cluster, round: &str) -> Result<(), String> {
    for experiment in experiments(round) {
        let experiment = experiment.to_string();
        let applied = wait_within(API, "an experiment is applied", || {
            cluster.apply(&experiment).map_err(|error| error.to_string())
        });
        applied.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Waits until a round's experiments have completed. Fails at once if one ends in another way.
fn wait_for_end(cluster: &Cluster, round: &str) -> Result<(), String> {
    let end = |name: &str| {
        wait_within(ROUND, &format!("{name} ends"), || {
            let experiment = read(cluster, "experiment", name)?;
            match experiment["status"]["phase"].as_str() {
                Some("Completed" | "Failed" | "Cancelled") => Ok(experiment),
                _ => Err(experiment["status"].to_string()),
            }
        })
    };
    for name in names(round) {
        let experiment = end(&name).map_err(|error| error.to_string())?;
        if experiment["status"]["phase"] != "Completed" {
            return Err(format!("{name} has not completed: {}", experiment["status"]));
        }
    }
    Ok(())
}

fn wait_for_clean_up(cluster: &Cluster, round: &str) {
    for name in names(round) {
        let cleaned = wait_within(CLEAN_UP, &format!("{name} is cleaned up"), || {
            let experiment = read(cluster, "experiment", &name)?;
            let is_clean = experiment["status"]["cleanedUp"] == json!(true);
            if is_clean { Ok(()) } else { Err(experiment["status"].to_string()) }
        });
        cleaned.unwrap_or_else(|error| panic!("{error}\n{}", state(cluster)));
    }
}

/// Reads an object. Fails while the API server is unavailable.
fn read(cluster: &Cluster, kind: &str, name: &str) -> Result<Value, String> {
    // Limit the rate of reads: each one costs kubectl 100 ms of a core.
    std::thread::sleep(Duration::from_secs(1));
    cluster.get(&["-n", NAMESPACE, kind, name]).map_err(|error| error.to_string())
}

/// Formats names with their counts, such as `a 2, b 1`.
fn counts<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut counts = BTreeMap::new();
    names.for_each(|name| *counts.entry(name).or_insert(0) += 1);
    let counts: Vec<String> =
        counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    counts.join(", ")
}
