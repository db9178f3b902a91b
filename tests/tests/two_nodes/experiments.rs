//! Experiments during an upgrade and an uninstall, and programs sent with an experiment.

use serde_json::json;
use stoker_api::names::LABEL_EXPERIMENT;
use stoker_test_cluster::{Cluster, wait_until};
use stoker_tests::repository;

use super::{
    NAMESPACE, cleaned_up, cluster, ended, get, helm_install, mnist, state, stoker_on,
    stoker_on_bucket,
};

/// Returns the spec of examples/mnist/grid.yaml with its faster model and one epoch.
fn grid() -> serde_json::Value {
    let text = std::fs::read_to_string(repository().join("examples/mnist/grid.yaml")).unwrap();
    let file: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
    let mut spec = file["spec"].clone();
    spec["hyperparameters"]["model"] = json!("mlp");
    spec["searcher"]["maxLength"] = json!({ "epochs": 1 });
    spec
}

/// Returns the names and UIDs of the grid's pods. Pods of other tests may still be ending.
fn pods(cluster: &Cluster) -> Vec<(String, String)> {
    let label = format!("{LABEL_EXPERIMENT}=grid");
    let pods = cluster.get(&["-n", NAMESPACE, "pods", "-l", &label]).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let name_and_uid = |pod: &serde_json::Value| {
        let metadata = &pod["metadata"];
        (text(&metadata["name"]), text(&metadata["uid"]))
    };
    pods["items"].as_array().unwrap().iter().map(name_and_uid).collect()
}

/// Also checks the recorded status, checkpoints and logs, and the records in the bucket.
#[test]
fn a_grid_completes_during_an_upgrade() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    cluster.apply(&mnist("grid", &grid()).to_string()).unwrap();
    wait_until("pods run", || match pods(cluster).len() {
        0 => Err("none".to_owned()),
        _ => Ok(()),
    })
    .unwrap();
    let before = pods(cluster);
    helm_install(cluster, "upgrade", &["--set", "log.level=debug"]).unwrap();
    let experiment = ended(cluster, "grid");
    let status = &experiment["status"];
    assert_eq!(status["phase"], "Completed", "{}", state(cluster));
    assert_eq!((&status["trialsCreated"], &status["trialsClosed"]), (&json!(4), &json!(4)));
    let after = pods(cluster);
    assert!(before.iter().all(|pod| after.contains(pod)), "{before:?} {after:?}");
    let accuracy = |trial: u64| -> f64 {
        let trial = get(cluster, "trial", &format!("grid-{trial}"));
        assert_eq!(trial["status"]["attempts"].as_array().unwrap().len(), 1, "{trial}");
        trial["status"]["bestMetric"].as_str().unwrap().parse().unwrap()
    };
    let all = [0, 1, 2, 3].map(accuracy);
    let best = &status["best"];
    let metric: f64 = best["metric"].as_str().unwrap().parse().unwrap();
    assert_eq!(all.iter().copied().fold(0.0, f64::max), metric);
    assert_eq!(all[best["index"].as_u64().unwrap() as usize], metric);
    assert!(metric > 0.9, "{metric}");
    let endpoint = cluster.s3().local_endpoint.clone();
    let listed = stoker_on(cluster, &["checkpoint", "list", "grid"]);
    assert!(listed.contains("000000000469-0"), "{listed}");
    let logs = stoker_on(cluster, &["trial", "logs", "grid-0", "--storage-endpoint", &endpoint]);
    assert!(logs.contains("validation batches=469"), "{logs}");
    cleaned_up(cluster, "grid");

    // The bucket tells the results after the objects are gone.
    let arguments = ["trial", "describe", "grid-2", "--output", "json"];
    let trial = stoker_on(cluster, &arguments);
    let trial: serde_json::Value = serde_json::from_str(&trial).unwrap();
    stoker_on(cluster, &["experiment", "delete", "grid"]);
    let listed = stoker_on_bucket(cluster, &["experiment", "list"]);
    assert!(listed.contains("grid ") && listed.contains("Completed"), "{listed}");
    let described = stoker_on_bucket(cluster, &["experiment", "describe", "grid"]);
    assert!(described.contains(&format!("with validation_accuracy {metric}")), "{described}");
    let stored = stoker_on_bucket(cluster, &arguments);
    let stored: serde_json::Value = serde_json::from_str(&stored).unwrap();
    for field in ["attempts", "facts", "checkpoints", "phase"] {
        assert_eq!(stored["status"][field], trial["status"][field], "{stored}");
    }
    let curves = stoker_on_bucket(cluster, &["experiment", "metrics", "grid"]);
    assert!(curves.contains("validation_accuracy"), "{curves}");
    let checkpoints = stoker_on_bucket(cluster, &["checkpoint", "list", "grid"]);
    assert!(checkpoints.contains("000000000469-0"), "{checkpoints}");
}

#[test]
fn sent_programs_run_in_the_stock_image() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    std::fs::create_dir(&program).unwrap();
    // A single trainer binary, like the result of a user's build.
    std::fs::copy(stoker_tests::program("stoker-trainer"), program.join("train")).unwrap();
    std::fs::write(program.join("secret.txt"), "not to be sent").unwrap();
    std::fs::write(program.join(".stokerignore"), "*.txt\n").unwrap();
    let s3 = cluster.s3();
    let mut file = mnist(
        "sent",
        &json!({
            "entrypoint": { "command": ["./train", "mnist"] },
            "checkpointStorage": {
                "url": format!("s3://{}/e2e", s3.bucket), "endpoint": s3.endpoint,
                "secretName": "storage",
            },
            "searcher": {
                "metric": "validation_accuracy", "smallerIsBetter": false,
                "maxLength": { "batches": 100 }, "single": {},
            },
        }),
    );
    file["metadata"].as_object_mut().unwrap().remove("namespace");
    let path = folder.path().join("experiment.json");
    std::fs::write(&path, file.to_string()).unwrap();
    let (path, program) = (path.display().to_string(), program.display().to_string());
    let create = ["experiment", "create", &path, &program];
    stoker_on(cluster, &[&create[..], &["--storage-endpoint", &s3.local_endpoint]].concat());
    let experiment = ended(cluster, "sent");
    assert_eq!(experiment["status"]["phase"], "Completed", "{}", state(cluster));
}

/// Also covers a custom training loop on two ranks.
#[test]
fn test_mode_runs_all_stages_on_the_cluster() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    let folder = tempfile::tempdir().unwrap();
    let mut file = mnist(
        "gan",
        &json!({
            "entrypoint": { "command": ["stoker-trainer", "gan"] },
            "hyperparameters": {
                "hidden": 16, "global_batch_size": 64, "generator_rate": 0.0005,
                "discriminator_rate": { "log": { "min": -5, "max": -3 } },
            },
            "searcher": {
                "metric": "validation_mean_distance", "smallerIsBetter": true,
                "maxLength": { "batches": 2000 }, "random": { "maxTrials": 8 },
            },
            "resources": { "slotsPerTrial": 2 },
        }),
    );
    file["metadata"].as_object_mut().unwrap().remove("namespace");
    let path = folder.path().join("experiment.json");
    std::fs::write(&path, file.to_string()).unwrap();
    let endpoint = cluster.s3().local_endpoint.clone();
    let create = ["experiment", "create", path.to_str().unwrap(), "--test"];
    // The second test experiment replaces the first.
    for _ in 0..2 {
        let text = stoker_on(cluster, &[&create[..], &["--storage-endpoint", &endpoint]].concat());
        for part in ["validation", "the checkpoint", "the restore"] {
            assert!(text.contains(&format!("test: {part}: ")), "{part}: {text}");
        }
        assert_eq!(get(cluster, "experiment", "gan-test")["status"]["phase"], "Completed");
    }
    let status = get(cluster, "trial", "gan-test-0")["status"].clone();
    assert_eq!(status["activity"], "learns to draw", "{status}");
}

#[test]
fn uninstall_keeps_definitions_and_experiments() {
    if !stoker_test_cluster::nodes_enabled() {
        return;
    }
    let (cluster, _turn) = cluster();
    cluster.apply(&mnist("kept", &json!({ "state": "paused" })).to_string()).unwrap();
    cluster.helm(&["uninstall", "stoker", "--namespace", "stoker-system", "--wait"]).unwrap();
    let kinds = ["experiments.stoker.dev", "trials.stoker.dev", "inferencejobs.stoker.dev"];
    cluster.kubectl(&[&["get", "crd"][..], &kinds].concat()).unwrap();
    get(cluster, "experiment", "kept");
    helm_install(cluster, "install", &["--take-ownership"]).unwrap();
    let patch = r#"{"spec":{"state":"cancelled"}}"#;
    let arguments = ["-n", NAMESPACE, "patch", "experiment", "kept", "--type=merge", "-p", patch];
    cluster.kubectl(&arguments).unwrap();
    ended(cluster, "kept");
}
