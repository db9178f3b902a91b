//! Decides which waiting trials may begin an attempt now.
//!
//! Two gangs that are scheduled at the same time may each get some of the nodes that one of them
//! needs. So only a few gangs may start at a time. A gang frees its start slot as soon as all its
//! pods are scheduled, or the scheduler has found no node for one of them. Pods that the API server
//! does not accept, or that no scheduler processes, keep the slot for a minute.
//!
//! Namespaces take turns. Within a namespace, trials that have trained go first, then older ones.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stoker_api::time::Timestamp;

/// Namespace and name of a trial.
pub type TrialKey = (Arc<str>, Arc<str>);

/// Stage of a trial's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartStage {
    /// The trial waits for admission to create its pods.
    Waiting,
    /// Its pods are being created, or wait for the scheduler's first answer.
    Scheduling,
    /// A scheduling gate keeps one of its pods from being scheduled.
    Gated,
    /// The scheduler found no node for one of its pods, or has not answered for a minute. Or its
    /// pods could not be created within a minute.
    Unschedulable,
}

/// A trial that is starting, or waits to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the trial's experiment.
    pub experiment: Arc<str>,
    /// Index of the trial in its experiment.
    pub index: u32,
    /// Whether an earlier attempt has trained.
    pub has_trained: bool,
    /// When the trial was created.
    pub created_at: Timestamp,
    /// Whether an attempt has several pods.
    pub is_gang: bool,
    /// Stage of the start.
    pub stage: StartStage,
}

/// Limits of concurrent starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Gangs of several pods that may start at a time, over all namespaces; at least 1.
    pub starting_gangs_max: u32,
    /// One-pod trials that may start at a time, over all namespaces; at least 1.
    pub starting_pods_max: u32,
    /// Trials of a namespace that may have an unscheduled pod, for any reason. One-pod trials and
    /// gangs are counted separately; at least 1.
    pub pending_trials_max: u32,
}

/// Sort key of a waiting trial in its namespace: trials that have trained, then age, then
/// experiment and index.
type QueuePosition = (Reverse<bool>, Timestamp, Arc<str>, u32, Arc<str>);

/// Queue of the gangs (`true`) or of the one-pod trials of a namespace. Limits and turns of the two
/// are separate.
type QueueKey = (bool, Arc<str>);

/// All trials that are starting or wait to start, and the turns of their namespaces.
///
/// The caller reports every change with [`set`](Self::set), and then wakes the trials that
/// [`admit`](Self::admit) returns. No polling is needed.
#[derive(Clone, Debug)]
pub struct Admission {
    limits: AdmissionLimits,
    /// Sort keys of waiting trials, by queue and experiment.
    waiting: BTreeMap<QueueKey, BTreeMap<Arc<str>, BTreeSet<QueuePosition>>>,
    /// Waiting trials, except admitted ones.
    candidates: BTreeMap<TrialKey, Candidate>,
    /// Admitted and starting trials. An admitted trial stays `Waiting` until its attempt begins.
    starting: BTreeMap<TrialKey, Candidate>,
    /// Turn number at which each queue was last served.
    last_turns: BTreeMap<QueueKey, u64>,
    num_turns: u64,
    /// Whether a change since the last [`admit`](Self::admit) may allow another start.
    is_changed: bool,
}

impl Admission {
    /// Creates an admission without trials.
    pub fn new(limits: AdmissionLimits) -> Self {
        Self {
            limits,
            waiting: BTreeMap::new(),
            candidates: BTreeMap::new(),
            starting: BTreeMap::new(),
            last_turns: BTreeMap::new(),
            num_turns: 0,
            is_changed: false,
        }
    }

    /// Records the state of a trial; `None` if it neither starts nor waits to start. A waiting
    /// trial that was admitted stays admitted.
    pub fn set(&mut self, key: &TrialKey, candidate: Option<Candidate>) {
        let is_waiting = candidate.as_ref().is_some_and(|new| new.stage == StartStage::Waiting);
        if is_waiting && self.is_admitted(key) {
            return;
        }
        let before = self.candidates.get(key).or_else(|| self.starting.get(key));
        if before == candidate.as_ref() {
            return;
        }
        self.is_changed = true;
        self.remove(key);
        match candidate {
            Some(candidate) if is_waiting => self.wait(key, candidate),
            Some(candidate) => {
                self.starting.insert(key.clone(), candidate);
            }
            None => {}
        }
    }

    /// Returns whether the trial was admitted and has not begun an attempt since.
    pub fn is_admitted(&self, key: &TrialKey) -> bool {
        self.starting.get(key).is_some_and(|trial| trial.stage == StartStage::Waiting)
    }

    /// Admits waiting trials while the limits allow it, and returns them.
    pub fn admit(&mut self) -> Vec<TrialKey> {
        let mut admitted = vec![];
        if !std::mem::take(&mut self.is_changed) {
            return admitted;
        }
        for is_gang in [true, false] {
            let mut usage = Usage::of(&self.starting, is_gang);
            let max = match is_gang {
                true => self.limits.starting_gangs_max,
                false => self.limits.starting_pods_max,
            };
            while usage.num_starting < max.max(1) {
                let Some(key) = self.next(is_gang, &usage) else { break };
                let Some(candidate) = self.candidates.get(&key).cloned() else { break };
                self.remove(&key);
                self.num_turns += 1;
                self.last_turns.insert((is_gang, key.0.clone()), self.num_turns);
                usage.add(&key, &candidate);
                self.starting.insert(key.clone(), candidate);
                admitted.push(key);
            }
        }
        admitted
    }

    /// Returns the first admissible trial of the namespace whose turn it is.
    fn next(&self, is_gang: bool, usage: &Usage) -> Option<TrialKey> {
        let max = self.limits.pending_trials_max.max(1);
        let queues = self.waiting.iter().filter(|(queue_key, _)| queue_key.0 == is_gang);
        let open = queues
            .filter(|(queue_key, _)| usage.pending.get(&queue_key.1).is_none_or(|num| *num < max));
        let firsts = open.filter_map(|(queue_key, experiments)| {
            let free = experiments.iter().filter(|(name, _)| {
                !usage.blocked.contains(&(queue_key.1.clone(), (*name).clone()))
            });
            let position = free.filter_map(|(_, positions)| positions.first()).min()?;
            Some((self.last_turns.get(queue_key).copied().unwrap_or(0), queue_key, position))
        });
        let (_, queue_key, position) = firsts.min()?;
        Some((queue_key.1.clone(), position.4.clone()))
    }

    fn wait(&mut self, key: &TrialKey, candidate: Candidate) {
        let (queue_key, position) = (queue_key(key, &candidate), position(key, &candidate));
        let experiments = self.waiting.entry(queue_key).or_default();
        experiments.entry(candidate.experiment.clone()).or_default().insert(position);
        self.candidates.insert(key.clone(), candidate);
    }

    fn remove(&mut self, key: &TrialKey) {
        self.starting.remove(key);
        let Some(candidate) = self.candidates.remove(key) else { return };
        let queue_key = queue_key(key, &candidate);
        let Some(experiments) = self.waiting.get_mut(&queue_key) else { return };
        if let Some(positions) = experiments.get_mut(&candidate.experiment) {
            positions.remove(&position(key, &candidate));
            if positions.is_empty() {
                experiments.remove(&candidate.experiment);
            }
        }
        if experiments.is_empty() {
            self.waiting.remove(&queue_key);
        }
    }
}

fn queue_key(key: &TrialKey, candidate: &Candidate) -> QueueKey {
    (candidate.is_gang, key.0.clone())
}

fn position(key: &TrialKey, candidate: &Candidate) -> QueuePosition {
    let Candidate { experiment, index, has_trained, created_at, .. } = candidate;
    (Reverse(*has_trained), *created_at, experiment.clone(), *index, key.1.clone())
}

/// Share of the limits that starting trials use.
#[derive(Debug, Default)]
struct Usage {
    num_starting: u32,
    /// Number of admitted and starting trials, by namespace.
    pending: BTreeMap<Arc<str>, u32>,
    /// Namespaces and names of experiments with an unschedulable gang. Other gangs of the
    /// experiment need the same nodes. If they were pending too, each might get some of the nodes
    /// that become free.
    blocked: BTreeSet<(Arc<str>, Arc<str>)>,
}

impl Usage {
    fn of(starting: &BTreeMap<TrialKey, Candidate>, is_gang: bool) -> Self {
        let mut usage = Self::default();
        let trials = starting.iter().filter(|(_, trial)| trial.is_gang == is_gang);
        trials.for_each(|(key, trial)| usage.add(key, trial));
        usage
    }

    fn add(&mut self, key: &TrialKey, trial: &Candidate) {
        *self.pending.entry(key.0.clone()).or_default() += 1;
        match trial.stage {
            StartStage::Waiting | StartStage::Scheduling => self.num_starting += 1,
            StartStage::Gated => {}
            StartStage::Unschedulable if trial.is_gang => {
                self.blocked.insert((key.0.clone(), trial.experiment.clone()));
            }
            StartStage::Unschedulable => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: AdmissionLimits =
        AdmissionLimits { starting_gangs_max: 1, starting_pods_max: 2, pending_trials_max: 3 };

    /// Parses `NAMESPACE/EXPERIMENT-INDEX@CREATED` with flags: `g` for a gang, `t` if it has
    /// trained, and the stage unless it waits: `s` scheduling, `h` gated, `u` unschedulable.
    fn parse(text: &str) -> (TrialKey, Candidate) {
        let (name, rest) = text.split_once('@').unwrap();
        let (namespace, name) = name.split_once('/').unwrap();
        let (experiment, index) = name.split_once('-').unwrap();
        let created = rest.trim_end_matches(|letter: char| letter.is_alphabetic());
        let is = |letter: char| rest.contains(letter);
        let stage = match () {
            () if is('s') => StartStage::Scheduling,
            () if is('h') => StartStage::Gated,
            () if is('u') => StartStage::Unschedulable,
            () => StartStage::Waiting,
        };
        let candidate = Candidate {
            experiment: experiment.into(),
            index: index.parse().unwrap(),
            has_trained: is('t'),
            created_at: Timestamp(created.parse().unwrap()),
            is_gang: is('g'),
            stage,
        };
        ((namespace.into(), name.into()), candidate)
    }

    fn set(admission: &mut Admission, trials: &str) {
        for (key, candidate) in trials.split_whitespace().map(parse) {
            admission.set(&key, Some(candidate));
        }
    }

    fn admit(admission: &mut Admission) -> String {
        let admitted = admission.admit();
        let names = admitted.iter().map(|(namespace, name)| format!("{namespace}/{name}"));
        names.collect::<Vec<_>>().join(" ")
    }

    #[track_caller]
    fn check(trials: &str, expected: &str) {
        let mut admission = Admission::new(LIMITS);
        set(&mut admission, trials);
        assert_eq!(admit(&mut admission), expected, "{trials}");
    }

    /// Checks the order of admission if each admitted trial is scheduled at once.
    #[track_caller]
    fn check_order(trials: &str, expected: &str) {
        let mut admission = Admission::new(AdmissionLimits { starting_pods_max: 1, ..LIMITS });
        set(&mut admission, trials);
        let mut order = vec![];
        loop {
            let admitted = admission.admit();
            let Some(key) = admitted.first() else { break };
            order.push(format!("{}/{}", key.0, key.1));
            admission.set(key, None);
        }
        assert_eq!(order.join(" "), expected, "{trials}");
    }

    #[test]
    fn gangs_start_one_at_a_time() {
        check("n/b-0@2g n/a-0@3g n/c-0@1g", "n/c-0");
        check("n/b-0@2g n/a-0@3g n/c-0@1gs", "");
        check("n/b-0@2g n/a-0@2g", "n/a-0");
    }

    #[test]
    fn one_pod_trials_have_separate_limits() {
        check("n/a-0@1gs n/b-0@2 n/c-0@3 n/d-0@4", "n/b-0 n/c-0");
        check("n/a-0@1s n/b-0@2 n/c-0@3 n/d-0@4g", "n/d-0 n/b-0");
        check("n/a-0@1s n/b-0@2s n/c-0@3", "");
    }

    #[test]
    fn namespaces_take_turns() {
        check_order("a/x-0@1 a/x-1@1 a/x-2@1 b/y-0@9 c/z-0@5", "a/x-0 b/y-0 c/z-0 a/x-1 a/x-2");
        check_order(
            "a/x-0@1g a/x-1@1g b/y-0@9g b/y-1@9g c/z-0@5g",
            "a/x-0 b/y-0 c/z-0 a/x-1 b/y-1",
        );
    }

    #[test]
    fn a_returning_namespace_waits_for_its_turn() {
        let mut admission = Admission::new(LIMITS);
        set(&mut admission, "a/x-0@1g b/y-0@2g b/y-1@2g");
        assert_eq!(admit(&mut admission), "a/x-0");
        // The only trial of `a` starts again and again.
        set(&mut admission, "a/x-0@1gs");
        admission.set(&parse("a/x-0@1g").0, None);
        set(&mut admission, "a/x-0@1gt");
        assert_eq!(admit(&mut admission), "b/y-0");
        admission.set(&parse("b/y-0@1g").0, None);
        assert_eq!(admit(&mut admission), "a/x-0");
    }

    #[test]
    fn trained_trials_go_first_then_older_ones() {
        check_order("n/a-0@1 n/a-1@2t n/b-0@3t n/a-10@1 n/a-2@1", "n/a-1 n/b-0 n/a-0 n/a-2 n/a-10");
    }

    #[test]
    fn unschedulable_and_gated_gangs_block_no_start() {
        check("n/a-0@1gu n/b-0@2g", "n/b-0");
        check("n/a-0@1gh n/b-0@2g", "n/b-0");
        check("n/a-0@1gu m/a-0@2g", "m/a-0");
        check("n/a-0@1u n/b-0@2h n/c-0@3", "n/c-0");
        check("n/a-0@1gs n/b-0@2g", "");
    }

    /// Trials of an experiment need the same nodes.
    #[test]
    fn unschedulable_gangs_block_their_experiment() {
        check("n/a-0@1gu n/a-1@2g", "");
        check("n/a-0@1gu n/a-1@2g n/b-0@3g", "n/b-0");
        check("n/a-0@1gh n/a-1@2g", "n/a-1");
        check("n/a-0@1u n/a-1@2", "n/a-1");
    }

    #[test]
    fn pending_trials_of_a_namespace_are_limited() {
        check("n/a-0@1u n/a-1@2h n/a-2@3u n/a-3@4 m/b-0@9", "m/b-0");
        check("n/a-0@1u n/a-1@2h n/a-3@4 n/a-4@4", "n/a-3");
        check("n/a-0@1u n/a-1@2h n/a-2@3u n/b-0@9g", "n/b-0");
        check("n/a-0@1gh n/b-0@1gh n/c-0@1gu n/d-0@9g n/e-0@9", "n/e-0");
    }

    #[test]
    fn freed_start_slots_are_reused() {
        for how in ["scheduled", "unschedulable", "gated", "ended"] {
            let mut admission = Admission::new(LIMITS);
            set(&mut admission, "n/a-0@1g n/b-0@2g");
            assert_eq!(admit(&mut admission), "n/a-0");
            assert_eq!(admit(&mut admission), "");
            set(&mut admission, "n/a-0@1gs n/b-0@2g");
            assert_eq!(admit(&mut admission), "", "{how}");
            match how {
                "unschedulable" => set(&mut admission, "n/a-0@1gu"),
                "gated" => set(&mut admission, "n/a-0@1gh"),
                _ => admission.set(&parse("n/a-0@1g").0, None),
            }
            assert_eq!(admit(&mut admission), "n/b-0", "{how}");
        }
    }

    #[test]
    fn an_admission_is_used_once() {
        let mut admission = Admission::new(LIMITS);
        set(&mut admission, "n/a-0@1g");
        let key = parse("n/a-0@1g").0;
        assert_eq!(admit(&mut admission), "n/a-0");
        set(&mut admission, "n/a-0@1gt");
        assert!(admission.is_admitted(&key));
        set(&mut admission, "n/a-0@1gs");
        assert!(!admission.is_admitted(&key));
        set(&mut admission, "n/a-0@1gt n/b-0@1g");
        assert!(!admission.is_admitted(&key));
        assert_eq!(admit(&mut admission), "n/a-0");
    }
}
