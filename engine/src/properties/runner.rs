//! Simulated runner of an experiment.

mod checks;
mod copies;
mod explained;
mod requests;
mod service;
mod training;

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::decisions::{LogEntry, SearchSettings};
use stoker_api::experiment::{
    DesiredState, MedianStopping, Objective, Phase, ReopenRequest, SearchLimits,
};
use stoker_api::external::Answer;
use stoker_api::time::Timestamp;
use stoker_api::trial::{DesiredTrialState, Fact, TrialSpec, TrialStatus};
use stoker_api::validate::Method;

use self::requests::prior;
use self::service::Service;
use crate::experiment::{Asked, Ledger, Record, Request, Summary, Write, append, desired_states};
use crate::fixture::config;
use crate::search::SearchConfig;
use crate::trial::{
    BackOffLimits, NextStep, RestartLimits, TargetState, TrialRecord, begin_attempt, close,
    is_open, is_reopening, next, reopen, stamp_facts,
};

// The simulated runner causes the lost attempts, so their limit must not decide how a trial ends.
const LIMITS: RestartLimits = RestartLimits {
    max_restarts: 1,
    infrastructure_attempts_max: 1000,
    back_off: BackOffLimits::CLUSTER,
    has_trained: false,
};
const RELEASE_SECONDS: u32 = 20;

/// Simulated runner; it remembers the records as JSON.
#[derive(Clone, Debug)]
pub(super) struct Runner {
    config: SearchConfig,
    /// Places before an edit.
    places_max: u32,
    /// Full length before all edits.
    units_min: u64,
    pub(super) trials: BTreeMap<u32, String>,
    pub(super) log: String,
    trials_created: u32,
    pub(super) state: DesiredState,
    pub(super) reopen: Option<ReopenRequest>,
    now: i64,
    /// Lost in a crash.
    pub(super) live: Option<Ledger>,
    pub(super) num_closes: BTreeMap<u32, usize>,
    last_report: BTreeMap<u32, (u32, u64)>,
    /// Checkpoints whose files exist, as trial and name.
    files: BTreeSet<(u32, String)>,
    /// External searcher, which survives crashes.
    service: Service,
    /// Whether answers arrive one pass after their questions.
    is_slow: bool,
    /// Answer on its way. Lost in a crash.
    answer: Option<(Asked, Answer)>,
}

impl Runner {
    pub(super) fn new(method: Method, seed: u32) -> Self {
        let config = SearchConfig { seed, ..config(method) };
        Self {
            units_min: config.units_max,
            config,
            places_max: 0,
            trials: BTreeMap::new(),
            log: "[]".to_owned(),
            trials_created: 0,
            state: DesiredState::Active,
            reopen: None,
            now: 0,
            live: None,
            num_closes: BTreeMap::new(),
            last_report: BTreeMap::new(),
            files: BTreeSet::new(),
            service: Service::default(),
            is_slow: false,
            answer: None,
        }
    }

    pub(super) fn with_median_stopping(mut self, rule: Option<MedianStopping>) -> Self {
        self.config.median_stopping = rule;
        self
    }

    pub(super) fn with_limits(mut self, limits: SearchLimits) -> Self {
        self.config.limits = limits;
        self
    }

    pub(super) fn with_objective(mut self, is_set: bool) -> Self {
        let objective = Objective { metric: "speed".to_owned(), smaller_is_better: false };
        self.config.other_objectives = vec![objective; usize::from(is_set)];
        self
    }

    pub(super) fn with_slow_answers(mut self, is_slow: bool) -> Self {
        self.is_slow = is_slow && matches!(self.config.method, Method::External(_));
        self
    }

    /// Forgets what is not recorded.
    pub(super) fn crash(&mut self) {
        (self.live, self.answer) = (None, None);
    }

    /// Forgets up to `num` of the latest trials. They have not changed since the search created
    /// them, and no entry of the log is later: a runner may write such trials later than the turns
    /// that follow their creation.
    pub(super) fn lose_created(&mut self, num: usize) {
        let logged = self.log().last().map_or(0, |entry| entry.order);
        for _ in 0..num {
            let Some(record) = self.records().pop() else { return };
            let TrialSpec { index, grants, pins, order, .. } = &record.spec;
            let is_unchanged = grants.is_empty() && pins.is_empty();
            let is_later = order.is_some_and(|order| order >= logged);
            if !is_unchanged || !is_later || record.status != TrialStatus::default() {
                return;
            }
            self.trials.remove(index);
            self.trials_created = self.trials_created.min(*index);
        }
    }

    /// Changes the editable settings.
    pub(super) fn edit(&mut self, edit: impl FnOnce(&mut SearchSettings)) {
        self.places_max = self.places_max.max(self.ledger().places().unwrap_or(u32::MAX));
        let mut settings = self.config.settings();
        edit(&mut settings);
        self.config = self.config.with(&settings);
    }

    pub(super) fn method(&self) -> &Method {
        &self.config.method
    }

    pub(super) fn settings(&self) -> SearchSettings {
        self.config.settings()
    }

    /// Returns whether the rungs of the method can grow.
    pub(super) fn can_grow(&self) -> bool {
        !matches!(
            self.config.method,
            Method::SyncHalving { .. }
                | Method::AdaptiveSimple(_)
                | Method::Hyperband(_)
                | Method::Pbt { .. }
        )
    }

    pub(super) fn records(&self) -> Vec<TrialRecord> {
        self.trials.values().map(|json| serde_json::from_str(json).unwrap()).collect()
    }

    /// Returns the trials without the states that follow from free places.
    pub(super) fn decisions(&self) -> Vec<TrialRecord> {
        let mut records = self.records();
        for record in &mut records {
            record.spec.desired_state = DesiredTrialState::default();
            record.spec.desired_since = None;
        }
        records
    }

    pub(super) fn log(&self) -> Vec<LogEntry> {
        serde_json::from_str(&self.log).unwrap()
    }

    pub(super) fn rebuilt(&self) -> (Ledger, Vec<Write>) {
        let (records, log) = (self.records(), self.log());
        let trials = records.iter().map(|record| (record.spec.index, record)).collect();
        let record = Record { log: &log, trials: &trials, trials_created: self.trials_created };
        Ledger::rebuild(&self.config, record).unwrap()
    }

    pub(super) fn ledger(&self) -> Ledger {
        self.live.clone().unwrap_or_else(|| self.rebuilt().0)
    }

    pub(super) fn phase(&self) -> Phase {
        let records = self.records();
        let summary = Summary::new(&self.config, &records);
        summary
            .status(&self.ledger(), self.state == DesiredState::Cancelled, "mnist", |_| None)
            .phase
    }

    fn write(&mut self, record: &TrialRecord) {
        let facts = record.status.facts.iter().rev();
        let latest = facts.take_while(|fact| !matches!(fact, Fact::Reopened(_)));
        let num_closes = latest.filter(|fact| matches!(fact, Fact::Closed(_))).count();
        self.num_closes.insert(record.spec.index, num_closes);
        self.trials.insert(record.spec.index, serde_json::to_string(record).unwrap());
    }

    fn execute(&mut self, write: Write) {
        match write {
            Write::Log(entry) => {
                let mut log = self.log();
                append(&mut log, entry);
                self.log = serde_json::to_string(&log).unwrap();
            }
            Write::Grant { trial, grant } => {
                let Some(json) = self.trials.get(&trial) else { return };
                let mut record: TrialRecord = serde_json::from_str(json).unwrap();
                if is_reopening(&grant) {
                    record.spec.desired_state = DesiredTrialState::Pause;
                }
                record.spec.grants.push(grant);
                self.write(&record);
            }
            Write::Pin { trial, checkpoints } => self.pin(trial, checkpoints),
        }
    }

    /// Lets the search take in what is recorded. Crashes after `left` writes.
    pub(super) fn settle(&mut self, mut left: usize) {
        let live = self.live.take().map(|ledger| (ledger, vec![]));
        let (mut ledger, writes) = live.unwrap_or_else(|| self.rebuilt());
        let now = Timestamp(self.now);
        let mut run = |runner: &mut Self, writes: Vec<Write>| {
            for write in writes {
                if left == 0 {
                    return false;
                }
                left -= 1;
                runner.execute(write);
            }
            true
        };
        if !run(self, writes) {
            return;
        }
        let is_over = self.state == DesiredState::Cancelled;
        if !is_over && !run(self, ledger.begin("test", prior(&self.config.method), now)) {
            return;
        }
        let records = self.records();
        let spending = Summary::new(&self.config, &records);
        let config = self.config.clone();
        let record_of = |index: u32| records.iter().find(|record| record.spec.index == index);
        let edited = match is_over {
            true => Some(vec![]),
            false => ledger.edit(&config, &spending, record_of, now),
        };
        let Some(writes) = edited else { return self.want(&ledger) };
        if !run(self, writes) {
            return;
        }
        let trials = records.iter().map(|record| (record.spec.index, record)).collect();
        let deleted = ledger.deleted(&trials);
        if !deleted.is_empty() && !is_over && !run(self, ledger.delete(deleted, now)) {
            return;
        }
        if !is_over && !run(self, ledger.reach_limit(&spending, now)) {
            return;
        }
        let pending = if is_over { vec![] } else { ledger.pending(&records) };
        // Each turn is complete, with the trials that it created, before the next one.
        if !self.create(&mut ledger, &mut run) {
            return;
        }
        let mut decided = vec![];
        for fact in pending {
            let writes = ledger.advance(&fact);
            decided.extend(ledger.decisions(Some(&fact), &writes));
            if !run(self, writes) || !self.create(&mut ledger, &mut run) {
                return;
            }
        }
        let Some(is_reopened) = self.take_request(&mut ledger, is_over, &mut run) else { return };
        if !is_over && !self.ask(&mut ledger, &mut decided, &mut run) {
            return;
        }
        self.want(&ledger);
        self.trials_created = ledger.book().next_index() - ledger.num_uncreated();
        // A search that had ended may have reached a limit since. The next turn ends it again.
        if !is_over && !is_reopened {
            assert_ne!(ledger.seconds_to_limit(&spending, now), Some(0));
        }
        self.check_rebuilt(&ledger, is_over);
        self.check_decided(decided);
        self.live = Some(ledger);
    }

    /// Removes pins, and writes the desired states of trials.
    fn want(&mut self, ledger: &Ledger) {
        let (state, now) = (self.state, Timestamp(self.now));
        let request = Request { state, release_seconds: RELEASE_SECONDS, now };
        self.unpin(ledger);
        for (index, wanted) in desired_states(ledger, &self.records(), request).wanted {
            let mut record: TrialRecord = serde_json::from_str(&self.trials[&index]).unwrap();
            record.spec.desired_state = wanted;
            self.write(&record);
        }
    }

    fn create(
        &mut self,
        ledger: &mut Ledger,
        run: &mut impl FnMut(&mut Self, Vec<Write>) -> bool,
    ) -> bool {
        if self.state == DesiredState::Cancelled {
            return true;
        }
        let missing: Vec<_> = ledger.missing().cloned().collect();
        for mut spec in missing {
            // An empty log entry stands for the write.
            let records = self.records();
            let request = Request {
                state: self.state,
                release_seconds: RELEASE_SECONDS,
                now: Timestamp(self.now),
            };
            if desired_states(ledger, &records, request).num_free == 0 {
                spec.desired_state = DesiredTrialState::Pause;
            }
            if !run(self, vec![Write::Grant { trial: u32::MAX, grant: Default::default() }]) {
                return false;
            }
            let index = spec.index;
            assert!(!self.trials.contains_key(&index), "trial {index} was created twice");
            self.write(&TrialRecord { spec, status: Default::default() });
            ledger.created(index);
        }
        true
    }

    /// Takes one step of one trial that its record allows: begin, report, end or close.
    pub(super) fn step(&mut self, pick: usize, die: u8) {
        self.now += 1;
        let open: Vec<_> = self.records().into_iter().filter(is_open).collect();
        let Some(mut record) = open.get(pick % open.len().max(1)).cloned() else { return };
        let num_facts = record.status.facts.len();
        let target = match record.spec.desired_state {
            DesiredTrialState::Run => TargetState::Run,
            DesiredTrialState::Pause => TargetState::Pause,
            DesiredTrialState::Stop | DesiredTrialState::Kill => TargetState::Stop,
        };
        match next(&record, target) {
            NextStep::Start { attempt, .. } => {
                begin_attempt(&mut record, attempt);
                self.start_copy(&mut record, attempt);
                record.status.attempts.last_mut().unwrap().started_at = Some(Timestamp(self.now));
            }
            NextStep::Close { cause } => close(&mut record, cause, None),
            NextStep::Reopen => reopen(&mut record),
            NextStep::Running => self.train(&mut record, target, die),
            NextStep::Idle | NextStep::Done => {}
        }
        stamp_facts(&mut record, num_facts, Timestamp(self.now));
        if let Some(attempt) = record.status.attempts.last_mut().filter(|last| last.end.is_some()) {
            attempt.ended_at.get_or_insert(Timestamp(self.now));
        }
        self.write(&record);
    }

    /// Steps all trials in turn until the experiment ends.
    pub(super) fn finish(&mut self) {
        for number in 0..20_000 {
            self.settle(usize::MAX);
            if self.phase().is_terminal() {
                // The search does not take in the ends of cancelled trials.
                if self.state != DesiredState::Cancelled {
                    self.check_unpinned();
                }
                return;
            }
            self.step(number, 7);
        }
        panic!("{:?} did not end within 20,000 steps: {:?}", self.config.method, self.ledger());
    }
}
