//! Any interleaving, repeat or restart gives the same trials. Every trial closes once. Concurrency
//! stays within its limit.
//!
//! The simulated runner applies parts of plans. Between any two steps it forgets everything except
//! the records (as JSON). Its trials report, fail and end in any order.

use std::collections::BTreeMap;

use proptest::prelude::*;
use stoker_api::contract::Directive;
use stoker_api::experiment::Phase;
use stoker_api::trial::{AttemptEnd, CloseCause, Fact};
use stoker_api::validate::Method;

use crate::experiment::{ExperimentPlan, plan};
use crate::fixture::{LOSS, checkpointed, config, record, report, validated};
use crate::search::SearchConfig;
use crate::trial::{
    BackOffLimits, NextStep, ReportEffect, RestartLimits, TargetState, TrialRecord, begin_attempt,
    close, closed, directive, end_attempt, live_attempt, next, record_report,
};

// The simulated runner causes the lost attempts, so their limit must not decide how a trial ends.
const LIMITS: RestartLimits = RestartLimits {
    max_restarts: 1,
    infrastructure_attempts_max: 1000,
    back_off: BackOffLimits::CLUSTER,
};

/// Behavior of a trial's program. It depends only on the trial's seed, so it is the same in every
/// interleaving.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Program {
    Trains,
    StopsItself,
    EndsUntrained,
    RefusesHyperparameters,
    Fails,
}

fn program(record: &TrialRecord) -> Program {
    match record.spec.seed % 8 {
        0 => Program::StopsItself,
        1 => Program::RefusesHyperparameters,
        2 => Program::Fails,
        3 => Program::EndsUntrained,
        _ => Program::Trains,
    }
}

/// Simulated runner; it remembers the records as JSON.
struct Runner {
    config: SearchConfig,
    trials: BTreeMap<u32, String>,
    trials_created: u32,
    num_closes: BTreeMap<u32, usize>,
    last_report: BTreeMap<u32, (u32, u64)>,
}

impl Runner {
    fn new(method: Method) -> Self {
        Self {
            config: config(method),
            trials: BTreeMap::new(),
            trials_created: 0,
            num_closes: BTreeMap::new(),
            last_report: BTreeMap::new(),
        }
    }

    fn records(&self) -> Vec<TrialRecord> {
        self.trials.values().map(|json| serde_json::from_str(json).unwrap()).collect()
    }

    fn plan(&self) -> ExperimentPlan {
        plan(&self.config, &self.records(), self.trials_created, false)
    }

    fn write(&mut self, record: &TrialRecord) {
        let is_close = |fact: &&Fact| matches!(fact, Fact::Closed(_));
        let num_closes = record.status.facts.iter().filter(is_close).count();
        self.num_closes.insert(record.spec.index, num_closes);
        self.trials.insert(record.spec.index, serde_json::to_string(record).unwrap());
    }

    /// Applies the first `len` parts of a plan, then checks that planning again returns the rest.
    fn apply(&mut self, len: usize) {
        let plan = self.plan();
        let mut left = len;
        let mut take = |available: usize| {
            let taken = left.min(available);
            left -= taken;
            taken
        };
        let (num_grants, num_creates) = (take(plan.grants.len()), take(plan.create.len()));
        for (trial, grant) in &plan.grants[..num_grants] {
            let mut record: TrialRecord = serde_json::from_str(&self.trials[trial]).unwrap();
            record.spec.grants.push(*grant);
            self.write(&record);
        }
        for draw in &plan.create[..num_creates] {
            assert!(
                !self.trials.contains_key(&draw.index),
                "trial {} was created twice",
                draw.index
            );
            self.write(&record(draw));
        }
        let rest = self.plan();
        assert_eq!(rest.grants, plan.grants[num_grants..]);
        assert_eq!(rest.create, plan.create[num_creates..]);
        assert_eq!(rest.stop, plan.stop);
        if num_grants + num_creates == plan.grants.len() + plan.create.len() {
            assert_eq!((&rest.status, rest.progress), (&plan.status, plan.progress));
            self.trials_created = plan.status.trials_created;
        }
    }

    /// Takes one step of one trial that its record allows: begin, report, end or close.
    fn step(&mut self, pick: usize, die: u8) {
        let is_open = |record: &TrialRecord| closed(record).is_none();
        let open: Vec<_> = self.records().into_iter().filter(is_open).collect();
        let Some(mut record) = open.get(pick % open.len().max(1)).cloned() else { return };
        let index = record.spec.index;
        let is_stopped = self.plan().stop.contains(&index);
        let target = if is_stopped { TargetState::Stop } else { TargetState::Run };
        match next(&record, target) {
            NextStep::Start { attempt, .. } => begin_attempt(&mut record, attempt),
            NextStep::Close { cause } => close(&mut record, cause, None),
            NextStep::Running => self.train(&mut record, target, die),
            NextStep::Idle | NextStep::Done => {}
        }
        self.write(&record);
    }

    fn train(&mut self, record: &mut TrialRecord, target: TargetState, die: u8) {
        let attempt = live_attempt(record).unwrap();
        let batches = record.status.batches + 1;
        let end = |record: &mut _, end| end_attempt(record, end, None, &LIMITS);
        match (die % 8, program(record)) {
            (0, _) if die < 128 => end(record, AttemptEnd::Preempted),
            (0, _) => end(record, AttemptEnd::RunnerLost),
            (1, _) if record.status.checkpoints.len() > 1 => {
                end(record, AttemptEnd::Infrastructure);
            }
            (2 | 3, _) => {
                let event = checkpointed(&format!("{batches:012}-{attempt}"), None);
                let report = report(attempt, batches, event);
                assert_eq!(record_report(record, &report, &LOSS), ReportEffect::New);
                assert_eq!(record_report(record, &report, &LOSS), ReportEffect::Repeat);
            }
            (_, Program::StopsItself) => {
                let report = report(attempt, batches, validated("0.5", None));
                record_report(record, &report, &LOSS);
                end(record, AttemptEnd::Completed);
            }
            (_, Program::EndsUntrained) => end(record, AttemptEnd::Completed),
            (_, Program::RefusesHyperparameters) => {
                end(record, AttemptEnd::InvalidHyperparameters);
            }
            (_, Program::Fails) => end(record, AttemptEnd::UserError),
            (_, Program::Trains) => match directive(record, attempt, target) {
                Directive::Continue { units } => {
                    let loss = format!("0.{}", record.spec.seed);
                    let report = report(attempt, batches, validated(&loss, Some(units)));
                    record_report(record, &report, &LOSS);
                }
                Directive::Stop => end(record, AttemptEnd::Completed),
                Directive::Wait => {}
                Directive::Preempt | Directive::Fenced => panic!("neither requested nor fenced"),
            },
        }
        let old = self.last_report.insert(record.spec.index, (attempt, batches));
        if let Some((old, batches)) = old.filter(|(reported_by, _)| *reported_by < attempt) {
            let report = report(old, batches, validated("9", Some(9)));
            assert_eq!(record_report(record, &report, &LOSS), ReportEffect::Fenced);
        }
    }

    /// Steps all trials in turn until the experiment ends.
    fn finish(&mut self) -> ExperimentPlan {
        for number in 0..10_000 {
            self.apply(usize::MAX);
            if self.plan().status.phase.is_terminal() {
                return self.plan();
            }
            self.step(number, 7);
        }
        panic!("the experiment did not end within 10,000 steps");
    }

    fn num_open(&self) -> usize {
        self.records().iter().filter(|record| closed(record).is_none()).count()
    }
}

/// Outcome that must not depend on the order: request ID, hyperparameters, close cause and facts of
/// each trial, and the index of the best trial.
type Outcome = (Vec<(String, String, Option<CloseCause>, Vec<Fact>)>, Option<u32>);

fn outcome(runner: &Runner, plan: &ExperimentPlan) -> Outcome {
    let trial = |record: TrialRecord| {
        let request_id = record.spec.request_id.clone();
        let hyperparameters = record.spec.hyperparameters.to_string();
        (request_id, hyperparameters, closed(&record), record.status.facts)
    };
    let trials = runner.records().into_iter().map(trial).collect();
    (trials, plan.status.best.as_ref().map(|best| best.index))
}

fn method() -> impl Strategy<Value = Method> {
    let random = (1..6_u32, 0..4_u32)
        .prop_map(|(max_trials, max_concurrent)| Method::Random { max_trials, max_concurrent });
    let grid = (0..4_u32).prop_map(|max_concurrent| Method::Grid { max_concurrent });
    prop_oneof![1 => Just(Method::Single), 4 => random, 3 => grid]
}

fn concurrency_limit(method: Method) -> usize {
    match method {
        Method::Single => 1,
        Method::Random { max_concurrent: 0, max_trials } => max_trials as usize,
        Method::Grid { max_concurrent: 0 } => 6,
        Method::Random { max_concurrent, .. } | Method::Grid { max_concurrent } => {
            max_concurrent as usize
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_interleaving_gives_the_same_trials(
        method in method(),
        seed in 0..1000_u32,
        steps in prop::collection::vec((0..4_u8, 0..16_usize, any::<u8>()), 0..60),
    ) {
        let mut sequential = Runner::new(method);
        sequential.config.seed = seed;
        let expected = sequential.finish();

        let mut interleaved = Runner::new(method);
        interleaved.config.seed = seed;
        for (kind, pick, die) in steps {
            if kind == 0 { interleaved.apply(pick % 4) } else { interleaved.step(pick, die) }
            let num_open = interleaved.num_open();
            let limit = concurrency_limit(method);
            prop_assert!(num_open <= limit, "more open trials than {:?}", method);
            let is_over = interleaved.plan().status.phase.is_terminal();
            prop_assert!(!is_over || num_open == 0, "ended before the last trial closed");
        }
        let plan = interleaved.finish();

        prop_assert_eq!(outcome(&interleaved, &plan), outcome(&sequential, &expected));
        prop_assert_eq!(plan.status.phase, expected.status.phase);
        let num_closes = &interleaved.num_closes;
        prop_assert!(num_closes.values().all(|closes| *closes == 1), "{:?}", num_closes);
        prop_assert_eq!(plan.status.trials_closed, plan.status.trials_created);
        prop_assert_eq!(plan.grants, []);
        prop_assert!(plan.status.phase != Phase::Completed || plan.progress == 1.0);
    }

    #[test]
    fn deleted_trial_indexes_are_never_reused(
        method in method(),
        steps in prop::collection::vec((0..5_u8, 0..16_usize, any::<u8>()), 0..60),
    ) {
        let mut runner = Runner::new(method);
        let mut deleted = std::collections::BTreeSet::new();
        for (kind, pick, die) in steps {
            match kind {
                0 => {
                    runner.apply(usize::MAX);
                    let indices: Vec<_> = runner.trials.keys().copied().collect();
                    if let Some(index) = indices.get(pick) {
                        runner.trials.remove(index);
                        deleted.insert(*index);
                    }
                }
                1 => runner.apply(usize::MAX),
                _ => runner.step(pick, die),
            }
            prop_assert!(deleted.iter().all(|index| !runner.trials.contains_key(index)));
            prop_assert!(runner.num_open() <= concurrency_limit(method));
        }
        let end = runner.finish();
        prop_assert_eq!(end.status.trials_closed, end.status.trials_created);
    }
}
