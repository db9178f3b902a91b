//! Tests of log commands against a scripted API server.

mod script;

use std::time::Duration;

use serde_json::{Value, json};

use self::script::{Shared, experiment_object, serve, trial_object};
use super::pods::{FollowLimits, PodFollower};
use super::*;

const GANG: Gang = Gang { world_size: 2, ranks_per_pod: 1 };

/// Returns the pods with their tags.
fn pods(shared: &Shared) -> Vec<(Pod, Tag)> {
    let objects = shared.lock().unwrap().pods().into_iter();
    let pods = objects.map(|object| serde_json::from_value::<Pod>(object).unwrap());
    pods.map(|pod| (pod.clone(), Tag::of_pod(&pod, GANG, false).unwrap())).collect()
}

/// Shows the current logs. Returns the lines as `POD LINE`.
async fn show_merged(cluster: &Cluster, shared: &Shared) -> (Vec<String>, Result<(), Failure>) {
    let mut lines = Vec::new();
    let show = |tag: &Tag, line: &LogLine| lines.push(format!("{} {}", tag.pod, line.text));
    let logs = super::pods::open(cluster, &pods(shared), LogRequest::default()).await.unwrap();
    let shown = super::pods::show_merged(logs, show).await;
    (lines, shown)
}

#[tokio::test]
async fn lines_of_pods_are_merged_by_time() {
    let (cluster, shared) = serve(&[
        ("m-0-a0-r0", &["2026-01-01T00:00:01.000000000Z a\n2026-01-01T00:00:03.000000000Z c\n"]),
        ("m-0-a0-r1", &["2026-01-01T00:00:02.000000000Z b\n2026-01-01T00:00:04.000000000Z d\n"]),
    ])
    .await;
    let (lines, shown) = show_merged(&cluster, &shared).await;
    shown.unwrap();
    assert_eq!(lines, ["0 a", "1 b", "0 c", "1 d"]);
}

#[tokio::test]
async fn truncated_log_is_an_error() {
    let (cluster, shared) = serve(&[
        ("m-0-a0-r0", &["2026-01-01T00:00:01.0Z a\n!broken"]),
        ("m-0-a0-r1", &["2026-01-01T00:00:02.0Z b\n"]),
    ])
    .await;
    let (lines, shown) = show_merged(&cluster, &shared).await;
    assert_eq!(lines, ["0 a", "1 b"]);
    let error = shown.unwrap_err().to_string();
    assert!(error.contains("cannot read the complete log of pod `m-0-a0-r0`"), "{error}");
}

/// Returns a storage with lines in the directory `logs`, if any, and the options to open it.
fn store(logs: &str, lines: Option<&str>) -> (tempfile::TempDir, storage::Options) {
    #[derive(Debug, clap::Parser)]
    struct Flags {
        #[command(flatten)]
        storage: storage::Options,
    }
    let root = tempfile::tempdir().unwrap();
    if let Some(lines) = lines {
        std::fs::create_dir_all(root.path().join(logs)).unwrap();
        std::fs::write(root.path().join(logs).join("0-00000000.log"), lines).unwrap();
    }
    let url = format!("file://{}", root.path().display());
    let flags = <Flags as clap::Parser>::try_parse_from(["x", "--storage-url", &url]).unwrap();
    (root, flags.storage)
}

/// Prints the logs of an attempt whose pods have lost them. `stored` are its stored logs, if any.
async fn print_lost(attempt: Value, stored: Option<&str>) -> Result<(), String> {
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[]), ("m-0-a0-r1", &[])]).await;
    shared.lock().unwrap().lost = Some(500);
    let experiment: Experiment = serde_json::from_value(experiment_object()).unwrap();
    let logs = layout::logs_path(&storage::trial_path(&experiment, 0), 0);
    let (_root, options) = store(&logs, stored);
    let source = LogSource {
        cluster: &cluster,
        experiment: &experiment,
        gang: GANG,
        options: &options,
        rank: None,
        args: LogArgs::default(),
        output: Output::Text,
    };
    let trial: Trial = serde_json::from_value(trial_object("Running", 1)).unwrap();
    let attempt: Attempt = serde_json::from_value(attempt).unwrap();
    source.print(&trial, &attempt, false).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn stored_logs_replace_lost_logs_of_ended_attempts() {
    let ended = || json!({"number": 0, "end": "Completed"});
    assert_eq!(print_lost(ended(), Some("a\n")).await, Ok(()));
    let error = print_lost(ended(), None).await.unwrap_err();
    assert!(error.contains("returned 500"), "{error}");
    let error = print_lost(json!({"number": 0}), Some("a\n")).await.unwrap_err();
    assert!(error.contains("returned 500"), "{error}");
}

#[tokio::test]
async fn stored_logs_replace_lost_logs_of_jobs() {
    // Each log can be opened once.
    let log = "2026-01-01T00:00:01.0Z a\n";
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[log]), ("m-0-a0-r1", &[log])]).await;
    shared.lock().unwrap().lost = Some(500);
    let print = async |slot: Option<u32>, stored: Option<&str>| {
        let (_root, options) = store("ns/j-0b3f9c1e/workers/1/logs/0", stored);
        let lines = (false, LogArgs::default());
        let printed = super::job(&cluster, "j", slot, lines, &options, Output::Text).await;
        printed.map_err(|error| error.to_string())
    };
    assert_eq!(print(None, None).await, Ok(()));
    for slot in [None, Some(1)] {
        assert_eq!(print(slot, Some("a\n")).await, Ok(()), "{slot:?}");
    }
    // The last one asks for a slot whose logs are not stored.
    for (slot, stored) in [(None, None), (Some(0), Some("a\n"))] {
        let error = print(slot, stored).await.unwrap_err();
        assert!(error.contains("returned 500"), "{slot:?}: {error}");
    }
}

#[tokio::test]
async fn experiment_logs_continue_after_an_unreadable_trial() {
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[])]).await;
    shared.lock().unwrap().lost = Some(500);
    let lines = (false, LogArgs::default());
    let options = storage::Options::default();
    let code = super::experiment(&cluster, "m", &options, lines, Output::Text).await;
    assert_eq!(code.unwrap(), 1);
    // One for each of the two trials.
    assert_eq!(shared.lock().unwrap().requests.len(), 2);
}

/// Limits for tests.
const LIMITS: FollowLimits = FollowLimits {
    retry_interval: Duration::from_millis(1),
    idle_max: Duration::from_millis(500),
    idle_max_ended: Duration::from_secs(10),
    refused_max: Duration::from_millis(100),
    unreachable_max: Duration::from_secs(10),
};

/// Follows the first pod until it ends. Returns its lines, and whether they are complete.
async fn follow_pod(cluster: &Cluster, shared: &Shared) -> (Vec<String>, Result<bool, Failure>) {
    let (pod, tag) = pods(shared).remove(0);
    let (sender, mut lines) = tokio::sync::mpsc::channel(16);
    let follower = PodFollower::new(cluster, tag, LogRequest::default(), LIMITS, sender);
    let ended = tokio::time::timeout(Duration::from_secs(30), follower.run(pod)).await.unwrap();
    let lines = std::iter::from_fn(|| lines.try_recv().ok());
    (lines.map(|(_, line)| line.text).collect(), ended)
}

#[tokio::test]
async fn silent_and_broken_connections_are_replaced() {
    let first = "2026-01-01T00:00:01.0Z a\n";
    let again = format!("{first}2026-01-01T00:00:02.0Z b\n");
    for end in ["!silent", "!broken"] {
        let (cluster, shared) =
            serve(&[("m-0-a0-r0", &[&format!("{first}{end}"), "!500", &again])]).await;
        let (lines, ended) = follow_pod(&cluster, &shared).await;
        assert_eq!(lines, ["a", "b"], "{end}");
        assert!(ended.unwrap(), "{end}");
    }
}

#[tokio::test]
async fn lost_log_of_an_ended_pod_is_incomplete() {
    let (cluster, shared) = serve(&[("m-0-a0-r0", &["2026-01-01T00:00:01.0Z a\n"])]).await;
    shared.lock().unwrap().lost = Some(500);
    let (lines, ended) = follow_pod(&cluster, &shared).await;
    assert_eq!(lines, ["a"]);
    assert!(!ended.unwrap());
    let error = run_follower(&cluster).await.unwrap_err().to_string();
    assert!(error.contains("the logs of 1 of 1 pods are incomplete"), "{error}");
}

#[tokio::test]
async fn denied_log_fails_the_command() {
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[])]).await;
    shared.lock().unwrap().lost = Some(403);
    let error = run_follower(&cluster).await.unwrap_err().to_string();
    assert!(error.contains("returned 403"), "{error}");
}

#[tokio::test]
async fn log_denied_only_after_an_outage_is_complete() {
    // Requests are at least 1 ms apart, and the outage lasts for more than `refused_max`.
    let mut responses = vec!["!500"; 150];
    responses.extend(["!403", "2026-01-01T00:00:01.0Z a\n"]);
    let (cluster, shared) = serve(&[("m-0-a0-r0", &responses[..])]).await;
    let (lines, ended) = follow_pod(&cluster, &shared).await;
    assert_eq!(lines, ["a"]);
    assert!(ended.unwrap());
}

/// Follows a trial until it ends, and ignores the lines.
async fn run_follower(cluster: &Cluster) -> Result<(), Failure> {
    let target = LogTarget::Trial { name: "m-0".to_owned(), attempt: None };
    let mut follower = LogFollower::new(cluster, target, GANG, None, LogRequest::default());
    follower.limits = LIMITS;
    follower.run(|_, _| {}).await
}

#[tokio::test]
async fn pending_pods_are_not_read() {
    let (cluster, shared) = serve(&[("m-0-a0-r0", &["2026-01-01T00:00:01.0Z a\n"])]).await;
    shared.lock().unwrap().num_pending_lists = 2;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a"]);
    assert_eq!(shared.lock().unwrap().num_pending_reads, 0);
}

/// Follows a trial until it ends. Returns the lines as `ATTEMPT/POD LINE`, sorted.
async fn follow(cluster: &Cluster, attempt: Option<u32>, rank: Option<u32>) -> Vec<String> {
    let mut lines = Vec::new();
    let show = |tag: &Tag, line: &LogLine| {
        lines.push(format!("{}/{} {}", tag.attempt, tag.pod, line.text));
    };
    let target = LogTarget::Trial { name: "m-0".to_owned(), attempt };
    LogFollower::new(cluster, target, GANG, rank, LogRequest::default()).run(show).await.unwrap();
    lines.sort();
    lines
}

#[tokio::test]
async fn broken_connection_neither_loses_nor_repeats_lines() {
    let first = "2026-01-01T00:00:01.500000000Z a\n2026-01-01T00:00:02.000000000Z b\n";
    // `sinceTime` has a resolution of seconds: the server repeats a line.
    let again = "2026-01-01T00:00:02.000000000Z b\n2026-01-01T00:00:02.000000001Z c\n";
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[first, again])]).await;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/0 b", "0/0 c"]);
    let requests = shared.lock().unwrap().requests.clone();
    let [(_, first), (_, second), ..] = &requests[..] else { panic!("{requests:?}") };
    assert_eq!(*first, None);
    let second = second.as_ref().unwrap();
    assert!(second.starts_with("2026-01-01T00:00:02"), "{requests:?}");
}

#[tokio::test]
async fn errors_of_the_kubelet_do_not_move_the_cursor() {
    let error = "failed to try resolving symlinks in path \"/var/log/pods/0.log\"\n";
    let first = format!("2026-01-01T00:00:01.500000000Z a\n{error}");
    let again = "2026-01-01T00:00:01.500000000Z a\n2026-01-01T00:00:02.000000000Z b\n";
    let (cluster, shared) = serve(&[("m-0-a0-r0", &[&first, error, again])]).await;
    let shown = format!("0/0 {}", error.trim_end());
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/0 b", &shown]);
    let requests = shared.lock().unwrap().requests.clone();
    let times: Vec<_> = requests.iter().map(|(_, since)| since.as_deref()).collect();
    let [None, Some(second), Some(third), ..] = times[..] else { panic!("{requests:?}") };
    assert_eq!(second, third);
    assert!(second.starts_with("2026-01-01T00:00:01"), "{requests:?}");
}

#[tokio::test]
async fn lines_with_equal_timestamps_are_kept() {
    let first = "2026-01-01T00:00:01.500000000Z a\n2026-01-01T00:00:01.500000000Z b\n";
    let again = format!("{first}2026-01-01T00:00:01.500000000Z c\n");
    let (cluster, _) = serve(&[("m-0-a0-r0", &[first, &again])]).await;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/0 b", "0/0 c"]);
}

#[tokio::test]
async fn follow_includes_later_attempts_until_trial_ends() {
    let (cluster, _) = serve(&[
        ("m-0-a0-r0", &["2026-01-01T00:00:01.0Z a\n"]),
        ("m-0-a0-r1", &["2026-01-01T00:00:01.0Z b\n"]),
        ("m-0-a1-r0", &["2026-01-01T00:00:02.0Z c\n"]),
        ("m-0-a1-r1", &["2026-01-01T00:00:02.0Z d\n"]),
    ])
    .await;
    assert_eq!(follow(&cluster, None, None).await, ["0/0 a", "0/1 b", "1/0 c", "1/1 d"]);
}

#[tokio::test]
async fn follow_reads_only_pods_of_the_rank() {
    let (cluster, shared) =
        serve(&[("m-0-a0-r0", &[]), ("m-0-a0-r1", &["2026-01-01T00:00:01.0Z b\n"])]).await;
    assert_eq!(follow(&cluster, None, Some(1)).await, ["0/1 b"]);
    assert!(shared.lock().unwrap().requests.iter().all(|(pod, _)| pod == "m-0-a0-r1"));
}

#[test]
fn attempt_is_the_chosen_or_the_latest() {
    let check = |num: u32, number: Option<u32>, expected: Result<Option<u32>, &str>| {
        let trial: Trial = serde_json::from_value(trial_object("Running", num)).unwrap();
        let selection = LogSelection { attempt: number, ..LogSelection::default() };
        match (attempt(&trial, "m-0", selection), expected) {
            (Ok(attempt), Ok(expected)) => {
                assert_eq!(attempt.map(|attempt| attempt.number), expected);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (actual, expected) => panic!("{actual:?} is not {expected:?}"),
        }
    };
    check(0, None, Ok(None));
    check(3, None, Ok(Some(2)));
    check(3, Some(1), Ok(Some(1)));
    check(3, Some(3), Err("the latest is 2"));
    check(0, Some(0), Err("has not started yet"));
}
