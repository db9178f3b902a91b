//! Lives of jobs, as tables: what is done after each thing that happens.

use std::fmt::Write as _;

use stoker_api::condition;

use super::*;
use crate::gang::{Exit, PodPhase};
use crate::inference::progressed;

const PATIENCE: Patience = Patience {
    start_deadline_seconds: 600,
    pull_deadline_seconds: 300,
    node_lost_seconds: 60,
    finished_pods_seconds: 600,
    end_grace_seconds: 30,
    preemption_timeout_seconds: 3600,
};

/// A job with its pods, as a cluster would have them.
struct Job {
    status: InferenceStatus,
    wanted: DesiredState,
    pods: Vec<PodSeen>,
    slots: u32,
    now: i64,
    did: String,
}

impl Job {
    fn new(slots: u32) -> Self {
        Self {
            status: InferenceStatus::default(),
            wanted: DesiredState::Active,
            pods: vec![],
            slots,
            now: 100,
            did: String::new(),
        }
    }

    fn plan(&self) -> JobPlan {
        plan(&JobView {
            status: &self.status,
            wanted: self.wanted,
            generation: 1,
            slots: self.slots,
            max_restarts: 1,
            pods: &self.pods,
            starting_max: 2,
            patience: PATIENCE,
            now: Timestamp(self.now),
        })
    }

    /// Carries plans out until nothing changes.
    fn settle(&mut self) {
        for _ in 0..10 {
            let plan = self.plan();
            for start in &plan.create {
                let Start { role, slot, attempt } = *start;
                write!(self.did, " +{role:?}{slot}#{attempt}").unwrap();
                let name = format!("j-a{attempt}");
                let uid = format!("uid-{attempt}");
                let made = PodSeen { name, uid, attempt, index: slot, ..PodSeen::default() };
                self.pods.push(made);
            }
            for it in &plan.delete {
                write!(self.did, " -{}/{}", it.uid, it.grace_seconds).unwrap();
                let until = Timestamp(self.now + i64::from(it.grace_seconds));
                let of = |pod: &&mut PodSeen| pod.uid == it.uid;
                self.pods.iter_mut().find(of).unwrap().deletion = Some(until);
            }
            // One that has ended goes at once when it is deleted.
            self.pods.retain(|it| it.deletion.is_none() || !it.is_terminal());
            let is_calm = plan.create.is_empty() && plan.delete.is_empty();
            let is_same = plan.status == self.status;
            self.status = plan.status;
            if is_calm && is_same {
                return;
            }
        }
        panic!("plans do not settle: {}", self.did);
    }

    /// Something happens: `go`, `pause`, `cancel`, `kill`; `t60` is time; `3R` and the like say of the pod of attempt
    /// 3 that it runs, `C` completed, `E7` ended with code 7, `S` has a node, `X` is gone, `N` is on a node that does
    /// not answer; `3=5/9` is its report.
    fn happen(&mut self, what: &str) {
        match what {
            "go" => self.wanted = DesiredState::Active,
            "pause" => self.wanted = DesiredState::Paused,
            "cancel" => self.wanted = DesiredState::Cancelled,
            "kill" => self.wanted = DesiredState::Killed,
            _ if what.starts_with('t') => self.now += what[1..].parse::<i64>().unwrap(),
            _ => self.happen_to_pod(what),
        }
    }

    fn happen_to_pod(&mut self, what: &str) {
        let digits: String = what.chars().take_while(char::is_ascii_digit).collect();
        let (attempt, now) = (digits.parse().unwrap(), Timestamp(self.now));
        let rest = &what[digits.len()..];
        if let Some((done, total)) = rest.strip_prefix('=').and_then(|it| it.split_once('/')) {
            let (done, total) = (done.parse().unwrap(), total.parse().unwrap());
            assert!(progressed(&mut self.status, attempt, done, total), "{what}");
            return;
        }
        if rest == "X" {
            self.pods.retain(|it| it.attempt != attempt);
            return;
        }
        let is_told = self.status.workers.iter().any(|it| it.attempt == Some(attempt));
        if rest == "C" && is_told && self.status.stage != Role::Work {
            let (done, total) = match self.status.stage {
                Role::Plan => (0, self.status.rows_total),
                _ => (self.status.rows_total - self.status.rejected, self.status.rows_total),
            };
            assert!(progressed(&mut self.status, attempt, done, total), "{what}");
        }
        // `Q` is `C` of a program that reports nothing.
        let rest = if rest == "Q" { "C" } else { rest };
        let pod = self.pods.iter_mut().find(|it| it.attempt == attempt).unwrap();
        pod.scheduled_at.get_or_insert(now);
        let mut exit = |phase: PodPhase, code: i32| {
            pod.phase = phase;
            pod.exit = Some(Exit { code, finished_at: Some(now), ..Exit::default() });
        };
        match rest.split_at(1) {
            ("S", _) => {}
            ("R", _) => pod.phase = PodPhase::Running,
            ("C", _) => exit(PodPhase::Succeeded, 0),
            ("E", code) => exit(PodPhase::Failed, code.parse().unwrap()),
            ("N", _) => pod.node = NodeState::NotReady(now),
            other => panic!("{other:?}"),
        }
    }

    fn run(script: &str, slots: u32) -> Self {
        let mut job = Self::new(slots);
        job.settle();
        for what in script.split_whitespace() {
            job.happen(what);
            job.settle();
        }
        job
    }
}

/// What is made and deleted in a job of two slots after each thing of `script`, and where it stands then.
#[track_caller]
fn check(script: &str, expected: &str) {
    let job = Job::run(script, 2);
    let did = job.did.trim_start();
    assert_eq!(format!("{did} {:?}", job.status.phase), expected, "{script}");
}

const BEGIN: &str = "0R 0C";
const BEGUN: &str = "+Plan0#0 +Work0#1 +Work1#2";

#[track_caller]
fn check_begun(script: &str, expected: &str) {
    check(&format!("{BEGIN} {script}"), &format!("{BEGUN} {expected}").replace("  ", " "));
}

#[test]
fn a_job_is_planned_worked_and_finished_and_its_pods_stay_for_a_while() {
    check("", "+Plan0#0 Running");
    check(BEGIN, &format!("{BEGUN} Running"));
    check_begun("1R 2R 1C", "Running");
    check_begun("1C 2C", "+Finish0#3 Running");
    check_begun("1C 2C 3C", "+Finish0#3 Completed");
    let gone = "-uid-0/30 -uid-1/30 -uid-2/30 -uid-3/30";
    check_begun("1C 2C 3C t600", &format!("+Finish0#3 {gone} Completed"));
    check_begun("1C 2C 3C 3X 2X", "+Finish0#3 Completed");
}

#[test]
fn a_slot_that_fails_is_tried_again_alone() {
    check_begun("1R 2R 1E1", "+Work0#3 Running");
    check_begun("1E1 3E1", "+Work0#3 -uid-2/30 Failed");
    check_begun("1E1 3E137", "+Work0#3 -uid-2/30 Failed");
    check_begun("2E78", "-uid-1/30 Failed");
    check_begun("1E80", "+Work0#3 Running");
    // The second in a row waits ten seconds, the third twenty, and a new shard begins the count anew.
    check_begun("1E80 3E80 t9", "+Work0#3 Running");
    check_begun("1E80 3E80 t10", "+Work0#3 +Work0#4 Running");
    check_begun("1E80 3E80 t10 4E80 t19", "+Work0#3 +Work0#4 Running");
    check_begun("1E80 3E80 t10 4E80 t20", "+Work0#3 +Work0#4 +Work0#5 Running");
    check_begun("1E80 3=2/9 3E80", "+Work0#3 +Work0#4 Running");
    // Asked to leave by somebody else.
    check_begun("1E79 t9", "Running");
    check_begun("1E79 t10", "+Work0#3 Running");
}

#[test]
fn ten_failures_of_what_is_under_it_without_a_shard_end_a_job() {
    let mut script = BEGIN.to_owned();
    for attempt in 1..=10 {
        let attempt = if attempt == 1 { 1 } else { attempt + 1 };
        write!(script, " {attempt}E80 t300").unwrap();
    }
    let job = Job::run(&script, 2);
    assert_eq!((job.status.phase, job.status.restarts), (Phase::Failed, 0));
    let message = job.status.message.as_deref().unwrap_or_default();
    assert!(message.contains("10 times in a row and committed nothing"), "{message}");
}

#[test]
fn a_pod_that_is_gone_or_lost_is_made_again() {
    check_begun("1R 1X", "+Work0#3 Running");
    check_begun("1R 1N t59", "Running");
    // Asked to go first; once its time is over it is taken for lost, and forgotten.
    check_begun("1R 1N t60 t31", "-uid-1/30 +Work0#3 -uid-1/0 Running");
    let job = Job::run(&format!("{BEGIN} 1R 1X"), 2);
    assert_eq!((job.status.restarts, job.status.workers[0].barren), (0, 1));
    assert_eq!(job.status.ends[0].reason, "PodDeleted");
}

#[test]
fn what_was_cut_after_the_record_is_made_again() {
    let mut job = Job::run(BEGIN, 2);
    // Recorded, but not made.
    job.pods.retain(|it| it.attempt == 0);
    job.status.workers.iter_mut().for_each(|it| it.has_pod = false);
    job.did.clear();
    job.settle();
    assert_eq!(job.did, " +Work0#1 +Work1#2");
    assert_eq!(job.status.attempts, 3);
    // Made by a leader whose record is not known yet.
    let late = PodSeen { attempt: 7, phase: PodPhase::Running, ..PodSeen::default() };
    job.pods.push(late);
    job.did.clear();
    job.settle();
    assert_eq!(job.did, "");
}

#[test]
fn a_job_is_paused_and_goes_on_with_what_is_left() {
    let asked = "-uid-1/3600 -uid-2/3600";
    check_begun("1R 2R pause", &format!("{asked} Running"));
    check_begun("1R 2R pause 1E79 2X", &format!("{asked} Paused"));
    let again = "+Plan0#3 +Work0#4 +Work1#5";
    check_begun("1R 2R pause 1X 2X go 3C", &format!("{asked} {again} Running"));
    // A pod that is being deleted has no failures of its own.
    let job = Job::run(&format!("{BEGIN} 1R 2R pause 1E1 2X"), 2);
    assert_eq!((job.status.phase, job.status.restarts), (Phase::Paused, 0));
    assert!(job.status.workers.iter().all(|it| it.barren == 0), "{:?}", job.status);
    // One that changes its mind in time loses what leaves, and no more.
    check_begun("1R 2R pause go 1E79 t10", &format!("{asked} +Work0#3 Running"));
    check_begun("1R 2R pause 1C 2C", &format!("{asked} Paused"));
    // What is refused before it runs is nothing to wait for.
    let mut paused = Job::new(2);
    paused.wanted = DesiredState::Paused;
    paused.settle();
    assert_eq!((paused.did.as_str(), paused.status.phase), ("", Phase::Paused));
}

#[test]
fn a_job_is_cancelled_or_killed_for_good() {
    let asked = "-uid-1/3600 -uid-2/3600";
    check_begun("1R 2R cancel", &format!("{asked} Running"));
    check_begun("1R 2R cancel 1E79 2X", &format!("{asked} Cancelled"));
    check_begun("1R 2R cancel 1E79 2X go", &format!("{asked} Cancelled"));
    check_begun("1R 2R kill", "-uid-1/1 -uid-2/1 Cancelled");
    // A grace that is under way is cut short.
    check_begun("1R 2R cancel kill", &format!("{asked} -uid-1/1 -uid-2/1 Cancelled"));
    check_begun("1C 2C cancel 3C", "+Finish0#3 -uid-3/3600 Completed");
}

#[test]
fn only_so_many_pods_wait_for_a_node() {
    let job = Job::run("0C", 5);
    assert_eq!(job.did, " +Plan0#0 +Work0#1 +Work1#2");
    let job = Job::run("0C 2S", 5);
    assert_eq!(job.did, " +Plan0#0 +Work0#1 +Work1#2 +Work2#3");
    let job = Job::run("0C 1S 2S", 5);
    assert_eq!(job.did, " +Plan0#0 +Work0#1 +Work1#2 +Work2#3 +Work3#4");
}

#[test]
fn a_pod_that_is_refused_waits_or_counts() {
    let refused = |end: AttemptEnd, times: u32| {
        let mut job = Job::run(BEGIN, 2);
        for _ in 0..times {
            let attempt = job.status.workers[0].attempt.unwrap();
            let start = Start { role: Role::Work, slot: 0, attempt };
            refuse(&mut job.status, start, end, "Reason", "why", 1, Timestamp(job.now));
            job.pods.retain(|it| it.attempt != attempt);
            job.now += 300;
            job.settle();
        }
        job.status
    };
    let status = refused(AttemptEnd::NotStarted, 20);
    assert_eq!((status.phase, status.restarts, status.ends.len()), (Phase::Running, 0, 16));
    let status = refused(AttemptEnd::UserError, 2);
    assert_eq!((status.phase, status.restarts), (Phase::Failed, 2));
    let failed = condition::find(&status.conditions, "Failed").unwrap();
    assert!(failed.message.contains("why") && status.ended_at.is_some(), "{status:?}");
}

/// A quota that refuses one would refuse the next: they wait with it, longer each time.
#[test]
fn a_pod_that_is_refused_holds_the_others_up() {
    let mut job = Job::run("0C 1S 2S", 5);
    let refuse_last = |job: &mut Job| {
        let (slot, attempt) = (0..)
            .zip(&job.status.workers)
            .filter_map(|(slot, it)| Some((slot, it.attempt?)))
            .max_by_key(|it| it.1)
            .unwrap();
        let start = Start { role: Role::Work, slot, attempt };
        let end = AttemptEnd::NotStarted;
        refuse(&mut job.status, start, end, "Forbidden", "quota", 1, Timestamp(job.now));
        job.pods.retain(|it| it.attempt != attempt);
        job.did.clear();
        job.settle();
    };
    refuse_last(&mut job);
    assert_eq!((job.did.as_str(), job.status.phase), ("", Phase::Running));
    job.happen("t9");
    job.settle();
    assert_eq!(job.did, "", "it is not tried before its time");
    job.happen("t1");
    job.settle();
    assert!(!job.did.is_empty(), "it is tried again");
    refuse_last(&mut job);
    job.happen("t10");
    job.settle();
    assert_eq!(job.did, "", "the second wait is longer");
}

/// A script that swallows an exit code, or a program of another kind.
#[test]
fn exit_code_0_alone_ends_no_job() {
    let job = Job::run("0R 0Q", 2);
    assert_eq!((job.did.as_str(), job.status.stage), (" +Plan0#0 +Plan0#1", Role::Plan));
    assert_eq!(job.status.workers[0].barren, 1);
    assert!(
        job.status.ends[0].message.contains("did not say what it did"),
        "{:?}",
        job.status.ends
    );
    let job = Job::run("0R 0C 1C 2C 3Q", 2);
    assert_eq!(job.status.stage, Role::Work, "{}", job.did);
}

#[test]
fn conditions_say_what_is_done_and_why_not() {
    let check = |script: &str, type_: &str, expected: (bool, &str)| {
        let job = Job::run(script, 2);
        let found = condition::find(&job.status.conditions, type_).unwrap();
        let holds = found.status == condition::ConditionStatus::True;
        assert_eq!((holds, found.reason.as_str()), expected, "{script}: {}", found.message);
    };
    check("", "Valid", (true, "Accepted"));
    check("", "Scheduled", (false, "Unschedulable"));
    check("0S", "Scheduled", (true, "AllPodsScheduled"));
    check("0S", "Running", (false, "Starting"));
    check("0R", "Running", (true, "Planning"));
    check("0C 1R", "Running", (true, "WorkersRun"));
    check("0C 1S 2S 1E80 3E80", "Scheduled", (false, "BackOff"));
    check("0C 1C 2C 3R", "Running", (true, "Finishing"));
    check("0C 1C 2C 3C", "Running", (false, "Ended"));
    check("0C 1C 2C 3C", "Completed", (true, "Completed"));
    check("0C 1E78", "Failed", (true, "Failed"));
    check("pause 0X", "Running", (false, "Paused"));
    check("kill", "Cancelled", (true, "Cancelled"));
}

#[test]
fn a_status_says_how_far_it_is() {
    let job = Job::run("0=0/10 0C 1R 2R 1=2/6", 2);
    let status = &job.status;
    assert_eq!((status.rows, status.rows_total, status.progress_percent), (2, 10, 20));
    assert_eq!((status.running, status.started_at), (2, Some(Timestamp(100))));
    let job = Job::run("0=0/10 0C 1=6/6 1C 2=4/4 2C 3=9/10 t5 3C", 2);
    let status = &job.status;
    assert_eq!((status.rows, status.rejected, status.progress_percent), (10, 1, 100));
    assert_eq!((status.running, status.ended_at), (0, Some(Timestamp(105))));
    let after = plan(&JobView { now: Timestamp(900), ..view_of(&job) });
    assert_eq!(after.status, job.status, "what has ended stays as it is");
}

fn view_of(job: &Job) -> JobView<'_> {
    JobView {
        status: &job.status,
        wanted: DesiredState::Killed,
        generation: 2,
        slots: 2,
        max_restarts: 1,
        pods: &[],
        starting_max: 2,
        patience: PATIENCE,
        now: Timestamp(0),
    }
}
