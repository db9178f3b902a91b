//! Scripted external searcher. It remembers its answers by their calls, as a file would.

use std::collections::BTreeMap;

use serde_json::json;
use stoker_api::external::{
    Action, Answer, ContinueAction, CreateAction, NoFields, OrderedEvent, SearchEvent, TrialAction,
};
use stoker_api::trial::Fact;
use stoker_api::validate::Method;

use super::Runner;
use crate::experiment::explain::Decision;
use crate::experiment::{Asked, Ledger, Write};
use stoker_api::time::Timestamp;

/// State of a trial, as the searcher knows it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    Trains,
    /// Has a result at this length.
    Waits(u64),
    Over,
}

/// The searcher and its memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Service {
    trials: Vec<Known>,
    /// Position of the last event that was taken in.
    last: Option<u64>,
    /// Positions of all events about trials that were taken in.
    seen: BTreeMap<(u64, u32), ()>,
    answers: BTreeMap<u64, Vec<Action>>,
}

impl Service {
    /// Answers a question. Takes each event in once, and answers a repeated call as before.
    fn answer(&mut self, call: u64, events: &[OrderedEvent], max_trials: u32) -> Answer {
        let last = self.last;
        for OrderedEvent { order, event } in events {
            if last.is_none_or(|last| *order > last) {
                self.take_in(*order, event);
            }
        }
        let actions = match self.answers.get(&call) {
            Some(actions) => actions.clone(),
            None => {
                assert_eq!(call, self.answers.len() as u64, "calls are numbered without gaps");
                let actions = self.decide(call, max_trials);
                self.answers.insert(call, actions.clone());
                actions
            }
        };
        Answer { call, actions }
    }

    fn take_in(&mut self, order: u64, event: &SearchEvent) {
        self.last = Some(order);
        let (trial, known) = match event {
            SearchEvent::Began(_) | SearchEvent::Edited(_) => return,
            SearchEvent::LimitReached(_) => return self.trials.fill(Known::Over),
            SearchEvent::Result(result) => {
                assert_eq!(result.tag, Some(format!("t{}", result.trial)));
                let is_over = self.trials[result.trial as usize] == Known::Over;
                let waits = if is_over { Known::Over } else { Known::Waits(result.units) };
                (result.trial, waits)
            }
            SearchEvent::Closed(closed) => (closed.trial, Known::Over),
            SearchEvent::Deleted(deleted) => (deleted.trial, Known::Over),
        };
        assert_eq!(self.seen.insert((order, trial), ()), None, "an event was sent twice");
        self.trials[trial as usize] = known;
    }

    /// Decides by the number of the call.
    fn decide(&mut self, call: u64, max_trials: u32) -> Vec<Action> {
        let mut actions = vec![];
        for (trial, known) in (0..).zip(&mut self.trials) {
            let Known::Waits(trained) = *known else { continue };
            let (action, next) = match (u64::from(trial) * 7 + call * 3 + trained) % 5 {
                _ if trained >= 9 => continue,
                0 => (Action::Stop(TrialAction { trial }), Known::Over),
                1 => (Action::Pause(TrialAction { trial }), *known),
                2 => continue,
                more => {
                    let units = (trained + more).min(9);
                    (Action::Continue(ContinueAction { trial, units }), Known::Trains)
                }
            };
            actions.push(action);
            *known = next;
        }
        let num_training =
            |trials: &[Known]| trials.iter().filter(|known| **known == Known::Trains).count();
        while self.trials.len() < max_trials as usize && num_training(&self.trials) < 3 {
            let trial = self.trials.len() as u32;
            let given = json!({ "depth": 1 + trial % 3, "net": { "rate": 0.5 } });
            actions.push(Action::Create(CreateAction {
                trial: trial.is_multiple_of(2).then_some(trial),
                // The sampler draws the others.
                hyperparameters: (trial % 4 < 3).then_some(given),
                units: Some(1 + u64::from(trial) % 9),
                tag: Some(format!("t{trial}")),
            }));
            self.trials.push(Known::Trains);
        }
        if num_training(&self.trials) == 0 {
            actions.push(Action::Finish(NoFields {}));
            self.trials.fill(Known::Over);
        }
        actions
    }
}

impl Runner {
    pub(in crate::properties) fn is_external(&self) -> bool {
        matches!(self.config.method, Method::External(_))
    }

    pub(in crate::properties) fn has_slow_answers(&self) -> bool {
        self.is_slow
    }

    /// Asks all questions that are due, and takes in the answers. Adds the decisions of the last
    /// one: those before it are dropped from the log.
    pub(super) fn ask(
        &mut self,
        ledger: &mut Ledger,
        decided: &mut Vec<Decision>,
        run: &mut impl FnMut(&mut Self, Vec<Write>) -> bool,
    ) -> bool {
        let mut last = vec![];
        if let Some((asked, answer)) = self.answer.take() {
            let answered = ledger.answer(asked, answer, Timestamp(self.now)).unwrap();
            last = ledger.decisions(None, &answered);
            if !run(self, answered) || !self.create(ledger, run) {
                return false;
            }
        }
        while let Some(asked) = ledger.asks() {
            let answer = self.question(ledger, asked);
            // The first answer is lost.
            assert_eq!(self.question(ledger, asked), answer);
            if self.is_slow {
                self.answer = Some((asked, answer));
                break;
            }
            // A write stands for the way of the answer.
            if !run(self, vec![Write::Grant { trial: u32::MAX, grant: Default::default() }]) {
                return false;
            }
            let answered = ledger.answer(asked, answer, Timestamp(self.now)).unwrap();
            last = ledger.decisions(None, &answered);
            if !run(self, answered) || !self.create(ledger, run) {
                return false;
            }
        }
        decided.extend(last);
        true
    }

    fn question(&mut self, ledger: &Ledger, asked: Asked) -> Answer {
        let records = self.records();
        let tag_of = |trial: u32| {
            let of = |record: &&crate::trial::TrialRecord| record.spec.index == trial;
            records.iter().find(of).and_then(|record| record.spec.tag.clone())
        };
        let events = ledger.events(asked, &tag_of);
        let max_trials = self.settings().max_trials.unwrap_or(0);
        self.service.answer(asked.call, &events, max_trials)
    }

    /// Every event that is not due any more was taken in by the searcher, and each of its answers
    /// has had its effects once.
    pub(super) fn check_service(&self, ledger: &Ledger) {
        if !self.is_external() {
            return;
        }
        let through = ledger.asks().map_or(u64::MAX, |asked| asked.through);
        let is_over = ledger.book().is_finished();
        for record in self.records() {
            for grant in &record.spec.grants {
                let Some(fact) = grant.fact else { continue };
                let is_sent = grant.order < through && !is_over;
                let key = (grant.order, record.spec.index);
                let is_seen = self.service.seen.contains_key(&key);
                let fact: &Fact = &record.status.facts[fact as usize];
                assert!(!is_sent || is_seen, "{key:?} was not sent: {fact:?}");
            }
        }
        if !self.is_slow && !is_over {
            let num_created = ledger.book().next_index() as usize;
            assert_eq!(self.service.trials.len(), num_created, "{:?}", self.service);
            assert_eq!(ledger.num_answers(), self.service.answers.len() as u64);
        }
    }
}
