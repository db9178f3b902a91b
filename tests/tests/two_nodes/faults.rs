//! Gangs and trials survive the loss of nodes, pods and the store.

use std::time::Duration;

use serde_json::{Value, json};
use stoker_test_cluster::{Cluster, PATIENCE};

use super::{
    KilledNode, NAMESPACE, OPERATOR_PODS, cluster, ended, ended_within, get, mnist, outcome, state,
    wait_for, wait_for_checkpoints, weights,
};

/// Returns an experiment with a gang of four pods, two on each node if both nodes are available.
/// Its 600 batches are an epoch of 469 and a part of the next.
fn gang(name: &str) -> Value {
    let near = json!({
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": { "matchLabels": { "stoker.dev/experiment": name } },
    });
    mnist(
        name,
        &json!({
            "minCheckpointPeriod": { "batches": 100 },
            "searcher": {
                "metric": "validation_accuracy", "smallerIsBetter": false,
                "maxLength": { "batches": 600 }, "single": {},
            },
            "resources": { "slotsPerTrial": 4, "slotsPerPod": 1 },
            "pod": { "affinity": { "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution":
                    [{ "weight": 100, "podAffinityTerm": near }],
            } } },
        }),
    )
}

fn nodes_of(cluster: &Cluster, experiment: &str) -> Vec<String> {
    let label = format!("stoker.dev/experiment={experiment}");
    let pods = cluster.get(&["-n", NAMESPACE, "pods", "-l", &label]).unwrap();
    let node = |pod: &Value| pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned();
    let mut nodes: Vec<_> = pods["items"].as_array().unwrap().iter().map(node).collect();
    nodes.sort();
    nodes.dedup();
    nodes
}

#[test]
fn gangs_survive_node_loss_bit_identical() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    cluster.apply(&gang("calm").to_string()).unwrap();
    let calm = ended(cluster, "calm");
    assert_eq!(calm["status"]["phase"], "Completed", "{}", state(cluster));
    assert_eq!(nodes_of(cluster, "calm").len(), 2);
    cluster.apply(&gang("hit").to_string()).unwrap();
    wait_for_checkpoints(cluster, "hit-0", 2);
    let killed = KilledNode::new(cluster, 2);
    // Two waits: until the operator replaces the gang, and until the new gang has trained.
    wait_for(PATIENCE, cluster, "trial", "hit-0", "has a second attempt", |status| {
        status["attempts"].as_array().map_or(0, Vec::len) > 1
    });
    let hit = ended(cluster, "hit");
    drop(killed);
    assert_eq!(hit["status"]["phase"], "Completed", "{}", state(cluster));
    let trial = get(cluster, "trial", "hit-0");
    let attempts = trial["status"]["attempts"].as_array().unwrap();
    assert!(attempts.len() > 1, "{attempts:?}");
    assert_eq!(attempts[0]["end"], "Infrastructure", "{attempts:?}");
    assert!(attempts.last().unwrap()["resumedFrom"].is_string(), "{attempts:?}");
    assert_eq!(trial["status"]["restarts"], 0);
    assert_bit_identical(cluster, "calm-0", "hit-0");
}

/// Returns an experiment of 500 batches without dropout: only its initial weights are random.
fn plain(name: &str, resources: &Value) -> Value {
    let hyperparameters = json!({
        "model": "mlp", "learning_rate": 0.001, "dropout": 0.0, "global_batch_size": 128,
    });
    let mut experiment = gang(name);
    experiment["spec"]["hyperparameters"] = hyperparameters;
    experiment["spec"]["resources"] = resources.clone();
    experiment["spec"]["searcher"]["maxLength"] = json!({ "batches": 500 });
    experiment
}

#[test]
fn gangs_match_one_rank_and_survive_deleted_pods() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    let four = json!({ "slotsPerTrial": 4, "slotsPerPod": 1 });
    // Longer training would diverge. The order of summation changes the last bits of a weight, and
    // a ReLU whose input is that close to zero turns them into a real difference. Here the loss
    // differs by less than 5e-8 until batch 393, and by up to 6e-3 from there. At batch 393, one of
    // the 16,384 inputs is 3.8e-7 for one rank and -1.0e-7 for four.
    let short = |name: &str, resources: &Value| {
        let mut experiment = plain(name, resources);
        experiment["spec"]["searcher"]["maxLength"] = json!({ "batches": 200 });
        experiment.to_string()
    };
    cluster.apply(&short("one", &json!({ "slotsPerTrial": 1 }))).unwrap();
    cluster.apply(&short("quad", &four)).unwrap();
    cluster.apply(&plain("four", &four).to_string()).unwrap();
    for name in ["one", "quad", "four"] {
        let end = ended(cluster, name);
        assert_eq!(end["status"]["phase"], "Completed", "{}", state(cluster));
    }
    let (one, quad) = (outcome(cluster, "one-0").0, outcome(cluster, "quad-0").0);
    for (metric, tolerance) in [("validation_accuracy", 3e-4), ("validation_loss", 1e-6)] {
        let of = |metrics: &Value| -> f64 { metrics[metric].as_str().unwrap().parse().unwrap() };
        // Rounding may change the prediction of one of the 10,000 samples.
        let difference = (of(&one) / of(&quad) - 1.0).abs();
        assert!(difference < tolerance, "{metric}: {one} {quad}");
    }
    cluster.apply(&plain("less", &four).to_string()).unwrap();
    wait_for_checkpoints(cluster, "less-0", 1);
    let delete = ["-n", NAMESPACE, "delete", "pod", "less-0-a0-r2", "--force", "--grace-period=0"];
    cluster.kubectl(&delete).unwrap();
    let end = ended(cluster, "less");
    assert_eq!(end["status"]["phase"], "Completed", "{}", state(cluster));
    let trial = get(cluster, "trial", "less-0");
    assert_eq!(trial["status"]["restarts"], 0, "{trial}");
    assert!(trial["status"]["attempts"].as_array().unwrap().len() > 1, "{trial}");
    assert_bit_identical(cluster, "four-0", "less-0");
}

/// Checks that two trials have the same results, metrics and weights.
fn assert_bit_identical(cluster: &Cluster, one: &str, other: &str) {
    assert_eq!(outcome(cluster, one), outcome(cluster, other));
    let folder = tempfile::tempdir().unwrap();
    let model = |trial: &str| weights(cluster, trial, folder.path());
    let (one, other) = (model(one), model(other));
    let files: Vec<&String> = one.as_object().unwrap().keys().collect();
    assert!(files.len() > 1, "{files:?}");
    for file in files.into_iter().filter(|file| !file.contains("state")) {
        assert_eq!(one[file], other[file], "{file}");
    }
}

/// Duration of the outage: long enough for several saves to fail.
const STORAGE_OUTAGE: Duration = Duration::from_secs(60);

#[test]
fn trials_survive_a_store_outage_of_a_minute() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    let long = json!({
        "minCheckpointPeriod": { "batches": 200 },
        "searcher": {
            "metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": { "epochs": 20 }, "single": {},
        },
    });
    cluster.apply(&mnist("dry", &long).to_string()).unwrap();
    wait_for_checkpoints(cluster, "dry-0", 1);
    cluster.stop_s3();
    std::thread::sleep(STORAGE_OUTAGE);
    cluster.start_s3().unwrap();
    let dry = ended_within(Duration::from_secs(600), cluster, "dry");
    assert_eq!(dry["status"]["phase"], "Completed", "{}", state(cluster));
    let trial = get(cluster, "trial", "dry-0");
    assert_eq!(trial["status"]["restarts"], 0, "{trial}");
    let accuracy: f64 = dry["status"]["best"]["metric"].as_str().unwrap().parse().unwrap();
    assert!(accuracy > 0.97, "{accuracy}");
}

/// Returns an experiment with a trial of one pod. It trains for much longer than it takes to delete
/// its pods and to stop the operator.
fn single(name: &str) -> String {
    let change = json!({
        "minCheckpointPeriod": { "batches": 400 },
        "searcher": {
            "metric": "validation_accuracy", "smallerIsBetter": false,
            "maxLength": { "batches": 8000 }, "single": {},
        },
    });
    mnist(name, &change).to_string()
}

/// Operators that have ended. Dropping it starts them again, also after a failure, since later
/// tests need them.
struct StoppedOperators<'a>(&'a Cluster);

impl<'a> StoppedOperators<'a> {
    /// Stops the operators, and waits until their pods are gone.
    fn new(cluster: &'a Cluster) -> Self {
        let stopped = Self(cluster);
        stopped.scale(0).unwrap();
        let wait = ["-n", "stoker-system", "wait", "pods", "--for=delete", "--timeout=120s"];
        cluster.kubectl(&[&wait[..], &["-l", OPERATOR_PODS]].concat()).unwrap();
        stopped
    }

    fn scale(&self, replicas: u32) -> Result<String, stoker_test_cluster::Error> {
        let replicas = format!("--replicas={replicas}");
        let operator = ["-n", "stoker-system", "scale", "deployment/stoker-operator", &replicas];
        self.0.kubectl(&operator)
    }
}

impl Drop for StoppedOperators<'_> {
    fn drop(&mut self) {
        let result = self.scale(2);
        // A second panic would end the process.
        assert!(result.is_ok() || std::thread::panicking(), "{result:?}");
    }
}

fn force_delete_pods(cluster: &Cluster, experiment: &str) {
    let label = format!("stoker.dev/experiment={experiment}");
    let delete = ["-n", NAMESPACE, "delete", "pods", "-l", &label, "--force", "--grace-period=0"];
    cluster.kubectl(&delete).unwrap();
}

/// Gives an object the spec and status of a backup.
fn restore(cluster: &Cluster, mut backup: Value) {
    backup["metadata"].as_object_mut().unwrap().remove("resourceVersion");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("backup.json");
    std::fs::write(&file, backup.to_string()).unwrap();
    let replace = ["replace", "-f", file.to_str().unwrap()];
    cluster.kubectl(&replace).unwrap();
    cluster.kubectl(&[&replace[..], &["--subresource=status"]].concat()).unwrap();
}

/// After etcd is restored from a backup, objects have earlier states, and later pods do not exist.
#[test]
fn restored_records_find_later_checkpoints() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    let has_checkpoint_of = |attempt: u32| {
        wait_for(PATIENCE, cluster, "trial", "past-0", "has a checkpoint", |status| {
            let mut checkpoints = status["checkpoints"].as_array().into_iter().flatten();
            let name = |checkpoint: &Value| checkpoint["name"].as_str().map(str::to_owned);
            let end = format!("-{attempt}");
            checkpoints.any(|checkpoint| name(checkpoint).is_some_and(|name| name.ends_with(&end)))
        })
    };
    cluster.apply(&single("past")).unwrap();
    let trial = has_checkpoint_of(0);
    let backup = [get(cluster, "experiment", "past"), trial];
    for attempt in 1..3 {
        force_delete_pods(cluster, "past");
        has_checkpoint_of(attempt);
    }
    let stopped = StoppedOperators::new(cluster);
    force_delete_pods(cluster, "past");
    backup.into_iter().for_each(|object| restore(cluster, object));
    drop(stopped);
    let end = ended_within(3 * PATIENCE, cluster, "past");
    assert_eq!(end["status"]["phase"], "Completed", "{}", state(cluster));
    let status = get(cluster, "trial", "past-0")["status"].clone();
    let attempts = status["attempts"].as_array().unwrap();
    let refused = |attempt: &Value| attempt["message"].as_str().unwrap_or_default().to_owned();
    for attempt in &attempts[1..3] {
        assert!(refused(attempt).contains("record was restored from a backup"), "{attempts:?}");
    }
    let resumed_from = attempts[3]["resumedFrom"].as_str().unwrap();
    assert!(resumed_from.ends_with("-2"), "{attempts:?}");
    assert_eq!((attempts.len(), &status["restarts"]), (4, &json!(0)), "{attempts:?}");
    cluster.apply(&single("straight")).unwrap();
    ended_within(3 * PATIENCE, cluster, "straight");
    assert_bit_identical(cluster, "straight-0", "past-0");
}
