//! Plots of the profiler's samples.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Value, json};
use stoker_storage::layout;
use stoker_storage::metrics::Row;

use super::WIDTH;
use crate::lttb::{Point, down_sample};
use crate::rows::MetricsCache;
use crate::store::Run;

/// Number of points in a plot of a rank.
const POINTS_MAX: usize = 2 * WIDTH;
/// Number of points that are kept of a measurement of a rank while the other samples are read.
const KEPT_MAX: u64 = 4 * POINTS_MAX as u64;

/// Points by measurement and rank.
type Samples = BTreeMap<String, BTreeMap<u32, Vec<Point>>>;

/// Returns `profiler.json` of a trial: a plot per measurement, with a series per rank. Concurrent
/// requests share a read, and so do later ones for a multiple of the time that it took.
///
/// # Errors
///
/// The reason why the storage cannot be read, or that the files are too large.
pub(crate) async fn plots(run: &Run, cache: &MetricsCache, index: u32) -> Result<Value, String> {
    let storage = run.storage.as_ref().map_err(Clone::clone)?;
    let folder = layout::profiler_path(&run.trial_path(index));
    let lock = cache.lock(&folder);
    let _reading = lock.lock().await;
    if let Some(answer) = cache.answer(&folder) {
        return Ok(answer);
    }
    let listed = storage.list_sized(&folder).await.map_err(|error| error.to_string())?;
    let objects: Vec<(u32, String, u64)> = listed
        .into_iter()
        .filter_map(|(path, size)| Some((profiler_rank(&path)?, path, size)))
        .collect();
    let mib = objects.iter().map(|(_, _, size)| size).sum::<u64>().div_ceil(1 << 20);
    if mib > cache.trial_mib_max {
        return Err(format!(
            "cannot draw the profiler of trial {index}: its samples have {mib} MiB, more than {}; \
             read the files in {}/{folder}",
            cache.trial_mib_max,
            storage.url().trim_end_matches('/')
        ));
    }
    let mut sizes = BTreeMap::<u32, u64>::new();
    for (rank, _, size) in &objects {
        *sizes.entry(*rank).or_default() += size;
    }
    let _capacity = cache.reserve(mib).await;
    let began = Instant::now();
    let mut samples = Samples::new();
    for (rank, path, size) in objects {
        let bytes = storage.get(&path).await.map_err(|error| error.to_string())?;
        let total = sizes.get(&rank).copied().unwrap_or_default().max(1);
        add(&mut samples, rank, &bytes, (KEPT_MAX * size / total) as usize);
    }
    let answer = drawn(samples);
    cache.keep_answer(&folder, &answer, began.elapsed());
    Ok(answer)
}

/// Adds the samples in an object of a rank: at most `max` points of each measurement, or a few.
fn add(samples: &mut Samples, rank: u32, bytes: &[u8], max: usize) {
    let mut read = BTreeMap::<String, Vec<Point>>::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let row: Option<Row> = serde_json::from_slice(line).ok();
        let Some(row) = row else { continue };
        let Some(time) = row.time else { continue };
        for (name, value) in row.metrics.into_iter().filter(|(_, value)| value.is_finite()) {
            read.entry(name).or_default().push((time, value));
        }
    }
    for (name, points) in read {
        let points = thinned(points, max);
        samples.entry(name).or_default().entry(rank).or_default().extend(points);
    }
}

fn thinned(mut points: Vec<Point>, max: usize) -> Vec<Point> {
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    down_sample(&points, max)
}

fn drawn(samples: Samples) -> Value {
    let plots: Vec<Value> = samples
        .into_iter()
        .map(|(name, ranks)| {
            let series: Vec<Value> = ranks
                .into_iter()
                .map(|(rank, points)| {
                    let points = thinned(points, POINTS_MAX);
                    let (xs, ys): (Vec<f64>, Vec<f64>) = points.into_iter().unzip();
                    json!({ "name": format!("rank {rank}"), "x": xs, "y": ys })
                })
                .collect();
            let (title, unit) = title_and_unit(&name);
            json!({ "title": title, "unit": unit, "stacked": false, "series": series })
        })
        .collect();
    json!({ "plots": plots })
}

/// Parses the rank from `profiler/ATTEMPT-RANK-SEQ.jsonl`.
fn profiler_rank(path: &str) -> Option<u32> {
    let name = path.rsplit('/').next()?.strip_suffix(".jsonl")?;
    name.split('-').nth(1)?.parse().ok()
}

/// Returns a human-readable title and a unit, from a name such as `read_mib_per_s`.
fn title_and_unit(name: &str) -> (String, &'static str) {
    const UNITS: [(&str, &str); 4] =
        [("_mib_per_s", "MiB/s"), ("_percent", "%"), ("_mib", "MiB"), ("_seconds", "s")];
    let found = UNITS.iter().find_map(|(end, unit)| Some((name.strip_suffix(end)?, *unit)));
    let (stem, unit) = found.unwrap_or((name, ""));
    let words = stem.replace('_', " ");
    let title = match words.as_str() {
        "cpu" => "CPU of the process".to_owned(),
        "step" => "Step time".to_owned(),
        _ => {
            let mut chars = words.chars();
            let first = chars.next().map(|first| first.to_uppercase().to_string());
            first.unwrap_or_default() + chars.as_str()
        }
    };
    (title.replace("Gpu", "GPU ").replace("cpu", "CPU"), unit)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use stoker_storage::Storage;

    use super::*;
    use crate::fixture;

    fn sample(time: usize) -> String {
        let row = json!({
            "group": "profiler", "batches": 1, "epoch": 0, "attempt": 0, "time": time as f64,
            "metrics": {"cpu_percent": time as f64},
        });
        format!("{row}\n")
    }

    #[tokio::test]
    async fn large_profiles_are_refused_and_read_ones_kept() {
        let mut run = fixture::run(json!({}), json!({}), &[json!({})]);
        let folder = layout::profiler_path(&run.trial_path(0));
        let storage = Storage::open("memory://", None).unwrap();
        let put = async |seq: u32, text: String| {
            storage.put(&format!("{folder}/0-0-{seq:08}.jsonl"), text.into()).await.unwrap();
        };
        put(0, (0..10).map(sample).collect()).await;
        run.storage = Ok(Arc::new(storage.clone()));
        let mut cache = MetricsCache::default();
        cache.trial_mib_max = 1;
        let answer = plots(&run, &cache, 0).await.unwrap();
        assert_eq!(answer["plots"][0]["series"][0]["x"].as_array().unwrap().len(), 10);
        put(1, sample(10).repeat(20_000)).await;
        cache.keep_answer(&folder, &answer, Duration::from_secs(60));
        assert_eq!(plots(&run, &cache, 0).await.unwrap(), answer);
        let mut cache = MetricsCache::default();
        cache.trial_mib_max = 1;
        let error = plots(&run, &cache, 0).await.unwrap_err();
        assert!(error.contains("MiB, more than 1; read the files in memory:"), "{error}");
    }

    #[test]
    fn samples_are_thinned_while_they_are_read() {
        let mut samples = Samples::new();
        let text: String = (0..1000).map(sample).collect();
        add(&mut samples, 0, text.as_bytes(), 100);
        let points = &samples["cpu_percent"][&0];
        assert_eq!((points.len() <= 100, points[0].0), (true, 0.0));
        assert_eq!(points.last().unwrap().0, 999.0);
    }
}
