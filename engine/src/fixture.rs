//! Small searches and trial records for tests.

use std::collections::BTreeMap;

use stoker_api::contract::{CONTRACT_VERSION, Report, ReportEvent};
use stoker_api::experiment::{SearchLimits, Unit};
use stoker_api::hyperparameters::{DoubleRange, IntRange, Parameter, Space};
use stoker_api::trial::TrialStatus;
use stoker_api::validate::Method;

use crate::search::{Draw, SearchConfig};
use crate::trial::{SearchedMetric, TrialRecord};

/// Returns a search over nine epochs. Its grid has 3 x 2 points.
pub(crate) fn config(method: Method) -> SearchConfig {
    let depth = Parameter::Int(IntRange { min: 1, max: 3, count: Some(3) });
    let rate = Parameter::Double(DoubleRange { min: 0.0, max: 1.0, count: Some(2) });
    let net = BTreeMap::from([("rate".to_owned(), Space::Parameter(rate))]);
    let space = BTreeMap::from([
        ("depth".to_owned(), Space::Parameter(depth)),
        ("net".to_owned(), Space::Group(net)),
    ]);
    SearchConfig {
        experiment: "mnist".to_owned(),
        method,
        sampler: None,
        median_stopping: None,
        smaller_is_better: true,
        other_objectives: vec![],
        unit: Unit::Epochs,
        units_max: 9,
        limits: SearchLimits::default(),
        slots: 2,
        release_seconds: 60,
        space: Space::Group(space),
        seed: 7,
    }
}

/// Returns the record of a new trial.
pub(crate) fn record(draw: &Draw) -> TrialRecord {
    let spec = draw.clone().into_spec("mnist", Unit::Epochs);
    TrialRecord { spec, status: TrialStatus::default() }
}

/// Returns the record of a trial that was created without a search.
pub(crate) fn plain_record(index: u32) -> TrialRecord {
    let hyperparameters = serde_json::json!({});
    record(&Draw { index, request_id: String::new(), seed: 0, hyperparameters, units: 9 })
}

/// Minimizes `loss`.
pub(crate) const LOSS: SearchedMetric<'_> =
    SearchedMetric { name: "loss", smaller_is_better: true, others: &[], is_copied: false };

pub(crate) fn report(attempt: u32, batches: u64, event: ReportEvent) -> Report {
    Report { version: CONTRACT_VERSION, attempt, batches, event }
}

/// Returns a validation report. With `granted_units`, its `loss` is a result.
pub(crate) fn validated(loss: &str, granted_units: Option<u64>) -> ReportEvent {
    let metrics = BTreeMap::from([("loss".to_owned(), loss.to_owned())]);
    ReportEvent::Validated { metrics, granted_units }
}

pub(crate) fn checkpointed(name: &str, metric: Option<&str>) -> ReportEvent {
    ReportEvent::Checkpointed {
        name: name.to_owned(),
        manifest_sha256: format!("hash of {name}"),
        bytes: 1,
        metric: metric.map(str::to_owned),
    }
}
