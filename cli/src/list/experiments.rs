//! Rows of experiments.

use stoker_api::experiment::Experiment;
use stoker_api::time::Timestamp;

use super::{Cell, Column, List, Row};
use crate::cluster::text;
use crate::json;
use crate::run::format_metric;

/// Kind in `--output name`.
const KIND: &str = "experiment.stoker.dev";

/// An experiment to list.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) experiment: Experiment,
    /// Name in commands: for an older local run, its ID.
    pub(crate) name: String,
    /// Phase as shown.
    pub(crate) phase: String,
}

/// Lists experiments. `with_namespace` adds a column.
pub(crate) fn list(experiments: Vec<Listed>, with_namespace: bool, empty: String) -> List {
    let names = ["NAME", "PHASE", "TRIALS", "RUNNING", "ENDED", "PROGRESS", "BEST", "AGE"];
    let mut columns: Vec<Column> = names.map(Column::new).to_vec();
    columns.extend(["METRIC", "UID"].map(Column::wide));
    if with_namespace {
        columns.insert(0, Column::new("NAMESPACE"));
    }
    let now = text::now();
    let rows = experiments.into_iter().map(|listed| row(listed, with_namespace, now)).collect();
    List { columns, rows, empty, noun: "experiment" }
}

fn row(listed: Listed, with_namespace: bool, now: Timestamp) -> Row {
    let Listed { experiment, name, phase } = listed;
    let (metadata, status) = (&experiment.metadata, experiment.status.clone().unwrap_or_default());
    let best = status.best.as_ref().map(|best| {
        let text = format!("{} (trial {})", format_metric(&best.metric), best.index);
        match json::metric(&best.metric).as_f64() {
            Some(metric) => Cell::number(metric, text),
            None => Cell::text(text),
        }
    });
    let mut cells = vec![
        Cell::text(&name),
        Cell::text(&phase),
        Cell::count(status.trials_created),
        Cell::count(status.trials_running),
        Cell::count(status.trials_closed),
        Cell::number(status.progress_percent.into(), format!("{}%", status.progress_percent)),
        best.unwrap_or_else(|| Cell::text("")),
        Cell::age(text::created(metadata), now),
        Cell::text(&experiment.spec.searcher.metric),
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
        value: json::object(&experiment),
        rank: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn row_matches_the_columns() {
        let experiment: Experiment = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": {"name": "mnist", "namespace": "ml", "uid": "0b3f9c1e-77aa",
                "creationTimestamp": "2026-11-21T19:00:00Z"},
            "spec": {
                "entrypoint": {"command": ["x"]},
                "searcher": {"metric": "val_loss", "maxLength": {"epochs": 2}, "single": {}},
            },
            "status": {
                "phase": "Running", "trialsCreated": 3, "trialsClosed": 2, "trialsRunning": 1,
                "progressPercent": 25, "best": {"index": 1, "metric": "0.25"},
            },
        }))
        .unwrap();
        let listed = Listed { experiment, name: "mnist".to_owned(), phase: "Running".to_owned() };
        let row = row(listed, true, "2026-11-21T19:05:00Z".parse().unwrap());
        let texts: Vec<&str> = row.cells.iter().map(|cell| cell.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "ml",
                "mnist",
                "Running",
                "3",
                "1",
                "2",
                "25%",
                "0.25000 (trial 1)",
                "5m",
                "val_loss",
                "0b3f9c1e-77aa"
            ]
        );
        assert_eq!(row.name, "experiment.stoker.dev/mnist");
    }
}
