//! Table tests of clean-up pods.

use stoker_api::time::Timestamp;

use super::{TIMEOUTS, pod};
use crate::gang::{CleanUpStep, ObservedPod, PodPhase, Waiting, clean_up_step};

#[track_caller]
fn check(text: &str, is_wanted: bool, now: i64, expected: CleanUpStep) {
    let step = clean_up_step(&pod(text), Some(Timestamp(7)), is_wanted, &TIMEOUTS, Timestamp(now));
    assert_eq!(step, expected, "{text}, wanted: {is_wanted}, now {now}");
}

#[test]
fn clean_up_pods_on_dead_nodes_are_replaced() {
    use CleanUpStep::{Delete, Wait};
    check("0@0R", true, 99, Wait(None));
    check("0@0RD120", true, 99, Wait(None));
    check("0@0RN", true, 59, Wait(Some(1)));
    check("0@0RN", true, 60, Delete(30));
    check("0@0RND90", true, 60, Wait(Some(31)));
    check("0@0RND600", true, 60, Delete(30));
    check("0@0RND90", true, 91, Delete(0));
    check("0@0RG", true, 1, Delete(0));
}

#[test]
fn unwanted_clean_up_pods_are_deleted() {
    use CleanUpStep::{Delete, Finish, Wait};
    check("0@0C", false, 99, Finish);
    check("0@0E1", false, 8, Delete(30));
    check("0@0R", false, 99, Delete(30));
    check("0@0RD120", false, 99, Wait(Some(22)));
    check("0@0RD120", false, 300, Wait(Some(1)));
    check("0@0RND90", false, 59, Wait(Some(32)));
    check("0@0RND600", false, 59, Delete(30));
    check("0@0RND120", false, 121, Delete(0));
    check("0@0RG", false, 1, Delete(0));
}

#[test]
fn failed_clean_up_pods_are_retried_after_a_minute() {
    use CleanUpStep::{Finish, Retry, Wait};
    let code = || Retry("pod t-a0-r0: exit code 7".to_owned());
    check("0@0C", true, 99, Finish);
    check("0@0E7", true, 8, Wait(Some(59)));
    check("0@0E7", true, 66, Wait(Some(1)));
    check("0@0E7", true, 67, code());
    check("0@0E7N", true, 67, code());
    let mut evicted = pod("0@0E7");
    (evicted.exit, evicted.reason) = (None, Some("OutOfpods".to_owned()));
    evicted.message = Some("the node has no capacity".to_owned());
    let step = |now| clean_up_step(&evicted, Some(Timestamp(7)), true, &TIMEOUTS, Timestamp(now));
    assert_eq!(step(66), Wait(Some(1)));
    let message = "pod t-a0-r0: OutOfpods: the node has no capacity";
    assert_eq!(step(67), Retry(message.to_owned()));
}

/// A sidecar from `podOverrides` or a service mesh may run on, or fail, after the program.
#[test]
fn sidecars_do_not_matter_to_clean_up() {
    use CleanUpStep::{Delete, Finish, Retry, Wait};
    let code = || Retry("pod t-a0-r0: exit code 7".to_owned());
    check("0@0X", true, 99, Finish);
    check("0@0X", false, 99, Finish);
    check("0@0XN", true, 99, Finish);
    check("0@0E7R", true, 66, Wait(Some(1)));
    check("0@0E7R", true, 67, code());
    check("0@0E7R", false, 67, Delete(30));
    let mut failed_sidecar = pod("0@0X");
    failed_sidecar.phase = PodPhase::Failed;
    let step = clean_up_step(&failed_sidecar, Some(Timestamp(7)), true, &TIMEOUTS, Timestamp(99));
    assert_eq!(step, Finish);
    // The pod is of an earlier clean-up until its sidecar has ended.
    check("0@0XD120", true, 99, Wait(None));
    check("0@0XD120", false, 99, Finish);
    check("0@0XD90N", true, 91, Delete(0));
    check("0@0E7RD120", true, 99, Wait(None));
    check("0@0CD120", true, 99, Finish);
}

#[test]
fn clean_up_pods_that_cannot_start_are_reported() {
    use CleanUpStep::{Delete, Report, Wait};
    let report = |reason: &str, message: &str| Report {
        reason: reason.to_owned(),
        message: message.to_owned(),
    };
    check("0@0P", true, 99, Wait(None));
    let message = "pod t-a0-r0 is not scheduled: 0/2 nodes";
    check("0@0U", true, 99, report("Unschedulable", message));
    check("0@0H", true, 99, Wait(None));
    check("0@0UD120", true, 99, Wait(None));
    let check = |text: &str, reason: &str, now: i64, expected: CleanUpStep| {
        let waiting = Waiting {
            reason: reason.to_owned(),
            message: "no Secret".to_owned(),
            since: Timestamp(50),
        };
        let pod = ObservedPod { waiting: Some(waiting), ..pod(text) };
        let step = clean_up_step(&pod, None, true, &TIMEOUTS, Timestamp(now));
        assert_eq!(step, expected, "{text} {reason}, now {now}");
    };
    // `pull_deadline_seconds` is 200.
    let config = "CreateContainerConfigError";
    check("0@0S", config, 60, Wait(Some(190)));
    check("0@0S", config, 249, Wait(Some(1)));
    let message = "pod t-a0-r0: CreateContainerConfigError: no Secret";
    check("0@0S", config, 250, report(config, message));
    check("0@0SD600", config, 250, Wait(None));
    check("0@0SN", config, 59, Wait(Some(1)));
    check("0@0SG", config, 250, Delete(0));
    let message = "pod t-a0-r0: InvalidImageName: no Secret";
    check("0@0S", "InvalidImageName", 50, report("InvalidImageName", message));
}
