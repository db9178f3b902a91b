//! Tests of the cluster commands with a real API server. The tests act as the operator.

use serde_json::json;

use crate::cluster_fixture::{CHECKPOINT, ClusterFixture, check, shared};

#[test]
fn missing_installation_is_reported() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    let shared = shared();
    check(&shared.list_before, "experiment list", 1, "Stoker is not installed");
    check(&shared.version_before, "version", 0, "Stoker is not installed");
}

#[test]
fn version_and_empty_lists_are_shown() {
    let Some(fixture) = ClusterFixture::new("empty") else { return };
    fixture.check("version", 0, "Kubernetes v1.");
    fixture.check("experiment list", 0, "no experiments in namespace `empty`");
    fixture.check("job list", 0, "no jobs in namespace `empty`");
    fixture.check("experiment describe mnist", 2, "experiment `mnist` not found");
    fixture.check("job describe other", 2, "job `other` not found");
    fixture.check("trial describe mnist-7", 2, "trial `mnist-7` not found");
}

#[test]
fn dry_run_creates_nothing() {
    let Some(fixture) = ClusterFixture::new("dry-run") else { return };
    fixture.check("experiment create experiment.yaml program --dry-run", 0, "would be created");
    let test = "experiment create experiment.yaml program --test --dry-run";
    fixture.check(test, 0, "mnist-test");
    let job = "job create job.yaml program --set output.url=s3://bucket/out --dry-run";
    fixture.check(job, 0, "job species would be created");
    assert!(!fixture.path("store").exists());
    fixture.check("experiment describe mnist", 2, "experiment `mnist` not found");
    fixture.check("job describe species", 2, "job `species` not found");
}

#[test]
fn create_uploads_the_program_once() {
    let Some(fixture) = ClusterFixture::new("create") else { return };
    // The ignored file is not uploaded.
    fixture.check("experiment create experiment.yaml program --paused", 0, "files: 2, ");
    let made = fixture.object("experiment", "mnist");
    assert_eq!(made["spec"]["state"], "paused");
    assert_eq!(made["metadata"]["labels"]["team"], "a");
    let sha256 = made["spec"]["context"]["sha256"].as_str().unwrap();
    let uploaded = fixture.path(&format!("store/create/contexts/{sha256}.tar.gz"));
    let written = uploaded.metadata().unwrap().modified().unwrap();
    let other = "experiment create experiment.yaml program --set metadata.name=other";
    fixture.check(other, 0, "upload skipped");
    assert_eq!(uploaded.metadata().unwrap().modified().unwrap(), written);
}

#[test]
fn create_refuses_a_used_name() {
    let Some(fixture) = ClusterFixture::new("used-name") else { return };
    fixture.start_experiment();
    fixture.check("experiment create experiment.yaml program", 2, "choose another name");
    fixture.start_job();
    let job = "job create job.yaml program --set output.url=s3://bucket/out";
    fixture.check(job, 2, "job `species` already exists in namespace `used-name`");
}

#[test]
fn create_shows_errors_of_the_api_server() {
    let Some(fixture) = ClusterFixture::new("refused") else { return };
    let bad = "experiment create experiment.yaml --set metadata.name=bad --set \
               pod.volumeMounts=[{name:d,mountPath:\"\"}]";
    fixture.check(bad, 2, "mountPath");
    fixture.check("job create job.yaml", 2, "spec.output.url");
}

#[test]
fn experiment_list_and_describe_show_the_status() {
    let Some(fixture) = ClusterFixture::new("show") else { return };
    fixture.start_trial();
    let list = fixture.check("experiment list", 0, "NAME");
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..9], ["mnist", "Running", "1", "1", "0", "50%", "0.50000", "(trial", "0)"]);
    fixture.check("experiment describe mnist", 0, "trial 0 with loss 0.5");
    fixture.check("experiment describe mnist", 0, "Importance: needs 10 results");
    assert_eq!(fixture.json("experiment describe mnist")["metadata"]["name"], "mnist");
    assert_eq!(fixture.json("experiment list").as_array().unwrap().len(), 1);
    fixture.start_job();
    check_all_namespaces(&fixture, &["experiment", "list", "-A"], ["show", "mnist"]);
    check_all_namespaces(&fixture, &["job", "list", "--all-namespaces"], ["show", "species"]);
}

/// Checks that a list of all namespaces has a row that starts with these cells.
fn check_all_namespaces(fixture: &ClusterFixture, words: &[&str], expected: [&str; 2]) {
    let output = fixture.stoker(fixture.plane.kubeconfig(), words).output().unwrap();
    let list = check(&output, &words.join(" "), 0, "NAMESPACE");
    let is_expected = |line: &str| line.split_whitespace().take(2).eq(expected);
    assert!(list.lines().any(is_expected), "{list}");
}

#[test]
fn trial_list_and_describe_show_the_status() {
    let Some(fixture) = ClusterFixture::new("show-trial") else { return };
    fixture.start_trial();
    fixture.check("trial list mnist", 0, "mnist-0  Running  0.50000  -     10");
    assert_eq!(fixture.json("trial list mnist")[0]["kind"], "Trial");
    fixture.check("trial describe mnist 0", 0, "Hyperparameters:  x=0.25");
}

#[test]
fn logs_come_from_the_storage() {
    let Some(fixture) = ClusterFixture::new("logs") else { return };
    fixture.start_trial();
    assert_eq!(fixture.check("trial logs mnist-0", 0, ""), "first\nsecond\n");
    assert_eq!(
        fixture.check("experiment logs mnist", 0, ""),
        "[trial=0] first\n[trial=0] second\n"
    );
    fixture.check("trial logs mnist-0 --attempt 3", 2, "the latest is 0");
    fixture.check("trial logs mnist-0 --rank 1", 2, "it has 1 rank, 0");
}

#[test]
fn metrics_come_from_the_storage() {
    let Some(fixture) = ClusterFixture::new("metrics") else { return };
    fixture.start_experiment();
    fixture.check("experiment metrics mnist", 0, "experiment mnist has no metrics yet");
    fixture.start_trial();
    fixture.check("trial metrics mnist-0", 0, "training  loss    2       1.5    0.5   0.5   █▁");
    fixture.check("experiment metrics mnist", 0, "0      2       10       1.5    0.5   0.5   █▁");
    let csv = fixture.check("experiment metrics mnist --output csv", 0, "");
    let lines = ["0,training,5,0,0,,loss,1.5", "0,training,10,0,0,,loss,0.5"];
    assert_eq!(csv.lines().skip(1).collect::<Vec<_>>(), lines);
    assert_eq!(fixture.check("trial metrics mnist-0 --output csv", 0, ""), csv);
    fixture.check("trial metrics mnist-7", 2, "trial `mnist-7` not found");
}

#[test]
fn checkpoints_are_listed_and_downloaded() {
    let Some(fixture) = ClusterFixture::new("checkpoints") else { return };
    let manifest = fixture.start_trial();
    fixture.check("checkpoint list mnist", 0, CHECKPOINT);
    fixture.check("checkpoint list mnist-0", 0, CHECKPOINT);
    fixture.check("checkpoint list mnist --trial 0", 0, CHECKPOINT);
    fixture.check("checkpoint list mnist --trial 7", 2, "trial 7 of experiment `mnist` not found");
    let name = format!("mnist-0/{CHECKPOINT}");
    assert_eq!(fixture.check("checkpoint list mnist/0 -o name", 0, "").trim_end(), name);
    fixture.check(&format!("checkpoint download {name} --to named"), 0, "of trial mnist-0");
    fixture.check(
        "checkpoint download mnist --to got",
        0,
        "checkpoint 000000000010-0 of trial mnist-0",
    );
    assert_eq!(std::fs::read_to_string(fixture.path("got/manifest.json")).unwrap(), manifest);
    fixture.check("checkpoint download mnist-0 --to got", 2, "already contains a checkpoint");
    fixture.check("checkpoint download mnist-0 --best --to best", 0, CHECKPOINT);
    fixture.set_status(
        "trial",
        "mnist-0",
        &json!({"checkpoints": [{"name": CHECKPOINT, "batches": 10,
            "manifestSha256": "0".repeat(64), "bytes": 0}]}),
    );
    let unranked = "no usable checkpoint of trial mnist-0 has a metric";
    fixture.check("checkpoint download mnist-0 --best --to none", 2, unranked);
}

#[test]
fn state_commands_change_the_experiment() {
    let Some(fixture) = ClusterFixture::new("states") else { return };
    fixture.start_experiment();
    let state = || fixture.object("experiment", "mnist")["spec"]["state"].clone();
    fixture.check("experiment pause mnist", 0, "is being paused");
    assert_eq!(state(), "paused");
    fixture.check("experiment activate mnist", 0, "resumes");
    assert_eq!(state(), "active");
    fixture.check("experiment activate mnist", 0, "already active");
    fixture.check("experiment cancel mnist", 0, "its trials checkpoint and exit");
    let refused = fixture.check("experiment activate mnist", 2, "a cancelled experiment stays");
    assert_eq!(refused, "");
    fixture.check("experiment kill mnist", 0, "is being killed");
    assert_eq!(state(), "killed");
    fixture.set_status("experiment", "mnist", &json!({ "phase": "Cancelled" }));
    fixture.check("experiment pause mnist", 2, "has ended (Cancelled)");
}

#[test]
fn all_names_are_tried_after_a_failure() {
    let Some(fixture) = ClusterFixture::new("names") else { return };
    fixture.start_experiment();
    fixture.start_trial();
    let state = || fixture.object("experiment", "mnist")["spec"]["state"].clone();
    let pause = "experiment pause other experiment.stoker.dev/mnist";
    fixture.check(pause, 2, "stoker: other: experiment `other` not found");
    assert_eq!(state(), "paused");
    fixture.check("trial kill mnist 7 0", 2, "trial mnist-0 is being killed");
    assert_eq!(fixture.object("trial", "mnist-0")["spec"]["wanted"], "kill");
    fixture.set_status("experiment", "mnist", &json!({ "phase": "Failed" }));
    fixture.check("experiment wait mnist other", 1, "stoker: other: experiment `other`");
    fixture.check("experiment delete mnist mnist", 2, "and its trials deleted");
}

#[test]
fn lists_are_selected_by_label_and_watched() {
    let Some(fixture) = ClusterFixture::new("select") else { return };
    fixture.start_trial();
    fixture.check("experiment list -l team=b", 0, "no experiments with the labels team in (b) in");
    let names = fixture.check("experiment list -l team=a,!other -o name", 0, "");
    assert_eq!(names, "experiment.stoker.dev/mnist\n");
    fixture.check("trial list mnist -l team", 0, "mnist has no trials with the labels team");
    fixture.check("trial list mnist --phase failed", 0, "hidden by --phase");
    fixture.check("trial list mnist --sort-by -loss --top 1 -o wide", 0, "LOSS");
    let expected = "experiment list --watch -o json";
    let mut lines = fixture.lines(expected);
    let first: serde_json::Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    assert_eq!(first["status"]["best"]["metric"], 0.5);
    fixture.set_status("experiment", "mnist", &json!({ "phase": "Completed" }));
    let changed: serde_json::Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    assert_eq!(changed["status"]["phase"], "Completed");
}

#[test]
fn trial_kill_changes_the_trial() {
    let Some(fixture) = ClusterFixture::new("trial-kill") else { return };
    fixture.start_trial();
    fixture.check("trial kill mnist-0", 0, "is being killed");
    assert_eq!(fixture.object("trial", "mnist-0")["spec"]["wanted"], "kill");
    fixture.set_status("trial", "mnist-0", &json!({ "phase": "Cancelled" }));
    fixture.check("trial kill mnist-0", 2, "has ended (Cancelled)");
}

#[test]
fn wait_returns_the_code_of_the_phase() {
    let Some(fixture) = ClusterFixture::new("wait") else { return };
    fixture.start_experiment();
    for (phase, code, expected) in
        [("Completed", 0, "completed"), ("Failed", 1, "failed"), ("Cancelled", 3, "was cancelled")]
    {
        fixture.set_status("experiment", "mnist", &json!({ "phase": "Running" }));
        // The first line is the progress, printed before the watch starts.
        let output = fixture.run_beside("experiment wait mnist --timeout 1m", || {
            fixture.set_status("experiment", "mnist", &json!({ "phase": phase }));
        });
        check(&output, phase, code, &format!("experiment mnist {expected}"));
    }
    assert_eq!(fixture.json("experiment describe mnist")["status"]["phase"], "Cancelled");
}

#[test]
fn wait_ends_at_its_timeout() {
    let Some(fixture) = ClusterFixture::new("timeout") else { return };
    fixture.start_experiment();
    let expected = "timed out after 1s: experiment mnist is still Running";
    fixture.check("experiment wait mnist --timeout 1s", 3, expected);
    let json = "experiment wait mnist --timeout 1s --output json";
    fixture.check(json, 3, "{\"error\":{\"exitCode\":3,\"kind\":\"timeout\"");
    fixture.start_job();
    let expected = "timed out after 1s: job species is still Running";
    fixture.check("job wait species --timeout 1s", 3, expected);
}

#[test]
fn job_create_uploads_the_program() {
    let Some(fixture) = ClusterFixture::new("job-create") else { return };
    let create = "job create job.yaml program --set output.url=s3://bucket/out --paused";
    fixture.check(create, 0, "job species created in namespace job-create");
    let made = fixture.object("inferencejob", "species");
    assert_eq!(
        (&made["spec"]["state"], &made["metadata"]["labels"]["team"]),
        (&json!("paused"), &json!("a"))
    );
    let sha256 = made["spec"]["context"]["sha256"].as_str().unwrap();
    assert!(fixture.path(&format!("store/job-create/contexts/{sha256}.tar.gz")).exists());
    fixture.check("job logs species", 0, "no process of job species has started yet");
}

#[test]
fn job_list_and_describe_show_the_status() {
    let Some(fixture) = ClusterFixture::new("job-show") else { return };
    fixture.start_job();
    let list = fixture.check("job list", 0, "NAME");
    let row: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..8], ["species", "Running", "work", "2", "20", "80", "0", "1"]);
    fixture.check("job describe species", 0, "25%, 20 of 80 rows");
    assert_eq!(fixture.json("job describe species")["kind"], "InferenceJob");
}

#[test]
fn job_logs_come_from_each_slot() {
    let Some(fixture) = ClusterFixture::new("job-logs") else { return };
    fixture.start_job();
    let made = fixture.object("inferencejob", "species");
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let folder = format!("store/job-logs/species-{}/workers", &uid[..8]);
    fixture.write(&format!("{folder}/0/logs/0/0-00000000.log"), "planned\n");
    fixture.write(&format!("{folder}/1/logs/2/0-00000000.log"), "worked\n");
    let logs = fixture.check("job logs species", 0, "");
    assert_eq!(logs, "[slot=0] planned\n[slot=1] worked\n");
    assert_eq!(fixture.check("job logs species --slot 1", 0, ""), "[slot=1] worked\n");
    fixture.check("job logs species --slot 2", 2, "has 2 slots, 0 to 1");
}

#[test]
fn state_commands_change_the_job() {
    let Some(fixture) = ClusterFixture::new("job-states") else { return };
    fixture.start_job();
    let state = || fixture.object("inferencejob", "species")["spec"]["state"].clone();
    fixture.check("job pause species", 0, "its workers exit after their current batch");
    assert_eq!(state(), "paused");
    fixture.check("job activate species", 0, "resumes");
    assert_eq!(state(), "active");
    fixture.check("job cancel species", 0, "job species is being cancelled");
    fixture.check("job activate species", 2, "a cancelled job stays cancelled");
    fixture.check("job kill species", 0, "is being killed");
    assert_eq!(state(), "killed");
}

#[test]
fn job_wait_prints_rows_and_output() {
    let Some(fixture) = ClusterFixture::new("job-wait") else { return };
    fixture.start_job();
    let done = json!({"phase": "Completed", "rows": 80, "rejected": 3});
    let output = fixture.run_beside("job wait species --timeout 1m", || {
        fixture.set_status("inferencejob", "species", &done);
    });
    let expected = "77 of 80 rows written, 3 rejected: s3://bucket/out/manifest.json";
    check(&output, "job wait species", 0, expected);
    assert_eq!(fixture.json("job wait species")["rows"], 77);
    fixture.check("job pause species", 2, "has ended (Completed)");
}

#[test]
fn delete_shows_where_files_remain() {
    let Some(fixture) = ClusterFixture::new("delete") else { return };
    fixture.start_experiment();
    fixture.start_job();
    fixture.check("experiment delete mnist", 0, "remain in s3://bucket/delete/mnist-");
    fixture.check("experiment describe mnist", 2, "experiment `mnist` not found");
    fixture.check("job delete species", 0, "remain in s3://bucket/delete/species-");
    fixture.check("job describe species", 2, "job `species` not found");
}

#[test]
fn forbidden_requests_name_the_resource() {
    let Some(fixture) = ClusterFixture::new("forbidden") else { return };
    let kubeconfig = fixture.plane.kubeconfig_for(fixture.namespace, "default").unwrap();
    let words = ["experiment", "list", "-n", fixture.namespace];
    let output = fixture.stoker(&kubeconfig, &words).output().unwrap();
    check(&output, "without permission", 1, "cannot list resource \"experiments\"");
}
