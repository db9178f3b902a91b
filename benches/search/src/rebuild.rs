//! Time to rebuild a search from its record, and time of a live decision with its writes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use stoker_api::decisions::LogEntry;
use stoker_api::time::Timestamp;
use stoker_api::trial::{Fact, ResultFact};
use stoker_engine::experiment::{Ledger, Record, Write, append};
use stoker_engine::search::SearchConfig;
use stoker_engine::search::book::TrialState;
use stoker_engine::trial::TrialRecord;

use crate::{BenchError, clock, space};

/// Number of trials of the search.
const TRIALS: u32 = 10_000;

/// Records of a search, as a runner writes them.
pub(crate) struct Records {
    pub(crate) log: Vec<LogEntry>,
    pub(crate) trials: BTreeMap<u32, TrialRecord>,
}

impl Records {
    fn rebuild(&self, config: &SearchConfig) -> Result<Ledger, BenchError> {
        let trials = self.trials.iter().map(|(index, record)| (*index, record)).collect();
        let trials_created = self.trials.len() as u32;
        let record = Record { log: &self.log, trials: &trials, trials_created };
        Ok(Ledger::rebuild(config, record)?.0)
    }

    /// Executes writes and returns the trials that they change.
    fn execute(&mut self, writes: Vec<Write>, ledger: &mut Ledger) -> BTreeSet<u32> {
        let mut changed = BTreeSet::new();
        for write in writes {
            match write {
                Write::Log(entry) => append(&mut self.log, entry),
                Write::Pin { .. } => {}
                Write::Grant { trial, grant } => {
                    changed.insert(trial);
                    if let Some(record) = self.trials.get_mut(&trial) {
                        record.spec.grants.push(grant);
                    }
                }
            }
        }
        let created: Vec<_> = ledger.missing().cloned().collect();
        for spec in created {
            changed.insert(spec.index);
            ledger.created(spec.index);
            self.trials.insert(spec.index, TrialRecord { spec, status: Default::default() });
        }
        changed
    }
}

/// Runs a search to its end. Returns the record, the live search and the number of turns.
pub(crate) fn record(config: &SearchConfig) -> Result<(Records, Ledger, u32), BenchError> {
    let mut records = Records { log: vec![], trials: BTreeMap::new() };
    let mut ledger = records.rebuild(config)?;
    let mut num_turns = 1;
    let writes = ledger.begin("bench", vec![], Timestamp::default());
    let mut active = records.execute(writes, &mut ledger);
    while let Some(trial) = active.pop_first() {
        let units = ledger.book().trial(trial).units;
        let Some(record) = records.trials.get_mut(&trial) else { continue };
        let metric = space::metric(trial, units).to_string();
        let at = Some(Timestamp::default());
        record.status.facts.push(Fact::Result(ResultFact {
            units,
            metric,
            values: vec![],
            checkpoint: None,
            at,
        }));
        for fact in ledger.pending([&*record]) {
            num_turns += 1;
            let writes = ledger.advance(&fact);
            let changed = records.execute(writes, &mut ledger);
            active.extend(
                changed
                    .into_iter()
                    .filter(|trial| ledger.state(*trial) == Some(TrialState::Active)),
            );
        }
    }
    Ok((records, ledger, num_turns))
}

/// Number of trials of each search of [`side`], as `cargo xtask bench instructions` expects.
const SIDE_TRIALS: u32 = 1_000;

/// Runs a search of each method that a line of stdin names, in step with its record.
///
/// # Errors
///
/// stdin cannot be read, or a line names no method.
pub(crate) fn side() -> Result<(), BenchError> {
    for method in std::io::stdin().lines() {
        let searcher = json!({method?: {"maxTrials": SIDE_TRIALS, "numRungs": 5}});
        record(&space::config(&searcher, 1)?)?;
    }
    Ok(())
}

/// Prints the times.
pub(crate) fn run() -> Result<(), BenchError> {
    let searcher = json!({"asyncHalving": {"maxTrials": TRIALS, "numRungs": 5}});
    let config = space::config(&searcher, 1)?;
    let begin = clock::processor_time()?;
    let (records, ledger, num_turns) = record(&config)?;
    let seconds = clock::processor_time()? - begin;
    let bytes: usize = records
        .trials
        .values()
        .map(|record| serde_json::to_vec(&record.spec).map_or(0, |json| json.len()))
        .sum();
    println!("rebuild: asyncHalving with {TRIALS} trials, 5 rungs, {num_turns} turns");
    println!(
        "live, in memory: {:.2} us of processor time per turn",
        seconds * 1e6 / f64::from(num_turns)
    );
    println!("spec of a trial: {:.0} bytes on average", bytes as f64 / f64::from(TRIALS));
    let mut times = vec![];
    for _ in 0..5 {
        let begin = clock::processor_time()?;
        let rebuilt = records.rebuild(&config)?;
        times.push((clock::processor_time()? - begin) * 1e3);
        if rebuilt != ledger {
            return Err("the rebuilt search differs from the live one".into());
        }
    }
    println!("rebuild: {:.1} ms of processor time, median of 5", crate::decisions::median(times));
    Ok(())
}
