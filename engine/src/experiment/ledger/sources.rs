//! Copies of trials: where their weights come from, and the checkpoints that are kept for them.
//!
//! A copy starts from the checkpoint that its source had at its latest result. The creation records
//! the checkpoint, so a copy needs no record of its source. The checkpoint is *pinned* in the
//! record of the source before the turn that creates the copy is written. The pin goes when the
//! copy has saved a checkpoint or has ended.

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::decisions::DeletedTrial;
use stoker_api::trial::{Fact, Grant, ResultCheckpoint, TrialSource};
use stoker_api::validate::Method;

use super::{Ledger, Record, Write};
use crate::experiment::recorded;
use crate::search::state::Turn;
use crate::search::turn::{Source, Step};
use crate::trial::TrialRecord;

/// Known checkpoints and copies.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sources {
    /// Checkpoint of each result, by trial and length.
    checkpoints: BTreeMap<(u32, u64), ResultCheckpoint>,
    /// Sources by copy.
    by_copy: BTreeMap<u32, TrialSource>,
}

impl Sources {
    /// Records the checkpoint of a result.
    pub(super) fn note_result(&mut self, trial: u32, units: u64, checkpoint: ResultCheckpoint) {
        self.checkpoints.insert((trial, units), checkpoint);
    }

    /// Records the source of a copy.
    pub(super) fn note_copy(&mut self, copy: u32, source: TrialSource) {
        self.by_copy.insert(copy, source);
    }

    /// Records the sources of copies.
    pub(super) fn note_copies(&mut self, copies: impl IntoIterator<Item = (u32, TrialSource)>) {
        self.by_copy.extend(copies);
    }

    /// Forgets deleted trials.
    pub(super) fn forget(&mut self, trials: &[u32]) {
        for trial in trials {
            self.by_copy.remove(trial);
        }
        self.checkpoints.retain(|(trial, _), _| !trials.contains(trial));
    }

    /// Returns the source of a trial; `None` if it is not a copy.
    pub(super) fn of(&self, copy: u32) -> Option<&TrialSource> {
        self.by_copy.get(&copy)
    }

    /// Returns a source with its checkpoint. An earlier copy knows it even if the source was
    /// deleted.
    fn resolve(&self, source: Source) -> TrialSource {
        let Source { trial, units } = source;
        if let Some(checkpoint) = self.checkpoints.get(&(trial, units)) {
            let ResultCheckpoint { name, manifest_sha256 } = checkpoint.clone();
            let (checkpoint, manifest_sha256) = (Some(name), Some(manifest_sha256));
            return TrialSource { trial, units, checkpoint, manifest_sha256 };
        }
        let is_same = |other: &&TrialSource| (other.trial, other.units) == (trial, units);
        let copied = self.by_copy.values().find(is_same).cloned();
        copied.unwrap_or(TrialSource { trial, units, ..TrialSource::default() })
    }
}

impl Ledger {
    /// Records the sources of the copies that a turn creates, from index `next` on.
    pub(super) fn note_copies(&mut self, turn: &Turn, next: u32) {
        let created = turn.steps.iter().filter_map(|step| match step {
            Step::Create { source, .. } => Some(*source),
            _ => None,
        });
        for (copy, source) in (next..).zip(created) {
            if let Some(source) = source {
                let source = self.sources.resolve(source);
                self.sources.note_copy(copy, source);
            }
        }
    }

    /// Records the checkpoint of a recorded turn's result.
    pub(super) fn note_result(&mut self, trial: u32, grant: &Grant, record: Record<'_>) {
        let facts = record.trials.get(&trial).map(|trial| &trial.status.facts);
        let fact = facts.and_then(|facts| facts.get(grant.fact? as usize));
        if let Some(Fact::Result(result)) = fact
            && let Some(checkpoint) = result.checkpoint.clone()
        {
            self.sources.note_result(trial, result.units, checkpoint);
        }
    }

    /// Returns the step that created a deleted trial, as far as it is known.
    pub(super) fn lost_creation(&self, deleted: Option<&DeletedTrial>) -> Step {
        let group = deleted.map_or(0, |trial| trial.group);
        let source = deleted.and_then(|trial| trial.source.as_ref());
        recorded::create(group, self.search.first_units(group), source)
    }

    /// Returns the pins that must be durable before the turn that creates trials from index `next`
    /// on.
    pub(super) fn pins(&self, next: u32) -> impl Iterator<Item = Write> {
        let mut by_source: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
        for source in (next..self.book().next_index()).filter_map(|copy| self.sources.of(copy)) {
            by_source.entry(source.trial).or_default().extend(source.checkpoint.clone());
        }
        let pinned = by_source.into_iter().filter(|(_, checkpoints)| !checkpoints.is_empty());
        pinned.map(|(trial, checkpoints)| Write::Pin {
            trial,
            checkpoints: checkpoints.into_iter().collect(),
        })
    }

    /// Returns the trials with pins that are not needed any more, each with the pins that stay.
    /// Facts that the search has not taken in change nothing, so call this after all turns.
    pub fn unpinned<'a>(
        &self,
        trials: impl IntoIterator<Item = &'a TrialRecord>,
    ) -> Vec<(u32, Vec<String>)> {
        if !matches!(self.config.method, Method::Pbt { .. }) {
            return vec![];
        }
        let (mut has_checkpoint, mut pinned) = (BTreeSet::new(), vec![]);
        for record in trials {
            if !record.status.checkpoints.is_empty() {
                has_checkpoint.insert(record.spec.index);
            }
            if !record.spec.pins.is_empty() {
                pinned.push(record);
            }
        }
        let is_needed = |(copy, _): &(&u32, &TrialSource)| {
            self.state(**copy).is_some_and(|state| state.is_open())
                && !has_checkpoint.contains(*copy)
        };
        let needed = self.sources.by_copy.iter().filter(is_needed);
        let needed: BTreeSet<(u32, &String)> = needed
            .filter_map(|(_, source)| Some((source.trial, source.checkpoint.as_ref()?)))
            .collect();
        let rest = |record: &TrialRecord| {
            let index = record.spec.index;
            let pins = record.spec.pins.iter().filter(|name| needed.contains(&(index, *name)));
            (index, pins.cloned().collect::<Vec<String>>(), record.spec.pins.len())
        };
        let rest = pinned.into_iter().map(rest).filter(|(_, rest, before)| rest.len() < *before);
        rest.map(|(index, rest, _)| (index, rest)).collect()
    }
}

#[cfg(test)]
mod tests {
    use stoker_api::decisions::LogEntry;
    use stoker_api::experiment::{Length, PbtSearch, Unit};
    use stoker_api::time::Timestamp;
    use stoker_api::trial::{CheckpointRecord, ResultFact};

    use super::super::tests::case::Case;
    use super::*;

    /// Two trials train for three rounds of three epochs.
    fn population() -> Method {
        Method::Pbt {
            search: PbtSearch {
                population_size: 2,
                length_per_round: Length::new(Unit::Epochs, 3),
                num_rounds: 3,
                truncate_fraction: 0.5,
                resample_probability: 0.0,
                perturb_factor: 0.2,
            },
            units_per_round: 3,
        }
    }

    /// Adds a result with a checkpoint to a trial.
    fn report(record: &mut TrialRecord, metric: &str, checkpoint: &str) {
        let manifest_sha256 = format!("hash of {checkpoint}");
        record.status.facts.push(Fact::Result(ResultFact {
            units: 3,
            metric: metric.to_owned(),
            values: vec![],
            checkpoint: Some(ResultCheckpoint { name: checkpoint.to_owned(), manifest_sha256 }),
            at: None,
        }));
    }

    /// Applies the writes. The new trials of the search are not created.
    fn apply(writes: Vec<Write>, log: &mut Vec<LogEntry>, trials: &mut BTreeMap<u32, TrialRecord>) {
        for write in writes {
            match write {
                Write::Log(entry) => log.push(entry),
                Write::Grant { trial, grant } => {
                    if let Some(record) = trials.get_mut(&trial) {
                        record.spec.grants.push(grant);
                    }
                }
                Write::Pin { trial, checkpoints } => {
                    trials.get_mut(&trial).unwrap().spec.pins.extend(checkpoints);
                }
            }
        }
    }

    #[test]
    fn checkpoint_is_pinned_until_its_copy_has_one() {
        let config = crate::fixture::config(population());
        let (mut log, mut trials) = (vec![], BTreeMap::new());
        let rebuild = |log: &[LogEntry], trials: &BTreeMap<u32, TrialRecord>| {
            let trials = trials.iter().map(|(index, trial)| (*index, trial)).collect();
            Ledger::rebuild(&config, Record { log, trials: &trials, trials_created: 2 }).unwrap()
        };
        let none = BTreeMap::new();
        let record = Record { log: &[], trials: &none, trials_created: 0 };
        let (mut ledger, _) = Ledger::rebuild(&config, record).unwrap();
        apply(ledger.begin("test", vec![], Timestamp(0)), &mut log, &mut trials);
        let specs: Vec<_> = ledger.missing().cloned().collect();
        for spec in specs {
            ledger.created(spec.index);
            trials.insert(spec.index, TrialRecord { spec, status: Default::default() });
        }
        let mut writes = vec![];
        for (trial, metric, checkpoint) in [(0, "0.1", "a"), (1, "0.5", "b")] {
            report(trials.get_mut(&trial).unwrap(), metric, checkpoint);
            let pending = ledger.pending(trials.values());
            writes = ledger.advance(&pending[0]);
            apply(writes.clone(), &mut log, &mut trials);
        }
        // The pin comes before the home of the turn.
        assert_eq!(writes[0], Write::Pin { trial: 0, checkpoints: vec!["a".to_owned()] });
        let copy = ledger.missing().next().unwrap().clone();
        let source = TrialSource {
            trial: 0,
            units: 3,
            checkpoint: Some("a".to_owned()),
            manifest_sha256: Some("hash of a".to_owned()),
        };
        assert_eq!(copy.source, Some(source));
        // After a crash, the creation follows from the record.
        assert_eq!(rebuild(&log, &trials), (ledger.clone(), vec![]));
        ledger.created(2);
        trials.insert(2, TrialRecord { spec: copy, status: Default::default() });
        assert_eq!(ledger.unpinned(trials.values()), []);
        trials.get_mut(&1).unwrap().spec.pins = vec!["b".to_owned()];
        assert_eq!(ledger.unpinned(trials.values()), [(1, vec![])]);
        trials.get_mut(&2).unwrap().status.checkpoints.push(CheckpointRecord {
            name: "c".to_owned(),
            batches: 1,
            metric: None,
            manifest_sha256: String::new(),
            bytes: 1,
            refused: false,
        });
        assert_eq!(ledger.unpinned(trials.values()), [(0, vec![]), (1, vec![])]);
        // Nothing is remembered of a deleted trial.
        trials.remove(&1);
        apply(ledger.delete(vec![1], Timestamp(40)), &mut log, &mut trials);
        assert_eq!(rebuild(&log, &trials), (ledger, vec![]));
    }

    #[test]
    fn earlier_copy_knows_checkpoint_of_deleted_source() {
        let known = |trial: u32, checkpoint: &str| TrialSource {
            trial,
            units: 3,
            checkpoint: Some(checkpoint.to_owned()),
            manifest_sha256: Some(format!("hash of {checkpoint}")),
        };
        let mut sources = Sources::default();
        sources.note_copies([(5, known(1, "a")), (6, known(2, "b"))]);
        assert_eq!(sources.resolve(Source { trial: 2, units: 3 }), known(2, "b"));
        let unknown = TrialSource { trial: 2, units: 6, ..TrialSource::default() };
        assert_eq!(sources.resolve(Source { trial: 2, units: 6 }), unknown);
    }

    #[test]
    fn deleting_the_only_copy_removes_pins() {
        let mut case = Case::new(population());
        // The copy has left no trace in the search.
        case.trials.get_mut(&0).unwrap().spec.pins = vec!["000000000003-0".to_owned()];
        assert_eq!(case.ledger.unpinned(case.trials.values()), [(0, vec![])]);
    }
}
