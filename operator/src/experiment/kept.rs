//! Keeps searches in memory, so that a pass processes only new facts instead of the whole record.
//!
//! A search is kept if a pass has decided and written everything, with the record from which it
//! would be rebuilt. The next pass uses it if the objects still have this record, and otherwise
//! rebuilds it: after an edit of the user, a deletion, or a write of another operator.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stoker_api::decisions::LogEntry;
use stoker_api::experiment::Experiment;
use stoker_engine::experiment::{Ledger, Record, Unreadable, Write};
use stoker_engine::search::SearchConfig;

use super::apply::Writer;
use crate::cache::Key;
use crate::objects::CachedTrial;

/// Searches by experiment.
#[derive(Debug, Default)]
pub struct KeptSearches {
    searches: Mutex<HashMap<Key, Kept>>,
}

/// A search and its record.
#[derive(Debug)]
pub(crate) struct Kept {
    ledger: Arc<Ledger>,
    uid: Option<String>,
    generation: Option<i64>,
    log: Vec<LogEntry>,
    trials: BTreeMap<u32, Arc<CachedTrial>>,
}

impl KeptSearches {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Kept>> {
        self.searches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes and returns the search of an experiment. Only a pass that decides keeps it again.
    pub(crate) fn take(&self, key: &Key) -> Option<Kept> {
        self.lock().remove(key)
    }

    /// Keeps a search until the next pass.
    fn keep(&self, key: Key, kept: Kept) {
        self.lock().insert(key, kept);
    }

    /// Drops all searches.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }
}

impl Kept {
    /// Creates the entry of a search that is in step with these objects.
    pub(super) fn new(
        ledger: Arc<Ledger>,
        experiment: &Experiment,
        trials: &BTreeMap<u32, Arc<CachedTrial>>,
    ) -> Self {
        Self {
            ledger,
            uid: experiment.metadata.uid.clone(),
            generation: experiment.metadata.generation,
            log: log(experiment).to_vec(),
            trials: trials.clone(),
        }
    }

    /// Returns the search if these objects have its record. They may have additional facts.
    pub(super) fn into_ledger(
        self,
        experiment: &Experiment,
        trials: &BTreeMap<u32, Arc<CachedTrial>>,
    ) -> Option<Ledger> {
        let is_current = self.uid == experiment.metadata.uid
            && self.generation == experiment.metadata.generation
            && self.log == log(experiment)
            && self.trials.len() == trials.len()
            && self.trials.iter().zip(trials).all(|((index, before), (now_index, now))| {
                index == now_index && (Arc::ptr_eq(before, now) || continues(before, now))
            });
        is_current.then(|| Arc::unwrap_or_clone(self.ledger))
    }
}

impl Writer<'_> {
    /// Rebuilds the search from the objects of this pass. Also returns the missing effects.
    pub(super) fn rebuild(
        &self,
        config: &SearchConfig,
    ) -> Result<(Ledger, Vec<Write>), Unreadable> {
        let status = self.status();
        let trials = self.trials.iter().map(|(index, trial)| (*index, &trial.record)).collect();
        let record =
            Record { log: &status.log, trials: &trials, trials_created: status.trials_created };
        Ledger::rebuild(config, record)
    }

    /// Returns the search of these objects: the kept one if it has their record. Also returns the
    /// missing effects.
    pub(super) fn search(
        &self,
        kept: Option<Kept>,
        config: &SearchConfig,
    ) -> Result<(Ledger, Vec<Write>), Unreadable> {
        let Some(ledger) = kept.and_then(|kept| kept.into_ledger(&self.experiment, &self.trials))
        else {
            self.context.metrics.searches_rebuilt.inc();
            return self.rebuild(config);
        };
        #[cfg(debug_assertions)]
        self.assert_equals_rebuilt(&ledger, config);
        Ok((ledger, vec![]))
    }

    /// Panics if a kept search differs from the rebuilt one. The rebuilt search has already skipped
    /// facts without effect, so the kept one skips them first.
    #[cfg(debug_assertions)]
    fn assert_equals_rebuilt(&self, kept: &Ledger, config: &SearchConfig) {
        let (rebuilt, missing) = self.rebuild(config).expect("a kept search has a readable record");
        let mut kept = kept.clone();
        let pending = rebuilt.pending(self.records());
        for fact in kept.pending(self.records()) {
            if !pending.contains(&fact) {
                assert_eq!(kept.advance(&fact), vec![], "{fact:?}");
            }
        }
        assert_eq!((kept, vec![]), (rebuilt, missing));
    }

    /// Keeps a search that is in step with the objects of this pass.
    pub(super) fn keep(&self, ledger: &Arc<Ledger>) {
        let kept = Kept::new(ledger.clone(), &self.experiment, &self.trials);
        self.context.kept_searches.keep(Key::of(&self.experiment), kept);
    }
}

/// Returns the log of an experiment.
pub(super) fn log(experiment: &Experiment) -> &[LogEntry] {
    experiment.status.as_ref().map_or(&[], |status| &status.log)
}

/// Returns whether a trial has the same decisions as before, and all facts of that time.
fn continues(before: &CachedTrial, now: &CachedTrial) -> bool {
    before.trial.metadata.uid == now.trial.metadata.uid
        && before.record.spec == now.record.spec
        && now.record.status.facts.starts_with(&before.record.status.facts)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stoker_api::trial::Trial;

    use super::*;
    use crate::user_resources::UserResource as _;

    fn experiment() -> Value {
        let searcher = json!({
            "metric": "loss", "maxLength": { "batches": 4 }, "random": { "maxTrials": 2 },
        });
        let event = json!({ "began": { "version": "1" } });
        let began = json!({ "order": 0, "at": "2026-01-01T00:00:00Z", "event": event });
        json!({
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Experiment",
            "metadata": { "name": "e", "uid": "u", "generation": 1 },
            "spec": { "entrypoint": { "command": ["train"] }, "searcher": searcher },
            "status": { "log": [began] },
        })
    }

    fn result(units: u64) -> Value {
        json!({ "result": { "units": units, "metric": "1" } })
    }

    fn trial(index: u32) -> Value {
        json!({
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Trial",
            "metadata": { "name": format!("e-{index}"), "uid": format!("t{index}") },
            "spec": {
                "experiment": "e", "index": index, "requestId": "r", "seed": 0, "units": 4,
                "unit": "batches", "hyperparameters": {},
            },
            "status": { "facts": [result(4)] },
        })
    }

    fn parse(
        experiment: &Value,
        trials: &[Value],
    ) -> (Experiment, BTreeMap<u32, Arc<CachedTrial>>) {
        let trials = trials.iter().map(|trial| {
            let trial: Trial = serde_json::from_value(trial.clone()).unwrap();
            (trial.spec.index, Arc::new(CachedTrial::new(trial)))
        });
        (serde_json::from_value(experiment.clone()).unwrap(), trials.collect())
    }

    #[test]
    fn search_is_kept_only_with_its_record() {
        let before = (experiment(), vec![trial(0), trial(1)]);
        let (object, trials) = parse(&before.0, &before.1);
        let config = SearchConfig::new(&object.validate_spec("e").unwrap(), 1);
        let by_index = BTreeMap::new();
        let record = Record { log: &[], trials: &by_index, trials_created: 0 };
        let ledger = Arc::new(Ledger::rebuild(&config, record).unwrap().0);
        let kept = |change: &dyn Fn(&mut Value, &mut Vec<Value>)| {
            let (mut experiment, mut changed) = before.clone();
            change(&mut experiment, &mut changed);
            let (experiment, changed) = parse(&experiment, &changed);
            let kept = Kept::new(ledger.clone(), &object, &trials);
            kept.into_ledger(&experiment, &changed).is_some()
        };
        assert!(kept(&|_, _| {}));
        assert!(kept(&|_, trials| trials[1]["status"]["facts"] = json!([result(4), result(8)])));
        assert!(kept(&|experiment, _| experiment["status"]["trialsCreated"] = json!(2)));

        assert!(!kept(&|experiment, _| experiment["metadata"]["uid"] = json!("v")));
        assert!(!kept(&|experiment, _| experiment["metadata"]["generation"] = json!(2)));
        assert!(!kept(&|experiment, _| experiment["status"]["log"][0]["order"] = json!(1)));
        assert!(!kept(&|_, trials| drop(trials.pop())));
        assert!(!kept(&|_, trials| trials.push(trial(2))));
        assert!(!kept(&|_, trials| trials[1] = trial(2)));
        assert!(!kept(&|_, trials| trials[1]["metadata"]["uid"] = json!("v")));
        assert!(!kept(&|_, trials| trials[1]["spec"]["wanted"] = json!("pause")));
        assert!(!kept(&|_, trials| trials[1]["status"]["facts"] = json!([])));
        assert!(!kept(&|_, trials| trials[1]["status"]["facts"] = json!([result(8)])));
    }
}
