//! Rows of trials, with a column for each hyperparameter.

use serde_json::Value;
use stoker_api::experiment::Searcher;
use stoker_api::time::Timestamp;
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;

use super::{Cell, Column, Key, List, Row};
use crate::cluster::text;
use crate::json;
use crate::run::{self, MetricRanking};

/// Kind in `--output name`.
const KIND: &str = "trial.stoker.dev";
/// Maximum width of all hyperparameters in a row of the default format.
const WIDTH_MAX: usize = 60;

/// Lists trials of one experiment. `name` is the experiment's name in commands.
pub(crate) fn list(searcher: &Searcher, name: &str, trials: &[Trial]) -> List {
    let mut paths: Vec<String> = Vec::new();
    for trial in trials {
        for (path, _) in run::flatten(&trial.spec.hyperparameters) {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
    }
    let width = |path: &String| {
        let texts = trials.iter().map(|trial| hyperparameter(trial, path).text);
        texts.chain([path.clone()]).map(|text| text.chars().count()).max().unwrap_or_default() + 2
    };
    let fits = paths.iter().map(width).sum::<usize>() <= WIDTH_MAX;
    let metric = searcher.metric.as_str();
    let position = run::position_header(searcher);
    let mut columns =
        ["TRIAL", "PHASE", metric, "BEST", position, "OF", "RESTARTS"].map(Column::new).to_vec();
    if !fits {
        columns.push(Column::new("HYPERPARAMETERS").narrow());
    }
    columns.extend(paths.iter().map(|path| match fits {
        true => Column::new(path),
        false => Column::wide(path),
    }));
    columns.extend(["CHECKPOINT", "AGE"].map(Column::new));
    columns.push(Column::wide("SEED"));
    let ranking = MetricRanking { metric, smaller_is_better: searcher.smaller_is_better };
    let (now, paths) = (text::now(), Paths { paths: &paths, fits });
    let rows = trials.iter().map(|trial| row(trial, name, &paths, &ranking, now)).collect();
    List { columns, rows, empty: format!("experiment {name} has no trials yet"), noun: "trial" }
}

/// Hyperparameters of all trials.
struct Paths<'a> {
    paths: &'a [String],
    /// Whether the default format has a column for each.
    fits: bool,
}

fn row(
    trial: &Trial,
    name: &str,
    Paths { paths, fits }: &Paths<'_>,
    ranking: &MetricRanking<'_>,
    now: Timestamp,
) -> Row {
    let spec = &trial.spec;
    let status = trial.status.clone().unwrap_or_default();
    let record = TrialRecord { spec: spec.clone(), status: status.clone() };
    let (latest, best) = (ranking.metric_of(&record), ranking.best_of(&record));
    let ranked = best.as_ref().or(latest.as_ref());
    let rank = ranked.and_then(|metric| json::metric(metric).as_f64());
    let trial_name = format!("{name}-{}", spec.index);
    let mut cells = vec![
        Cell::number(spec.index.into(), &trial_name),
        Cell::text(format!("{:?}", status.phase)),
        metric_cell(latest.as_deref()),
        metric_cell(best.as_deref()),
        Cell::count(status.batches),
        if status.batches_total == 0 { Cell::text("") } else { Cell::count(status.batches_total) },
        Cell::count(status.restarts),
    ];
    if !fits {
        let line = run::hyperparameters(&spec.hyperparameters);
        cells.push(Cell::text(run::truncate(&line, WIDTH_MAX)));
    }
    cells.extend(paths.iter().map(|path| hyperparameter(trial, path)));
    let checkpoint = status.checkpoints.last();
    cells.push(Cell::text(checkpoint.map_or("", |checkpoint| &checkpoint.name)));
    cells.push(Cell::age(text::created(&trial.metadata), now));
    cells.push(Cell::count(spec.seed));
    let sign = if ranking.smaller_is_better { 1.0 } else { -1.0 };
    Row {
        name: format!("{KIND}/{trial_name}"),
        phase: format!("{:?}", status.phase),
        labels: trial.metadata.labels.clone().unwrap_or_default(),
        cells,
        value: json::object(trial),
        rank: rank.map(|rank| rank * sign),
    }
}

fn metric_cell(metric: Option<&str>) -> Cell {
    let Some(text) = metric else { return Cell::text("") };
    match json::metric(text).as_f64() {
        Some(value) => Cell::number(value, run::format_metric(text)),
        None => Cell { text: text.to_owned(), key: None },
    }
}

/// Returns the cell of a hyperparameter; a dash if the trial lacks it.
fn hyperparameter(trial: &Trial, path: &str) -> Cell {
    let all = run::flatten(&trial.spec.hyperparameters);
    let value = all.into_iter().find(|(of, _)| of == path).map(|(_, value)| value);
    let Some(value) = value else { return Cell::text("") };
    let text = text::short_value(value);
    match value {
        Value::Number(number) => Cell { text, key: number.as_f64().map(Key::Number) },
        _ => Cell::text(text),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::print::Format;

    fn trial(index: u32, hyperparameters: Value, best: &str) -> Trial {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
            "metadata": {"name": format!("mnist-{index}"), "namespace": "ml"},
            "spec": {"experiment": "mnist", "index": index, "requestId": "x", "seed": 77,
                "hyperparameters": hyperparameters, "unit": "batches", "units": 100},
            "status": {"phase": "Running", "restarts": 1, "batches": 120, "batchesTotal": 400,
                "bestMetric": best,
                "metrics": {"loss": best}},
        }))
        .unwrap()
    }

    fn lines(trials: &[Trial], format: Format) -> Vec<String> {
        let searcher = json!({
            "metric": "loss", "maxLength": {"batches": 400}, "single": {}, "smallerIsBetter": false,
        });
        let list = list(&serde_json::from_value(searcher).unwrap(), "mnist", trials);
        let rows = list.rows.iter().map(|row| list.texts(row, format).join(" "));
        std::iter::once(list.header(format).join(" ")).chain(rows).collect()
    }

    #[test]
    fn hyperparameters_have_columns_if_they_fit() {
        let few = [
            trial(0, json!({"lr": 0.012_345_678, "net": {"width": 8}}), "0.5"),
            trial(1, json!({"lr": 0.5, "kind": "mlp"}), "0.25"),
        ];
        assert_eq!(
            lines(&few, Format::Text),
            [
                "TRIAL PHASE LOSS BEST BATCHES OF RESTARTS LR NET.WIDTH KIND CHECKPOINT AGE",
                "mnist-0 Running 0.50000 - 120 400 1 0.012346 8 - - -",
                "mnist-1 Running 0.25000 - 120 400 1 0.5 - mlp - -",
            ]
        );
        let name = "a_rather_long_name_of_a_hyperparameter";
        let many = [trial(0, json!({name: 1, format!("{name}_2"): 2}), "NaN")];
        let text = lines(&many, Format::Text);
        assert!(text[0].contains("RESTARTS HYPERPARAMETERS CHECKPOINT"), "{text:?}");
        assert!(text[1].contains("NaN"), "{text:?}");
        assert!(text[1].contains(&format!("{name}=1")), "{text:?}");
        let wide = lines(&many, Format::Wide);
        assert!(wide[0].contains(&format!("{0} {0}_2", name.to_uppercase())), "{wide:?}");
        assert!(!wide[0].contains("HYPERPARAMETERS"), "{wide:?}");
    }

    #[test]
    fn rank_follows_the_direction_of_the_metric() {
        let mut trials = [0, 1, 2].map(|index| trial(index, json!({}), "0.5"));
        trials[1] = trial(1, json!({}), "NaN");
        // The best result is not at the granted length.
        let facts = json!([{ "result": { "units": 50, "metric": "0.75" } },
            { "result": { "units": 100, "metric": "0.5" } }]);
        trials[2].status.as_mut().unwrap().facts = serde_json::from_value(facts).unwrap();
        let searcher = json!({
            "metric": "loss", "maxLength": {"batches": 4}, "single": {}, "smallerIsBetter": false,
        });
        let list = list(&serde_json::from_value(searcher).unwrap(), "mnist", &trials);
        let ranks: Vec<_> = list.rows.iter().map(|row| row.rank).collect();
        assert_eq!(ranks, [Some(-0.5), None, Some(-0.75)]);
    }
}
