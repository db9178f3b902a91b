//! Rows of inference jobs.

use stoker_api::inference::InferenceJob;
use stoker_api::time::Timestamp;
use stoker_engine::inference;

use super::{Cell, Column, List, Row};
use crate::cluster::text;
use crate::json;

/// Kind in `--output name`.
const KIND: &str = "inferencejob.stoker.dev";

/// A job to list.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) job: InferenceJob,
    /// Name in commands: for an older local run, its ID.
    pub(crate) name: String,
    /// Phase as shown.
    pub(crate) phase: String,
}

/// Lists jobs. `with_namespace` adds a column.
pub(crate) fn list(jobs: Vec<Listed>, with_namespace: bool, empty: String) -> List {
    let names = ["NAME", "PHASE", "STAGE", "SLOTS", "DONE", "OF", "REJECTED", "RESTARTS", "AGE"];
    let mut columns: Vec<Column> = names.map(Column::new).to_vec();
    columns.extend(["PROGRESS", "OUTPUT", "UID"].map(Column::wide));
    if with_namespace {
        columns.insert(0, Column::new("NAMESPACE"));
    }
    let now = text::now();
    let rows = jobs.into_iter().map(|listed| row(listed, with_namespace, now)).collect();
    List { columns, rows, empty, noun: "job" }
}

fn row(listed: Listed, with_namespace: bool, now: Timestamp) -> Row {
    let Listed { job, name, phase } = listed;
    let (metadata, status) = (&job.metadata, job.status.clone().unwrap_or_default());
    // Earlier versions recorded no percentage of a completed job.
    let percent = inference::percent(&status);
    let mut cells = vec![
        Cell::text(&name),
        Cell::text(&phase),
        Cell::text(text::word(&status.stage)),
        Cell::count(job.spec.resources.slots),
        Cell::count(status.rows),
        Cell::count(status.rows_total),
        Cell::count(status.rejected),
        Cell::count(status.restarts),
        Cell::age(text::created(metadata), now),
        Cell::number(percent.into(), format!("{percent}%")),
        Cell::text(status.output.as_deref().unwrap_or_default()),
        Cell::text(metadata.uid.as_deref().unwrap_or_default()),
    ];
    if with_namespace {
        cells.insert(0, Cell::text(metadata.namespace.as_deref().unwrap_or_default()));
    }
    Row {
        name: format!("{KIND}/{name}"),
        phase,
        labels: metadata.labels.clone().unwrap_or_default(),
        cells,
        value: json::object(&job),
        rank: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn row_matches_the_columns() {
        let job: InferenceJob = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
            "metadata": {"name": "species", "namespace": "ml", "uid": "0b3f9c1e-77aa",
                "creationTimestamp": "2026-11-21T19:00:00Z"},
            "spec": {
                "entrypoint": {"command": ["x"]}, "input": {"url": "s3://data/*.csv"},
                "resources": {"slots": 4},
            },
            "status": {
                "phase": "Running", "stage": "work", "attempts": 5, "running": 3, "rows": 20,
                "rowsTotal": 80, "restarts": 1, "observedGeneration": 1,
            },
        }))
        .unwrap();
        let listed = Listed { job, name: "species".to_owned(), phase: "Running".to_owned() };
        let row = row(listed, true, "2026-11-21T19:05:00Z".parse().unwrap());
        let texts: Vec<&str> = row.cells.iter().map(|cell| cell.text.as_str()).collect();
        let expected = ["ml", "species", "Running", "work", "4", "20", "80", "0", "1", "5m"];
        assert_eq!(texts[..10], expected);
        assert_eq!(texts[10..], ["25%", "-", "0b3f9c1e-77aa"]);
    }
}
