//! Questions, answers and the log of an external search.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use stoker_api::experiment::Objective;
use stoker_api::external::{Answer, HistoryEntry};
use stoker_api::trial::Fact;
use stoker_api::validate::Method;

use super::*;
use crate::experiment::Record;
use crate::fixture::config;
use crate::trial::TrialRecord;

/// An external search with its record.
struct Search {
    config: SearchConfig,
    ledger: Ledger,
    log: Vec<LogEntry>,
    trials: BTreeMap<u32, TrialRecord>,
}

impl Search {
    fn begin() -> Self {
        Self::of(external())
    }

    fn of(config: SearchConfig) -> Self {
        let (log, trials) = (vec![], BTreeMap::new());
        let ledger = rebuild(&config, &log, &trials);
        let mut search = Self { config, ledger, log, trials };
        let writes = search.ledger.begin("1", vec![], Timestamp(1));
        search.execute(writes);
        search
    }

    fn execute(&mut self, writes: Vec<Write>) {
        for write in writes {
            match write {
                Write::Log(entry) => append(&mut self.log, entry),
                Write::Grant { trial, grant } => {
                    self.trials.get_mut(&trial).unwrap().spec.grants.push(grant);
                }
                Write::Pin { .. } => panic!("{write:?}"),
            }
        }
        let missing: Vec<_> = self.ledger.missing().cloned().collect();
        for spec in missing {
            self.ledger.created(spec.index);
            self.trials.insert(spec.index, TrialRecord { spec, status: Default::default() });
        }
        assert_eq!(rebuild(&self.config, &self.log, &self.trials), self.ledger);
    }

    fn answer(&mut self, actions: &Value) -> Result<(), String> {
        let asked = self.ledger.asks().unwrap();
        let answer = json!({ "call": asked.call, "actions": actions });
        let answer: Answer = serde_json::from_value(answer).unwrap();
        let writes = self.ledger.answer(asked, answer.clone(), Timestamp(2))?;
        self.execute(writes);
        // The same answer comes once more, after its question was asked again.
        assert_eq!(self.ledger.answer(asked, answer, Timestamp(3)), Ok(vec![]));
        Ok(())
    }

    fn result(&mut self, trial: u32, units: u64, metric: &str) {
        self.results(trial, units, metric, &[]);
    }

    fn results(&mut self, trial: u32, units: u64, metric: &str, values: &[&str]) {
        let fact = json!({ "result": { "units": units, "metric": metric, "values": values } });
        let fact: Fact = serde_json::from_value(fact).unwrap();
        self.trials.get_mut(&trial).unwrap().status.facts.push(fact);
        let records: Vec<TrialRecord> = self.trials.values().cloned().collect();
        for fact in self.ledger.pending(&records) {
            let writes = self.ledger.advance(&fact);
            self.execute(writes);
        }
    }

    fn events(&self) -> Value {
        let asked = self.ledger.asks().unwrap();
        json!(self.ledger.events(asked, &|trial| self.trials[&trial].spec.tag.clone()))
    }

    fn history(&self) -> Value {
        let trials = self.trials.iter().map(|(index, trial)| (*index, trial)).collect();
        let record = Record { log: &self.log, trials: &trials, trials_created: 0 };
        let history: Vec<HistoryEntry> = Ledger::history(&self.config, record).unwrap();
        json!(history)
    }
}

fn external() -> SearchConfig {
    let external = json!({ "command": ["searcher"], "maxTrials": 9 });
    config(Method::External(serde_json::from_value(external).unwrap()))
}

fn rebuild(config: &SearchConfig, log: &[LogEntry], trials: &BTreeMap<u32, TrialRecord>) -> Ledger {
    let trials = trials.iter().map(|(index, trial)| (*index, trial)).collect();
    let record = Record { log, trials: &trials, trials_created: 0 };
    let (ledger, missing) = Ledger::rebuild(config, record).unwrap();
    assert_eq!(missing, []);
    ledger
}

fn create(tag: &str, units: u64) -> Value {
    let hyperparameters = json!({ "depth": 2.0, "net": { "rate": 0.5 } });
    json!({ "create": { "hyperparameters": hyperparameters, "units": units, "tag": tag } })
}

#[test]
fn answers_are_dropped_from_the_log_but_not_forgotten() {
    let mut search = Search::begin();
    assert_eq!(search.events(), json!([{ "order": 0, "began": {} }]));
    assert_eq!(search.ledger.num_answers(), 0);
    search.answer(&json!([create("a", 3), create("b", 3)])).unwrap();
    assert_eq!(search.ledger.asks(), None);
    assert_eq!(search.trials[&1].spec.tag.as_deref(), Some("b"));
    let depth = &search.trials[&1].spec.hyperparameters["depth"];
    assert_eq!(depth, &json!(2), "hyperparameters are normalized");
    search.result(0, 3, "0.25");
    search.result(1, 3, "NaN");
    let result = |trial: u32, tag: &str, order: u64, metric: Value| {
        let fields = json!({ "trial": trial, "tag": tag, "units": 3, "metric": metric });
        json!({ "order": order, "result": fields })
    };
    let (first, second) = (result(0, "a", 2, json!(0.25)), result(1, "b", 3, Value::Null));
    assert_eq!(search.events(), json!([first]));
    search.answer(&json!([{ "continue": { "trial": 0, "units": 9 } }])).unwrap();
    assert_eq!(search.events(), json!([second]));
    assert_eq!(search.ledger.num_answers(), 2);
    let calls = search.log.iter().filter_map(|entry| match &entry.event {
        LogEvent::Answered(answered) => Some((answered.call, answered.through)),
        _ => None,
    });
    assert_eq!(calls.collect::<Vec<_>>(), [(1, 2)]);
    // A program that is started again gets all that was sent before, and its answers.
    let with_trial = |trial: u32, tag: &str| {
        let mut action = create(tag, 3);
        action["create"]["trial"] = json!(trial);
        action["create"]["hyperparameters"]["depth"] = json!(2);
        action
    };
    let expected = json!([
        { "order": 0, "began": {} },
        { "order": 1, "actions": [with_trial(0, "a"), with_trial(1, "b")] },
        first,
        { "order": 4, "actions": [{ "continue": { "trial": 0, "units": 9 } }] },
    ]);
    assert_eq!(search.history(), expected);
}

#[test]
fn metrics_are_sent_as_they_were_reported() {
    let objective = |smaller_is_better| Objective { metric: "other".to_owned(), smaller_is_better };
    let other_objectives = vec![objective(true), objective(false)];
    let config = SearchConfig { smaller_is_better: false, other_objectives, ..external() };
    let mut search = Search::of(config);
    search.answer(&json!([create("a", 3)])).unwrap();
    search.results(0, 3, "0.25", &["2", "3"]);
    let result = json!({
        "trial": 0, "tag": "a", "units": 3, "metric": 0.25, "values": [2.0, 3.0],
    });
    assert_eq!(search.events(), json!([{ "order": 2, "result": result }]));
}

#[test]
fn lost_creations_keep_given_hyperparameters_and_tags() {
    let mut search = Search::begin();
    search.answer(&json!([create("a", 3), create("b", 3)])).unwrap();
    search.result(0, 3, "0.25");
    search.result(1, 3, "0.5");
    let asked = search.ledger.asks().unwrap();
    let answer = json!({ "call": 1, "actions": [create("c", 3)] });
    let answer = serde_json::from_value(answer).unwrap();
    // The runner dies after the first write.
    let writes = search.ledger.answer(asked, answer, Timestamp(2)).unwrap();
    let Write::Log(entry) = writes[0].clone() else { panic!("{writes:?}") };
    append(&mut search.log, entry);
    let mut rebuilt = rebuild(&search.config, &search.log, &search.trials);
    assert_eq!(rebuilt, search.ledger);
    let missing = rebuilt.missing().next().unwrap();
    assert_eq!(missing.tag.as_deref(), Some("c"));
    assert_eq!(missing.hyperparameters["net"]["rate"], 0.5);
    // The second result waits: the next answer would drop the entry that has the creation.
    assert_eq!(rebuilt.asks(), None);
    rebuilt.created(2);
    assert_eq!(rebuilt.asks().map(|asked| asked.call), Some(2));
}

#[test]
fn refused_answers_stay_due() {
    let mut search = Search::begin();
    let before = search.ledger.clone();
    let error = search.answer(&json!([{ "stop": { "trial": 5 } }])).unwrap_err();
    assert!(error.contains("actions[0].stop.trial: 5: no such trial"), "{error}");
    let asked = search.ledger.asks().unwrap();
    let other = Answer { call: 7, actions: vec![] };
    let error = search.ledger.answer(asked, other, Timestamp(2)).unwrap_err();
    assert_eq!(error, "call: 7: the question had the call 0");
    assert_eq!(search.ledger, before);
}

#[test]
fn decisions_of_the_external_searcher_are_explained() {
    let mut search = Search::begin();
    let explain = |search: &Search| {
        let trials = search.trials.iter().map(|(index, trial)| (*index, trial)).collect();
        let record = Record { log: &search.log, trials: &trials, trials_created: 0 };
        Ledger::explain(&search.config, record).unwrap()
    };
    search.answer(&json!([create("a", 3), create("b", 3)])).unwrap();
    search.result(0, 3, "0.25");
    search.result(1, 3, "0.5");
    let next = explain(&search).brackets[0].next.to_string();
    assert_eq!(next, "waits for the external searcher's answer to call 1");
    search.answer(&json!([{ "continue": { "trial": 0, "units": 9 } }])).unwrap();
    // The first trial still trains when it is stopped.
    let (stop, pause) = (json!({ "stop": { "trial": 0 } }), json!({ "pause": { "trial": 1 } }));
    search.answer(&json!([stop, pause, create("c", 9)])).unwrap();
    search.result(2, 9, "0.1");
    search.answer(&json!([{ "finish": {} }])).unwrap();
    // The history has no stops that follow from the end.
    let history = search.history();
    let answers = history.as_array().unwrap().iter().filter_map(|entry| entry.get("actions"));
    let answers: Vec<&Value> = answers.collect();
    assert_eq!(answers[2].as_array().unwrap()[..2], [stop, pause]);
    assert_eq!(answers[3], &json!([{ "finish": {} }]));
    let explanation = explain(&search);
    let sentences = explanation.decisions().into_iter().map(|decision| decision.sentence());
    let expected = [
        "Trial 0 created by the external searcher; trains to 3 epochs",
        "Trial 1 created by the external searcher; trains to 3 epochs",
        "Trial 0 waits at 3 epochs for the external searcher",
        "Trial 1 waits at 3 epochs for the external searcher",
        "Trial 0 continues to 9 epochs: the external searcher decided so",
        "Trial 0 stopped at 3 epochs by the external searcher",
        "Trial 1 paused at 3 epochs by the external searcher",
        "Trial 2 created by the external searcher; trains to 9 epochs",
        "Trial 2 completed all 9 epochs with 0.1",
        "Trial 1 stopped at 3 epochs by the external searcher",
    ];
    assert_eq!(sentences.collect::<Vec<_>>(), expected);
}
