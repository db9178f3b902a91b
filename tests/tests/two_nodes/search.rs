//! Search with promotion on four GPUs: they have gangs while trials wait, and faults change neither
//! recorded decisions nor models.

mod models;
mod occupancy;

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use stoker_api::experiment::{Experiment, ExperimentSpec};
use stoker_api::trial::Trial;
use stoker_api::validate::validate;
use stoker_engine::experiment::{Ledger, Record};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::TrialRecord;
use stoker_test_cluster::{Cluster, wait_within};

use super::{KilledNode, NAMESPACE, cluster, ended_within, get, mnist, state};
use occupancy::Occupancy;

const GPUS_PER_NODE: usize = 2;
/// Batches of the rungs. A trial takes about a minute for the first one, beside three others on two
/// cores.
const RUNGS: [u64; 3] = [5000, 15_000, 45_000];
const NUM_TRIALS: u32 = 12;
/// Trials after the edit.
const NUM_TRIALS_EDITED: u32 = 15;
const SEED: u32 = 7;
/// Limit for a search.
const SEARCH: Duration = Duration::from_secs(3600);
/// Greatest share of the GPU time without a gang while trials wait.
const IDLE_SHARE_MAX: f64 = 0.05;

/// Returns the search: six concurrent trials, so that two wait for the four GPUs.
fn asha(name: &str) -> Value {
    let change = json!({
        "hyperparameters": {
            "model": "mlp", "global_batch_size": 64,
            "learning_rate": { "log": { "base": 10, "min": -4, "max": -2 } },
            "dropout": { "double": { "min": 0.1, "max": 0.5 } },
        },
        "searcher": {
            "metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": { "batches": RUNGS[2] }, "releaseSeconds": 0,
            "asyncHalving": {
                "maxTrials": NUM_TRIALS, "numRungs": RUNGS.len(), "divisor": 3,
                "maxConcurrentTrials": 6,
            },
        },
        "minValidationPeriod": { "batches": RUNGS[0] },
        "minCheckpointPeriod": { "batches": 500 },
        "resources": { "slotsPerTrial": 1, "slotResource": "nvidia.com/gpu" },
        // The GPUs of the nodes are fake, so train on the CPU.
        "env": [{ "name": "STOKER_DEVICE", "value": "cpu" }],
        "maxRestarts": 0,
        "reproducibility": { "experimentSeed": SEED },
    });
    mnist(name, &change)
}

/// Returns an experiment's trials by index.
fn trials(cluster: &Cluster, name: &str) -> BTreeMap<u32, Trial> {
    let label = format!("stoker.dev/experiment={name}");
    let list = cluster.get(&["-n", NAMESPACE, "trials", "-l", &label]).unwrap();
    let trials: Vec<Trial> = serde_json::from_value(list["items"].clone()).unwrap();
    trials.into_iter().map(|trial| (trial.spec.index, trial)).collect()
}

/// Waits until the experiment has completed.
fn wait_for_end(cluster: &Cluster, name: &str) {
    let ended = ended_within(SEARCH, cluster, name);
    assert_eq!(ended["status"]["phase"], "Completed", "{}", state(cluster));
}

/// Rebuilds the search from the objects. Checks that it is finished, that nothing is missing in the
/// record, and that the lengths of all trials are those of its decisions.
fn check_record(cluster: &Cluster, name: &str) {
    let experiment: Experiment = serde_json::from_value(get(cluster, "experiment", name)).unwrap();
    let spec: &ExperimentSpec = &experiment.spec;
    let (valid, status) = (validate(name, spec).unwrap(), experiment.status.unwrap());
    let record =
        |trial: Trial| TrialRecord { spec: trial.spec, status: trial.status.unwrap_or_default() };
    let trials: BTreeMap<u32, TrialRecord> =
        trials(cluster, name).into_iter().map(|(index, trial)| (index, record(trial))).collect();
    let by_index = trials.iter().map(|(index, trial)| (*index, trial)).collect();
    let record =
        Record { log: &status.log, trials: &by_index, trials_created: status.trials_created };
    let (ledger, missing) = Ledger::rebuild(&SearchConfig::new(&valid, SEED), record).unwrap();
    assert_eq!(missing, [], "{name}: effects are missing in the record");
    assert!(ledger.book().is_finished(), "{name}");
    for (index, trial) in &trials {
        let trained = ledger.book().trial(*index).trained();
        assert_eq!(trial.status.batches, trained, "{name}-{index}");
        assert!(RUNGS.contains(&trained), "{name}-{index} has {trained} batches");
    }
}

/// Returns the mean time of the trials' attempts in seconds, from the first pod to the last end.
fn attempt_seconds(trials: &BTreeMap<u32, Trial>) -> u64 {
    let attempts = trials.values().flat_map(|trial| &trial.status.as_ref().unwrap().attempts);
    let seconds: Vec<u64> = attempts
        .filter_map(|attempt| Some(attempt.ended_at?.seconds_since(attempt.started_at?)))
        .collect();
    seconds.iter().sum::<u64>() / seconds.len() as u64
}

/// Waits until a number of trials have ended their first leg.
fn wait_for_results(cluster: &Cluster, name: &str, num: usize) {
    let waited = wait_within(SEARCH, &format!("{num} trials have results"), || {
        std::thread::sleep(Duration::from_secs(1));
        let has_result =
            |trial: &&Trial| trial.status.as_ref().is_some_and(|status| !status.facts.is_empty());
        let actual = trials(cluster, name).values().filter(has_result).count();
        if actual >= num { Ok(()) } else { Err(format!("{actual} trials")) }
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{}", state(cluster)));
}

/// Kills all operators, stops a node, deletes a trial and raises the number of trials.
fn disturb(cluster: &Cluster, name: &str) {
    wait_for_results(cluster, name, 2);
    println!("search: all operators are killed");
    // Ignore the error: a process may have ended since it was listed.
    cluster.processes("stoker-operator").into_iter().for_each(|pid| {
        let _ = kill_process(pid, Signal::KILL);
    });
    wait_for_results(cluster, name, 4);
    println!("search: node 2 stops for 30 s");
    let killed = KilledNode::new(cluster, 2);
    std::thread::sleep(Duration::from_secs(30));
    drop(killed);
    wait_for_results(cluster, name, 6);
    let (deleted, _) = trials(cluster, name).pop_first().unwrap();
    println!("search: {name}-{deleted} is deleted");
    cluster.kubectl(&["delete", "trial", "-n", NAMESPACE, &format!("{name}-{deleted}")]).unwrap();
    println!("search: maxTrials becomes {NUM_TRIALS_EDITED}");
    let change = json!({ "spec": { "searcher": {
        "asyncHalving": { "maxTrials": NUM_TRIALS_EDITED },
    } } });
    let patch = ["patch", "experiment", "-n", NAMESPACE, name, "--type=merge", "--patch"];
    cluster.kubectl(&[&patch[..], &[&change.to_string()]].concat()).unwrap();
}

#[test]
#[ignore = "takes 25 minutes; run `cargo xtask soak --search`"]
fn promotion_keeps_gpus_busy_and_survives_faults() {
    let (cluster, _turn) = cluster();
    (1..=2).for_each(|node| cluster.gpus(node, GPUS_PER_NODE).unwrap());

    println!("search: undisturbed");
    let occupancy = Occupancy::watch(cluster, "calm", 2 * GPUS_PER_NODE);
    cluster.apply(&asha("calm").to_string()).unwrap();
    wait_for_end(cluster, "calm");
    let occupancy = occupancy.end();
    let mean = attempt_seconds(&trials(cluster, "calm"));
    println!("search: {occupancy}; an attempt takes {mean} s");
    check_record(cluster, "calm");
    assert_eq!(trials(cluster, "calm").len(), NUM_TRIALS as usize);

    println!("search: disturbed");
    cluster.apply(&asha("rough").to_string()).unwrap();
    disturb(cluster, "rough");
    wait_for_end(cluster, "rough");
    check_record(cluster, "rough");
    assert_eq!(trials(cluster, "rough").len(), NUM_TRIALS_EDITED as usize - 1);

    for name in ["calm", "rough"] {
        let num = models::check(cluster, name, &trials(cluster, name));
        println!("search: {name}: {num} models equal those of their legs on this machine");
    }
    (1..=2).for_each(|node| cluster.gpus(node, 0).unwrap());
    assert!(occupancy.idle_share() < IDLE_SHARE_MAX, "{occupancy}");
}
