//! Reports of a trial: encoded, parsed, recorded and answered, without requests and writes to disk.

use std::collections::BTreeMap;
use std::hint::black_box;

use serde_json::json;
use stoker_api::contract::{CONTRACT_VERSION, Report, ReportEvent};
use stoker_engine::trial::{
    ReportEffect, SearchedMetric, TargetState, TrialRecord, begin_attempt, directive, record_report,
};

use crate::rebuild::record;
use crate::{BenchError, space};

/// Number of reports for each line, as `cargo xtask bench instructions` expects.
const REPORTS: u64 = 1_000;

/// Answers validations of a new trial for each line of stdin.
///
/// # Errors
///
/// stdin cannot be read, or a report was not recorded.
pub(crate) fn side() -> Result<(), BenchError> {
    let searched = SearchedMetric {
        name: "validation_loss",
        smaller_is_better: true,
        others: &[],
        is_copied: false,
    };
    for line in std::io::stdin().lines() {
        line?;
        let (records, ..) = record(&space::config(&json!({"single": {}}), 1)?)?;
        let spec = records.trials.into_values().next().ok_or("the search has no trial")?.spec;
        let mut record = TrialRecord { spec, status: Default::default() };
        begin_attempt(&mut record, 0);
        for batches in 1..=REPORTS {
            let metric =
                |name: &str, seed| (name.to_owned(), space::metric(seed, batches).to_string());
            let metrics =
                BTreeMap::from([metric("validation_loss", 0), metric("validation_accuracy", 1)]);
            let event = ReportEvent::Validated { metrics, granted_units: None };
            let report = Report { version: CONTRACT_VERSION, attempt: 0, batches, event };
            let sent = serde_json::to_vec(&report)?;
            let effect = record_report(&mut record, &serde_json::from_slice(&sent)?, &searched);
            if effect != ReportEffect::New {
                return Err(format!("report {batches} was not recorded: {effect:?}").into());
            }
            let written = serde_json::to_vec(&record)?;
            let answer = serde_json::to_vec(&directive(&record, 0, TargetState::Run))?;
            black_box((written, answer));
        }
    }
    Ok(())
}
