//! Curves of metrics: one metric of all trials, or all metrics of one trial.

pub(crate) mod profiler;
mod sampled;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde::Deserialize;
use serde_json::{Value, json};
use stoker_api::contract::{is_metric, short_metric_name};
use stoker_api::experiment::Unit;
use stoker_engine::trial::{TrialRecord, batches_per_unit, live_attempt};
use stoker_storage::metrics::Reader;

use self::sampled::{Curve, x_of};
use crate::data::best_value;
use crate::rows::{MetricsCache, Position, Undrawn, resumed};
use crate::search::results;
use crate::store::Run;

/// Maximum number of curves in one plot.
const CURVES_MAX: usize = 300;
/// Number of curves of the best trials among them.
const BEST_MAX: usize = 100;
/// Maximum number of trials whose files are read at the same time.
const READS_MAX: usize = 16;
/// Maximum number of points of all curves in one plot, unless each has fewer than
/// [`POINTS_MIN`].
const POINTS_MAX: usize = 60_000;
const POINTS_MIN: usize = 100;
/// Width of a plot in pixels, unless the query contains another.
const WIDTH: usize = 800;
const WIDTH_MAX: usize = 4000;

/// Query of a plot of curves.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CurvesQuery {
    pub(crate) metric: Option<String>,
    /// `batches`, `epochs` or `time`.
    pub(crate) x: Option<String>,
    from: Option<f64>,
    to: Option<f64>,
    width: Option<usize>,
    /// Indexes of the only trials to show, separated by commas.
    trials: Option<String>,
    /// Indexes of trials to show in any case.
    focus: Option<String>,
}

impl CurvesQuery {
    /// Returns the maximum number of points of each of so many curves: two per pixel, or fewer if
    /// there are many curves.
    fn points_max(&self, num_curves: usize) -> usize {
        let of_all = (POINTS_MAX / num_curves.max(1)).max(POINTS_MIN);
        of_all.min(2 * self.width.unwrap_or(WIDTH).clamp(50, WIDTH_MAX))
    }

    fn contains(&self, x: f64) -> bool {
        self.from.is_none_or(|from| x >= from) && self.to.is_none_or(|to| x <= to)
    }
}

/// Parses indexes such as `10,16`. Ignores everything else.
pub(crate) fn indexes(text: Option<&str>) -> Vec<u32> {
    text.unwrap_or_default().split(',').filter_map(|index| index.trim().parse().ok()).collect()
}

/// Returns the batches of an epoch, if they follow from the record.
pub(crate) fn batches_per_epoch(trial: &TrialRecord) -> Option<f64> {
    batches_per_unit(trial).filter(|_| trial.spec.unit == Unit::Epochs)
}

/// Returns the axis of a query, or else the unit of the experiment.
pub(crate) fn axis(run: &Run, query: Option<&str>) -> &'static str {
    match query {
        Some("batches") => "batches",
        Some("epochs") => "epochs",
        Some("time") => "time",
        _ if run.search().unit == Unit::Epochs => "epochs",
        _ => "batches",
    }
}

/// Returns the trials whose curves are drawn: `focus`, training ones, the best, and others
/// spread over the ranks.
fn selected(run: &Run, focus: &[u32]) -> BTreeSet<u32> {
    if run.trials.len() <= CURVES_MAX {
        return run.trials.keys().copied().collect();
    }
    let smaller = run.experiment.spec.searcher.smaller_is_better;
    let mut ranked: Vec<(f64, u32)> = run
        .trials
        .iter()
        .filter_map(|(index, trial)| {
            let value = best_value(trial)?;
            Some((if smaller { value } else { -value }, *index))
        })
        .collect();
    ranked.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
    let training =
        run.trials.iter().filter(|(_, trial)| run.is_live() && live_attempt(trial).is_some());
    let mut chosen: BTreeSet<u32> =
        focus.iter().copied().filter(|index| run.trials.contains_key(index)).collect();
    chosen.extend(training.map(|(index, _)| *index).take(BEST_MAX));
    chosen.extend(ranked.iter().take(BEST_MAX).map(|(_, index)| *index));
    let left = CURVES_MAX.saturating_sub(chosen.len());
    let others: Vec<u32> =
        ranked.iter().map(|(_, index)| *index).filter(|index| !chosen.contains(index)).collect();
    let num = left.min(others.len());
    chosen.extend((0..num).map(|i| others[i * others.len() / num]));
    chosen
}

/// Returns `curves.json` of an experiment.
///
/// # Errors
///
/// The reason why the storage cannot be read.
pub(crate) async fn of_experiment(
    run: &Arc<Run>,
    cache: &MetricsCache,
    query: &CurvesQuery,
) -> Result<Value, String> {
    let storage = run.storage.as_ref().map_err(Clone::clone)?;
    let only = query.trials.as_deref().map(|text| indexes(Some(text)));
    let shown: BTreeSet<u32> = match &only {
        Some(only) => only.iter().copied().filter(|index| run.trials.contains_key(index)).collect(),
        None => selected(run, &indexes(query.focus.as_deref())),
    };
    let reader = Reader::new(storage);
    let searched = &run.experiment.spec.searcher.metric;
    let metric = query.metric.as_deref().unwrap_or(searched);
    let x = axis(run, query.x.as_deref());
    let mut reads = Vec::with_capacity(shown.len());
    for index in &shown {
        let max = query.points_max(shown.len());
        reads.push(read_one(run, cache, &reader, *index, (metric, x, max), query));
    }
    let mut reads = stream::iter(reads).buffered(READS_MAX);
    let (mut names, mut read, mut too_large) = (BTreeSet::new(), Vec::new(), 0);
    while let Some(trial) = reads.try_next().await? {
        let Some((index, names_of_trial, curve)) = trial else {
            too_large += 1;
            continue;
        };
        names.extend(names_of_trial);
        read.extend(curve.map(|(name, curve)| (index, name, curve)));
    }
    let name = find_metric(&names, metric);
    let (mut total, mut drawn, mut curves) = (0, 0, Vec::new());
    for (index, _, curve) in read.into_iter().filter(|(_, of, _)| Some(of) == name) {
        total += curve.total;
        drawn += curve.drawn();
        let Curve { x, y, nonfinite, .. } = curve;
        curves.push(json!({ "trial": index, "x": x, "y": y, "nonfinite": nonfinite }));
    }
    let omitted = if only.is_some() { 0 } else { run.trials.len() - shown.len() };
    Ok(json!({
        "metric": metric, "group": name.map(|name| &name.0),
        "metrics": names, "x": x, "total": total, "drawn": drawn,
        "trials": run.trials.len(), "omitted": omitted, "tooLarge": too_large, "curves": curves,
        "band": if omitted > 0 { band(run, &shown, x) } else { Value::Null },
    }))
}

/// Group and name of a metric.
type Name = (String, String);

/// Index of a trial, the names of its metrics, and a curve.
type Read = (u32, BTreeSet<Name>, Option<(Name, Curve)>);

/// Reads a trial. Returns its index, the names of its metrics, and the curve that [`find_metric`]
/// selects among them: also of all trials, only this one can be selected. The rows are dropped.
/// Returns `None` if the files are too large.
async fn read_one(
    run: &Run,
    cache: &MetricsCache,
    reader: &Reader<'_>,
    index: u32,
    (metric, x, max): (&str, &str, usize),
    query: &CurvesQuery,
) -> Result<Option<Read>, String> {
    let metrics = match cache.trial(run, reader, index).await {
        Ok(metrics) => metrics,
        Err(Undrawn::TooLarge(_)) => return Ok(None),
        Err(Undrawn::Unread(why)) => return Err(why),
    };
    let names: BTreeSet<Name> = metrics.curves.keys().cloned().collect();
    let per_epoch = run.trials.get(&index).and_then(|trial| batches_per_epoch(trial));
    let curve = find_metric(&names, metric).and_then(|name| {
        let values = metrics.curves.get(name)?;
        let curve = Curve::new(&metrics, values, query, x, per_epoch, max);
        Some((name.clone(), curve))
    });
    Ok(Some((index, names, curve)))
}

/// Returns group and name of a metric. As in an experiment, `val_` stands for `validation_`. Of
/// several groups, the validation comes first.
fn find_metric<'a>(names: &'a BTreeSet<Name>, metric: &str) -> Option<&'a Name> {
    let named = names.iter().filter(|name| is_metric(&name.1, metric));
    named.min_by_key(|name| (name.0 != "validation", *name))
}

/// Returns the percentiles 5 to 95 of the results of the trials that are not drawn, by length;
/// nothing if lengths are unknown in the unit of the axis.
fn band(run: &Run, shown: &BTreeSet<u32>, x: &str) -> Value {
    let is_scaled = match (run.search().unit, x) {
        (Unit::Batches, "batches") | (Unit::Epochs, "epochs") => false,
        (Unit::Epochs, "batches") => true,
        _ => return Value::Null,
    };
    let mut by_length = BTreeMap::<u64, Vec<f64>>::new();
    for (_, trial) in run.trials.iter().filter(|(index, _)| !shown.contains(index)) {
        let per_unit = if is_scaled { batches_per_epoch(trial) } else { Some(1.0) };
        let Some(per_unit) = per_unit else { continue };
        for (units, value) in results(trial) {
            let length = (units as f64 * per_unit).round() as u64;
            by_length.entry(length).or_default().extend(value);
        }
    }
    let (mut xs, mut low, mut high) = (Vec::new(), Vec::new(), Vec::new());
    for (length, mut values) in by_length.into_iter().filter(|(_, values)| !values.is_empty()) {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
        xs.push(length);
        low.push(at(0.05));
        high.push(at(0.95));
    }
    json!({ "x": xs, "low": low, "high": high })
}

/// Returns `curves.json` of a trial: a plot per metric, with a series per group.
///
/// # Errors
///
/// The reason why the storage cannot be read, or that the files are too large.
pub(crate) async fn of_trial(
    run: &Arc<Run>,
    cache: &MetricsCache,
    index: u32,
    query: &CurvesQuery,
) -> Result<Value, String> {
    let storage = run.storage.as_ref().map_err(Clone::clone)?;
    let reader = Reader::new(storage);
    let metrics = cache.trial(run, &reader, index).await.map_err(Undrawn::into_reason)?;
    let x = axis(run, query.x.as_deref());
    let trial = run.trials.get(&index);
    let per_epoch = trial.and_then(|trial| batches_per_epoch(trial));
    let (mut total, mut drawn) = (0, 0);
    let mut plots = BTreeMap::<String, Vec<Value>>::new();
    for ((group, name), values) in &metrics.curves {
        let title = if group == "validation" { short_metric_name(name) } else { name };
        let max = query.points_max(metrics.curves.len());
        let curve = Curve::new(&metrics, values, query, x, per_epoch, max);
        total += curve.total;
        drawn += curve.drawn();
        let Curve { x, y, nonfinite, .. } = curve;
        let series = json!({ "name": group, "x": x, "y": y, "nonfinite": nonfinite });
        plots.entry(title.to_owned()).or_default().push(series);
    }
    let mut plots: Vec<(String, Vec<Value>)> = plots.into_iter().collect();
    for (_, series) in &mut plots {
        // The validation is drawn first, and keeps the first color.
        series.sort_by_key(|one| one["name"] != "validation");
    }
    let plots: Vec<Value> = plots
        .into_iter()
        .map(|(metric, series)| json!({ "metric": metric, "series": series }))
        .collect();
    let attempts = trial.map_or(&[][..], |trial| &trial.status.attempts);
    let starts: Vec<Value> = resumed(attempts)
        .into_iter()
        .map(|(number, batches)| {
            let first = metrics.at.iter().find(|at| at.attempt >= number);
            let at = Position {
                batches,
                epoch: first.map_or(0, |at| at.epoch),
                seconds: first.map_or(0.0, |at| at.seconds),
                attempt: number,
            };
            json!({ "number": number, "x": x_of(at, x, per_epoch) })
        })
        .collect();
    Ok(json!({ "x": x, "plots": plots, "attempts": starts, "total": total, "drawn": drawn }))
}

#[cfg(test)]
mod tests {
    use stoker_api::trial::Grant;
    use stoker_storage::Storage;
    use stoker_storage::metrics::segments;

    use super::*;
    use crate::fixture;

    #[tokio::test]
    async fn one_large_trial_does_not_hide_others() {
        let mut run = fixture::run(json!({}), json!({}), &[json!({}), json!({})]);
        let storage = Storage::open("memory://", None).unwrap();
        let row = json!({
            "group": "validation", "batches": 1, "epoch": 0, "attempt": 0, "time": 1.0,
            "metrics": {"loss": 0.5},
        })
        .to_string();
        let large = format!("{row}\n").repeat(20_000);
        for (index, text) in [(0, large), (1, row)] {
            let path = segments(&run.trial_path(index), 0).path(0);
            storage.put(&path, text.into()).await.unwrap();
        }
        run.storage = Ok(Arc::new(storage));
        let run = Arc::new(run);
        let mut cache = MetricsCache::default();
        cache.trial_mib_max = 1;
        let query = CurvesQuery::default();
        let data = of_experiment(&run, &cache, &query).await.unwrap();
        assert_eq!(data["tooLarge"], 1);
        let curves = data["curves"].as_array().unwrap();
        assert_eq!((curves.len(), &curves[0]["trial"]), (1, &json!(1)));
        let error = of_trial(&run, &cache, 0, &query).await.unwrap_err();
        assert!(error.contains("more than 1;"), "{error}");
    }

    /// Checks the band of two hidden trials that train four units, with results at two and at four.
    #[track_caller]
    fn check_band(unit: Unit, x: &str, batches_total: [u64; 2], expected: Value) {
        let status = |batches_total: u64| {
            let fact = |units: u64| json!({ "result": { "units": units, "metric": "0.5" } });
            json!({ "facts": [fact(2), fact(4)], "batchesTotal": batches_total })
        };
        let length = json!({ json!(unit).as_str().unwrap(): 4 });
        let searcher =
            json!({ "metric": "loss", "maxLength": length, "random": { "maxTrials": 8 } });
        let spec = json!({ "searcher": searcher });
        let mut run = fixture::run(spec, json!({}), &batches_total.map(status));
        for trial in Arc::make_mut(&mut run.trials).values_mut() {
            Arc::make_mut(trial).spec.unit = unit;
        }
        let band = band(&run, &BTreeSet::new(), x);
        assert_eq!(band["x"], expected, "{unit:?} on {x}");
    }

    /// A trial with 100 batches per epoch rests at four epochs, is promoted to 16, and waits.
    #[test]
    fn promotion_stretches_no_curve() {
        let result = json!({ "result": { "units": 4, "metric": "0.5" } });
        let status = json!({ "facts": [result], "batches": 400, "batchesTotal": 400 });
        let mut run = fixture::run(json!({}), json!({}), &[status]);
        let trial = Arc::make_mut(&mut run.trials).values_mut().next().unwrap();
        let trial = Arc::make_mut(trial);
        trial.spec.unit = Unit::Epochs;
        trial.spec.grants.push(Grant { order: 1, units: 16, ..Grant::default() });
        assert_eq!(batches_per_epoch(trial), Some(100.0));
        let data = crate::data::data(&run);
        let trials = &data["trials"];
        assert_eq!((&trials["units"], &trials["granted"]), (&json!([4.0]), &json!([16])));
    }

    #[test]
    fn band_has_the_unit_of_the_axis() {
        check_band(Unit::Batches, "batches", [4, 4], json!([2, 4]));
        check_band(Unit::Batches, "epochs", [4, 4], Value::Null);
        check_band(Unit::Epochs, "epochs", [40, 80], json!([2, 4]));
        // 10 and 20 batches per epoch.
        check_band(Unit::Epochs, "batches", [40, 80], json!([20, 40, 80]));
        check_band(Unit::Epochs, "batches", [0, 80], json!([40, 80]));
        check_band(Unit::Records, "batches", [4, 4], Value::Null);
        check_band(Unit::Epochs, "time", [40, 80], Value::Null);
    }
}
