//! Tests of gangs that resume: which rank reads the checkpoint, and which checkpoint they use.

use std::process::Child;

use serde_json::json;
use stoker_api::contract::ReportEvent;
use stoker_test_cluster::has_root;

use crate::gang::{Gang, codes, start_with, to_the_end, trained};
use crate::process::{Pod, ProcessOutcome};
use crate::training::ENV_SIGNAL;

/// A storage below the working directory, so that processes may see different ones.
const OF_FOLDER: &str = "/proc/self/cwd/storage";

/// Trains in the directories that `script` changes to. Its `$0` is the directory of the pod
/// `folder_of(index)`, and its arguments are the command.
fn run_in_folders(
    gang: &Gang,
    script: &str,
    folder_of: &dyn Fn(usize) -> usize,
) -> Vec<ProcessOutcome> {
    let start = |(index, pod)| {
        let folder = gang.pods[folder_of(index)].file("").display().to_string();
        start_with(pod, &["sh", "-c", script, &folder], "train")
    };
    let children: Vec<Child> = gang.pods.iter().enumerate().map(start).collect();
    let wait = |(pod, child): (&Pod, Child)| pod.wait(child);
    gang.pods.iter().zip(children).map(wait).collect()
}

/// Returns the name of the checkpoint from which the latest attempt reported its start.
fn resumed_from(gang: &Gang) -> Option<String> {
    let reports = gang.server.reports.lock().unwrap();
    let started = reports.iter().rev().find_map(|report| match &report.event {
        ReportEvent::Started { resumed_from, .. } => Some(resumed_from.clone()),
        _ => None,
    });
    started.unwrap()
}

/// Two pods of two ranks each, stopped after some batches.
fn stopped_pods_of_two() -> Gang {
    let mut gang = Gang::new(2, to_the_end).env(ENV_SIGNAL, "3 5 TERM");
    for pod in &mut gang.pods {
        pod.config["storage"]["url"] = json!(OF_FOLDER);
        pod.config["gang"]["worldSize"] = json!(4);
        pod.config["gang"]["ranksPerPod"] = json!(2);
    }
    let left = run_in_folders(&gang, r#"cd "$0"; exec "$@""#, &|_| 0);
    assert_eq!(codes(&left), [79, 79], "{left:?}");
    gang.again()
}

#[test]
fn first_rank_of_a_pod_reads_the_checkpoint() {
    const FIRST_ONLY: &str = r#"cd "$0"; [ "$LOCAL_RANK" = 0 ] || cd elsewhere; exec "$@""#;
    let straight = trained(4, false, 20);
    let gang = stopped_pods_of_two();
    std::fs::create_dir(gang.pods[0].file("elsewhere")).unwrap();
    let left = run_in_folders(&gang, FIRST_ONLY, &|_| 0);
    assert_eq!(codes(&left), [0, 0], "{left:?}");
    for rank in 0..4 {
        assert!(gang.trained_by(rank) == straight, "rank {rank}: weights differ");
    }
}

#[test]
fn ranks_that_cannot_share_memory_read_the_storage() {
    // Rank 1 does not see the processes of its pod. Rank 2 may not write files as large as the
    // checkpoint, which also applies to files in memory.
    const SCRIPT: &str = r#"
        cd "$0"
        [ "$RANK" != 1 ] || exec unshare --pid --fork --mount-proc --kill-child "$@"
        [ "$RANK" != 2 ] || { trap "" XFSZ; exec prlimit --fsize=LIMIT "$@"; }
        exec "$@"
    "#;
    if !has_root("a PID namespace") {
        return;
    }
    let straight = trained(4, false, 20);
    let gang = stopped_pods_of_two();
    let checkpoint = gang.pods[0].file("storage/trial/checkpoints").join(gang.checkpoint().0);
    let files = std::fs::read_dir(checkpoint).unwrap().map(|file| file.unwrap());
    let files = files.filter(|file| file.file_name() != "manifest.json");
    let limit = files.map(|file| file.metadata().unwrap().len()).sum::<u64>() - 1;
    let left = run_in_folders(&gang, &SCRIPT.replace("LIMIT", &limit.to_string()), &|_| 0);
    assert_eq!(codes(&left), [0, 0], "{left:?} (this test requires CAP_SYS_ADMIN)");
    let first = "[rank=1] stoker: cannot open the checkpoint that this pod shares: ";
    assert!(left[0].errors.contains(first), "{}", left[0].errors);
    let second = "[rank=2] stoker: cannot share the checkpoint in this pod: File too large";
    assert!(left[1].errors.contains(second), "{}", left[1].errors);
    for rank in 0..4 {
        assert!(gang.trained_by(rank) == straight, "rank {rank}: weights differ");
    }
}

#[test]
fn ranks_resume_from_what_rank_0_finds() {
    let straight = trained(2, false, 20);
    let mut gang = Gang::new(2, to_the_end).env(ENV_SIGNAL, "1 5 TERM");
    gang.pods.iter_mut().for_each(|pod| pod.config["storage"]["url"] = json!(OF_FOLDER));
    assert_eq!(codes(&run_in_folders(&gang, r#"cd "$0"; exec "$@""#, &|_| 0)), [79, 79]);
    let early = gang.checkpoint();
    let gang = gang.again().env(ENV_SIGNAL, "1 12 TERM");
    assert_eq!(codes(&run_in_folders(&gang, r#"cd "$0"; exec "$@""#, &|_| 0)), [79, 79]);
    let late = gang.checkpoint();
    assert_ne!(early, late);
    let [mine, other] = [0, 1].map(|index| gang.pods[index].file("storage"));
    // The launcher may have stored logs in the other directory.
    let copied = std::process::Command::new("cp").arg("-rT").args([&mine, &other]).status();
    assert!(copied.unwrap().success());
    let mut gang = gang;
    for (missing, expected) in [(&late.0, Some(&early.0)), (&early.0, None)] {
        std::fs::remove_dir_all(mine.join("trial/checkpoints").join(missing)).unwrap();
        gang = gang.again();
        let refs = [&late, &early];
        let refs = refs.map(|(name, sha256)| json!({"name": name, "manifestSha256": sha256}));
        gang.pods.iter_mut().for_each(|pod| pod.config["resumeFrom"] = json!(refs));
        assert_eq!(codes(&run_in_folders(&gang, r#"cd "$0"; exec "$@""#, &|index| index)), [0, 0]);
        assert_eq!(resumed_from(&gang).as_ref(), expected);
        assert_eq!(gang.trained(), [straight.clone(), straight.clone()], "{missing}");
    }
}

#[test]
fn gang_resumes_although_the_known_checkpoint_is_unreadable() {
    let mut gang = Gang::new(2, to_the_end).env(ENV_SIGNAL, "1 5 TERM");
    gang.pods.iter_mut().for_each(|pod| pod.config["storage"]["url"] = json!(OF_FOLDER));
    let run = |gang: &Gang| run_in_folders(gang, r#"cd "$0"; exec "$@""#, &|_| 0);
    assert_eq!(codes(&run(&gang)), [79, 79]);
    let (known, sha256) = gang.checkpoint();
    let gang = gang.again().env(ENV_SIGNAL, "1 12 TERM");
    assert_eq!(codes(&run(&gang)), [79, 79]);
    let (newest, _) = gang.checkpoint();
    // A socket can be opened only as a socket.
    let state = gang.pods[0].file("storage/trial/checkpoints").join(&known).join("state.json");
    std::fs::remove_file(&state).unwrap();
    std::os::unix::net::UnixListener::bind(&state).unwrap();
    let refs = json!([{"name": known, "manifestSha256": sha256}]);
    let fields = json!({"attempt": 5, "resumeFrom": refs, "unreportedSince": 3});
    let gang = gang.again().with_config(&fields);
    assert_eq!(codes(&run(&gang)), [0, 0]);
    assert_eq!(resumed_from(&gang), Some(newest));
}

#[test]
fn gang_resumes_from_an_unreported_checkpoint() {
    let straight = trained(2, false, 20);
    let gang = Gang::new(2, to_the_end).env(ENV_SIGNAL, "1 5 TERM");
    assert_eq!(codes(&gang.run_as("train")), [79, 79]);
    let (name, _) = gang.checkpoint();
    let gang = gang.again().with_config(&json!({"resumeFrom": [], "unreportedSince": 3}));
    assert_eq!(codes(&gang.run_as("train")), [0, 0]);
    assert_eq!(resumed_from(&gang), Some(name));
    assert_eq!(gang.trained(), [straight.clone(), straight]);
}
