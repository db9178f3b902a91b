//! Rows of checkpoints.

use serde_json::json;
use stoker_api::trial::CheckpointRecord;

use super::{Cell, Column, List, Row};
use crate::json;

/// Starts a list of checkpoints of trials that are compared by `metric`.
pub(crate) fn list(metric: &str) -> List {
    let columns = ["TRIAL", "NAME", "BATCHES", metric, "BYTES", "CHECKPOINT"];
    let mut columns = columns.map(Column::new).to_vec();
    columns.extend(["STATE", "MANIFEST_SHA256"].map(Column::wide));
    List { columns, rows: vec![], empty: "no checkpoints".to_owned(), noun: "checkpoint" }
}

/// Adds a checkpoint with its URL or path.
pub(crate) fn add(
    list: &mut List,
    (experiment, trial): (&str, u32),
    record: &CheckpointRecord,
    smaller_is_better: bool,
    address: String,
) {
    let metric = record.metric.as_deref().map(json::metric);
    let number = metric.as_ref().and_then(serde_json::Value::as_f64);
    let text = record.metric.clone().unwrap_or_default();
    let name = format!("{experiment}-{trial}");
    let value = json!({
        "trial": trial, "name": record.name, "batches": record.batches, "metric": metric,
        "bytes": record.bytes, "manifestSha256": record.manifest_sha256, "checkpoint": address,
        "refused": record.refused,
    });
    list.rows.push(Row {
        name: format!("{name}/{}", record.name),
        cells: vec![
            Cell::number(trial.into(), name),
            Cell::text(&record.name),
            Cell::count(record.batches),
            number.map_or_else(|| Cell::text(&text), |number| Cell::number(number, &text)),
            Cell::count(record.bytes),
            Cell::text(address),
            Cell::text(if record.refused { "refused" } else { "usable" }),
            Cell::text(&record.manifest_sha256),
        ],
        value,
        rank: number.map(|number| if smaller_is_better { number } else { -number }),
        ..Row::default()
    });
}
