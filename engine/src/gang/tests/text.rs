//! Attempts and pods as short texts.

use stoker_api::time::Timestamp;
use stoker_api::trial::{Attempt, AttemptEnd};

use crate::fixture::plain_record;
use crate::gang::{Exit, NodeState, ObservedPod, PodPhase};
use crate::trial::TrialRecord;

/// Parses the attempts of a trial of two pods. An attempt is one of:
///
/// - `live`: its pods are being created;
/// - `gated`: live, and all its pods were created, but some of them had gates;
/// - `made`: the same, and the pods were first observed without gates at time 0;
/// - `made@7`: the same, but at time 7;
/// - an end and its time, such as `User@10`.
pub(super) fn record(attempts: &str) -> TrialRecord {
    let mut record = plain_record(0);
    for (number, text) in (0..).zip(attempts.split_whitespace()) {
        let (word, at) = text.split_once('@').unwrap_or((text, "0"));
        let end = match word {
            "live" | "gated" | "made" => None,
            "User" => Some(AttemptEnd::UserError),
            "Infra" => Some(AttemptEnd::Infrastructure),
            "NotStarted" => Some(AttemptEnd::NotStarted),
            "Preempted" => Some(AttemptEnd::Preempted),
            other => panic!("{other}"),
        };
        let ended_at = end.map(|_| Timestamp(at.parse().unwrap()));
        let has_pods = word != "live";
        let started_at = Some(Timestamp(0));
        let ungated_at = (word == "made").then(|| Timestamp(at.parse().unwrap()));
        record.status.phase = stoker_api::experiment::Phase::Running;
        let times = Attempt { started_at, ungated_at, ended_at, ..Attempt::default() };
        let attempt = Attempt { number, end, has_pods, ..times };
        record.status.attempts.push(attempt);
    }
    record
}

/// Parses a pod: `INDEX@ATTEMPT` and its state, such as `0@1R`.
///
/// `P` pending, without a node; `H` gated; `U` unschedulable; `S` scheduled; `R` running;
/// `C` completed; `X` program exited with code 0, pod still running; `E7` exited with code 7 at
/// time 7; `D50` being deleted until 50; `N` on a node that is not ready since 0; `G` on a deleted
/// node.
pub(super) fn pod(text: &str) -> ObservedPod {
    let (index, rest) = text.split_once('@').unwrap();
    let attempt = rest.chars().take_while(char::is_ascii_digit).collect::<String>();
    let mut rest = rest.strip_prefix(&attempt).unwrap();
    let name = format!("t-a{attempt}-r{index}");
    let mut pod = ObservedPod {
        uid: format!("uid-{name}"),
        name,
        attempt: attempt.parse().unwrap(),
        index: index.parse().unwrap(),
        scheduled_at: Some(Timestamp(0)),
        ..ObservedPod::default()
    };
    while let Some(letter) = rest.chars().next() {
        rest = &rest[1..];
        let digits = rest.chars().take_while(char::is_ascii_digit).collect::<String>();
        rest = rest.strip_prefix(&digits).unwrap();
        let number: i64 = digits.parse().unwrap_or(0);
        let exit = |code: i64| Exit {
            code: code as i32,
            finished_at: Some(Timestamp(number)),
            ..Exit::default()
        };
        match letter {
            'P' => pod.scheduled_at = None,
            'H' => (pod.scheduled_at, pod.gates) = (None, vec!["queue.test/a".to_owned()]),
            'U' => {
                (pod.scheduled_at, pod.unschedulable) = (None, Some("0/2 nodes".to_owned()));
            }
            'S' => pod.phase = PodPhase::Pending,
            'R' => pod.phase = PodPhase::Running,
            'C' => (pod.phase, pod.exit) = (PodPhase::Succeeded, Some(exit(0))),
            'X' => (pod.phase, pod.exit) = (PodPhase::Running, Some(exit(0))),
            'E' => (pod.phase, pod.exit) = (PodPhase::Failed, Some(exit(number))),
            'D' => pod.deletion = Some(Timestamp(number)),
            'N' => pod.node = NodeState::NotReady(Timestamp(0)),
            'G' => pod.node = NodeState::Deleted,
            other => panic!("{other}"),
        }
    }
    pod
}
