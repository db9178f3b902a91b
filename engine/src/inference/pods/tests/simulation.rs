//! A simulated job: applies plans, and changes its pods by short texts.

use std::fmt::Write as _;

use stoker_api::experiment::DesiredState;
use stoker_api::inference::{INCOMPLETE_SHARDS, InferenceStatus, Role};
use stoker_api::time::Timestamp;

use super::super::{JobPlan, JobView, plan};
use crate::gang::{Exit, NodeState, ObservedPod, PodPhase, Timeouts, Waiting};
use crate::inference::{ProcessStart, record_progress};

pub(super) const TIMEOUTS: Timeouts = Timeouts {
    start_deadline_seconds: 600,
    pull_deadline_seconds: 300,
    node_lost_seconds: 60,
    finished_pods_seconds: 600,
    end_grace_seconds: 30,
    preemption_timeout_seconds: 3600,
};

fn image_pull_error(since: Timestamp) -> Waiting {
    let (reason, message) = ("ImagePullBackOff".to_owned(), "no such image".to_owned());
    Waiting { reason, message, since }
}

/// A job with its simulated pods.
pub(super) struct Job {
    pub(super) status: InferenceStatus,
    pub(super) desired_state: DesiredState,
    pub(super) pods: Vec<ObservedPod>,
    pub(super) slots: u32,
    pub(super) now: i64,
    /// Created pods as ` +ROLE SLOT#ATTEMPT`, deleted pods as ` -UID/GRACE`.
    pub(super) actions: String,
}

impl Job {
    pub(super) fn new(slots: u32) -> Self {
        Self {
            status: InferenceStatus::default(),
            desired_state: DesiredState::Active,
            pods: vec![],
            slots,
            now: 100,
            actions: String::new(),
        }
    }

    pub(super) fn plan(&self) -> JobPlan {
        plan(&JobView {
            status: &self.status,
            desired_state: self.desired_state,
            generation: 1,
            slots: self.slots,
            max_restarts: 1,
            pods: &self.pods,
            starting_max: 2,
            timeouts: TIMEOUTS,
            now: Timestamp(self.now),
        })
    }

    /// Applies plans until nothing changes.
    pub(super) fn apply_plans(&mut self) {
        for _ in 0..10 {
            let plan = self.plan();
            for start in &plan.create {
                let ProcessStart { role, slot, attempt } = *start;
                write!(self.actions, " +{role:?}{slot}#{attempt}").unwrap();
                let name = format!("j-a{attempt}");
                let uid = format!("uid-{attempt}");
                let created =
                    ObservedPod { name, uid, attempt, index: slot, ..ObservedPod::default() };
                self.pods.push(created);
            }
            for delete in &plan.delete {
                write!(self.actions, " -{}/{}", delete.uid, delete.grace_seconds).unwrap();
                let until = Timestamp(self.now + i64::from(delete.grace_seconds));
                let has_uid = |pod: &&mut ObservedPod| pod.uid == delete.uid;
                self.pods.iter_mut().find(has_uid).unwrap().deletion = Some(until);
            }
            // A terminal pod disappears at once when it is deleted, and any pod without a grace
            // period.
            let is_forced = |pod: &ObservedPod| {
                plan.delete.iter().any(|delete| delete.uid == pod.uid && delete.grace_seconds == 0)
            };
            self.pods
                .retain(|pod| pod.deletion.is_none() || !(pod.is_terminal() || is_forced(pod)));
            let touches_no_pod = plan.create.is_empty() && plan.delete.is_empty();
            let is_same = plan.status == self.status;
            self.status = plan.status;
            if touches_no_pod && is_same {
                return;
            }
        }
        panic!("plans do not become stable: {}", self.actions);
    }

    /// Applies an event: `go`, `pause`, `cancel` or `kill` by the user; `t60` lets 60 s pass;
    /// `3=5/9` is a report of attempt 3. `3` and a letter is an event of that attempt's pod:
    /// `S` scheduled, `R` running, `C` completed, `Q` completed without a report, `E7` exited with
    /// code 7, `I` finished with incomplete shards, `P` program exited with code 0 and the pod
    /// still runs, `W` scheduled with an image that cannot be pulled, `X` deleted, `N` on a node
    /// that does not respond, `D50` deleted by a drain that ends in 50 s.
    pub(super) fn apply_event(&mut self, what: &str) {
        match what {
            "go" => self.desired_state = DesiredState::Active,
            "pause" => self.desired_state = DesiredState::Paused,
            "cancel" => self.desired_state = DesiredState::Cancelled,
            "kill" => self.desired_state = DesiredState::Killed,
            _ if what.starts_with('t') => self.now += what[1..].parse::<i64>().unwrap(),
            _ => self.apply_pod_event(what),
        }
    }

    fn apply_pod_event(&mut self, what: &str) {
        let digits: String = what.chars().take_while(char::is_ascii_digit).collect();
        let (attempt, now) = (digits.parse().unwrap(), Timestamp(self.now));
        let rest = &what[digits.len()..];
        if let Some((done, total)) = rest.strip_prefix('=').and_then(|rows| rows.split_once('/')) {
            let (done, total) = (done.parse().unwrap(), total.parse().unwrap());
            assert!(record_progress(&mut self.status, attempt, done, total), "{what}");
            return;
        }
        if rest == "X" {
            self.pods.retain(|pod| pod.attempt != attempt);
            return;
        }
        let is_live = self.status.workers.iter().any(|worker| worker.attempt == Some(attempt));
        if rest == "C" && is_live && self.status.stage != Role::Work {
            let (done, total) = match self.status.stage {
                Role::Plan => (0, self.status.rows_total),
                _ => (self.status.rows_total - self.status.rejected, self.status.rows_total),
            };
            assert!(record_progress(&mut self.status, attempt, done, total), "{what}");
        }
        let rest = if rest == "Q" { "C" } else { rest };
        let pod = self.pods.iter_mut().find(|pod| pod.attempt == attempt).unwrap();
        pod.scheduled_at.get_or_insert(now);
        let message = if rest == "I" { INCOMPLETE_SHARDS } else { "" };
        let mut exit = |phase: PodPhase, code: i32| {
            pod.phase = phase;
            let (message, finished_at) = (message.to_owned(), Some(now));
            pod.exit = Some(Exit { code, message, finished_at, ..Exit::default() });
        };
        match rest.split_at(1) {
            ("S", _) => {}
            ("R", _) => pod.phase = PodPhase::Running,
            ("C", _) => exit(PodPhase::Succeeded, 0),
            ("E", code) => exit(PodPhase::Failed, code.parse().unwrap()),
            ("I", _) => exit(PodPhase::Failed, 80),
            ("P", _) => exit(PodPhase::Running, 0),
            ("W", _) => pod.waiting = Some(image_pull_error(now)),
            ("N", _) => pod.node = NodeState::NotReady(now),
            ("D", seconds) => pod.deletion = Some(now.plus(seconds.parse().unwrap())),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn run(script: &str, slots: u32) -> Self {
        let mut job = Self::new(slots);
        job.apply_plans();
        for what in script.split_whitespace() {
            job.apply_event(what);
            job.apply_plans();
        }
        job
    }
}
