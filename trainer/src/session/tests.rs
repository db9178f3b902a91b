//! Session reports, checkpoints and stop requests, on one rank and on several.

use std::path::Path;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use serde_json::{Value, json};
use stoker_api::experiment::{Length, Unit};
use stoker_storage::Storage;
use stoker_storage::metrics::{self, Row};

use super::*;
use crate::error::exit_code;
use crate::stop::StopSignal;
use crate::trial_io::TrialIo;
use crate::{CheckpointSource, Distributed, Standalone, ThreadRank};

mod checkpoints;
mod large_files;

/// Returns the contexts of `size` ranks in threads of one program that stores its files in
/// `folder`.
fn gang(folder: &Path, size: usize) -> Vec<Context> {
    let context = |(number, rank): (usize, ThreadRank)| {
        let standalone = Standalone {
            folder: Some(folder.to_owned()),
            length: Some(Length::new(Unit::Epochs, 2)),
            save_trial_latest: u32::MAX,
            quiet: true,
            ..Standalone::default()
        };
        let (limits, mut config) =
            (Some(standalone.retention_limits()), standalone.config().unwrap());
        let io = TrialIo::open(&mut config, limits, number == 0).unwrap();
        let ranks = Distributed::from_collective(Box::new(rank));
        let device = Device::flex().autodiff();
        let context = Context::new(config, io, StopSignal::default(), device, ranks);
        context.silence();
        context
    };
    ThreadRank::group(size).into_iter().enumerate().map(context).collect()
}

fn alone(folder: &Path) -> Context {
    gang(folder, 1).remove(0)
}

/// Runs `act` in a thread per rank and returns the results in rank order.
fn each<T: Send>(contexts: &[Context], act: impl Fn(&Context) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let act = &act;
        let threads: Vec<_> =
            contexts.iter().map(|context| scope.spawn(move || act(context))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the metrics rows of attempts, given each attempt's number and first batch.
fn rows(folder: &Path, attempts: &[(u32, u64)]) -> Vec<Row> {
    let storage = Storage::open(folder.to_str().unwrap(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(metrics::read(&storage, "trial", attempts)).unwrap()
}

fn write(folder: &Path, files: &[(&str, &str)]) -> Result<()> {
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap())?;
        std::fs::write(path, text)?;
    }
    Ok(())
}

/// A model that accumulates a sum over batches.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sum {
    batches: u64,
    sum: u64,
}

/// Trains until the end, or until a stop request at batch `stop_at`.
fn train(folder: &Path, stop_at: u64) -> Result<Sum> {
    let context = alone(folder);
    let session = context.session();
    let restored = session.restore_path(|folder, saved| {
        let sum = std::fs::read_to_string(folder.join("model/sum"))?.parse()?;
        assert_eq!(saved.metadata["kind"], json!("sum"));
        Ok(Sum { batches: saved.batches, sum })
    })?;
    let mut model = restored.unwrap_or_default();
    let store = |model: &Sum| {
        let upload = Upload::at(model.batches).metadata("kind", "sum");
        session.store_path(upload, |folder| write(folder, &[("model/sum", &model.sum.to_string())]))
    };
    while model.batches < session.length(5, 8) {
        model.batches += 1;
        model.sum += crate::mix_seed(&[model.batches]) >> 32;
        let loss = model.sum as f64;
        session.report_metrics("training", model.batches, [("loss", loss)])?;
        if model.batches.is_multiple_of(4) {
            session.report_metrics("gradients", model.batches, [("norm", loss / 2.0)])?;
            store(&model)?;
        }
        if model.batches == stop_at {
            context.stop.set();
        }
        if let Some(why) = session.should_preempt()? {
            if !model.batches.is_multiple_of(4) {
                store(&model)?;
            }
            return Err(why.into());
        }
    }
    session.report_metrics("validation", model.batches, [("loss", 1.0)])?;
    session.report_metrics("validation", model.batches, [("val_accuracy", 0.5)])?;
    store(&model)?;
    assert_eq!(session.complete_length(model.batches)?, None);
    Ok(model)
}

#[test]
fn custom_loop_resumes_after_any_stop() {
    let straight = tempfile::tempdir().unwrap();
    let expected = train(straight.path(), u64::MAX).unwrap();
    assert_eq!(expected.batches, 10);
    let strip = |rows: Vec<Row>| -> Vec<_> {
        rows.into_iter().map(|row| (row.batches, row.group, row.epoch, row.metrics)).collect()
    };
    let rows_straight = strip(rows(straight.path(), &[(0, 0)]));
    assert_eq!(rows_straight.len(), 13, "{rows_straight:?}");
    let (.., validation) = rows_straight.last().unwrap();
    let names: Vec<_> = validation.keys().map(String::as_str).collect();
    assert_eq!(names, ["validation_accuracy", "validation_loss"]);
    assert_eq!(rows_straight.iter().find(|(batches, ..)| *batches == 6).unwrap().2, 1);
    for stop_at in 1..10 {
        let folder = tempfile::tempdir().unwrap();
        let error = train(folder.path(), stop_at).unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
        assert_eq!(train(folder.path(), u64::MAX).unwrap(), expected, "stopped at {stop_at}");
        let attempts = [(0, 0), (1, stop_at)];
        assert_eq!(strip(rows(folder.path(), &attempts)), rows_straight, "stopped at {stop_at}");
    }
}

/// Rows of a killed attempt after its last checkpoint are replaced by rows of the next attempt.
#[test]
fn restarted_attempt_replaces_later_rows() {
    let folder = tempfile::tempdir().unwrap();
    let report = |context: &Context, batches, value| {
        context.session().report_metrics("training", batches, [("loss", value)]).unwrap();
    };
    // The first attempt is killed: only rows that the checkpoint waited for are stored.
    let first = alone(folder.path());
    (1..=3).for_each(|batch| report(&first, batch, 1.0));
    first.session().store_path(Upload::at(3), |_| Ok(())).unwrap();
    report(&first, 4, 1.0);
    first.io().flush().unwrap();
    drop(first);
    let second = alone(folder.path());
    let restored = second.session().restore_path(|_, saved| Ok(saved.batches)).unwrap();
    assert_eq!(restored, Some(3));
    report(&second, 5, 2.0);
    second.io().flush().unwrap();
    let stored: Vec<_> = rows(folder.path(), &[(0, 0), (1, 3)])
        .into_iter()
        .map(|row| (row.batches, row.metrics["loss"]))
        .collect();
    assert_eq!(stored, [(1, 1.0), (2, 1.0), (3, 1.0), (5, 2.0)]);
}

#[test]
fn training_validation_and_checkpoints_come_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path());
    let session = context.session();
    let train = |batch| session.report_metrics("training", batch, [("loss", 1.0)]).unwrap();
    let validate = |batch| session.report_metrics("validation", batch, [("loss", 1.0)]).unwrap();
    let store = |batch| drop(session.store_path(Upload::at(batch), |_| Ok(())).unwrap());
    for batch in 1..=11 {
        let orders: [[&dyn Fn(u64); 3]; 3] =
            [[&train, &validate, &store], [&store, &train, &validate], [&validate, &store, &train]];
        orders[batch as usize % 3].iter().for_each(|act| act(batch));
    }
    context.io().flush().unwrap();
    let rows = rows(folder.path(), &[(0, 0)]);
    let count = |group: &str| rows.iter().filter(|row| row.group == group).count();
    assert_eq!((count("training"), count("validation")), (11, 11));
    let checkpoints = std::fs::read_dir(folder.path().join("trial/checkpoints")).unwrap();
    let is_complete = |entry: &std::io::Result<std::fs::DirEntry>| {
        entry.as_ref().unwrap().path().join("manifest.json").exists()
    };
    let complete = checkpoints.filter(is_complete);
    assert_eq!(complete.count(), 11);
}

#[test]
fn preempt_mode_selects_notified_ranks() {
    use PreemptMode::{ChiefOnly, WorkersAskChief, WorkersAskThemselves};
    let folder = tempfile::tempdir().unwrap();
    let check = |mode, signalled: usize, expected: [&str; 3]| {
        let contexts = gang(folder.path(), 3);
        let ask = |context: &Context| match context.session().preempt_mode(mode).should_preempt() {
            Ok(None) => "no".to_owned(),
            Ok(Some(why)) => format!("{:?}: {why}", why.code),
            Err(error) => error.to_string(),
        };
        let first = each(&contexts, ask);
        contexts[signalled].stop.set();
        let second = each(&contexts, ask);
        for rank in 0..3 {
            let (before, after) = expected[rank].split_once(" | ").unwrap();
            let (first, second) = (first[rank].as_str(), second[rank].as_str());
            assert_eq!((first, second), (before, after), "{mode:?} rank {rank}");
        }
    };
    let preempted = "no | Preempted: stopped by a signal";
    let refused = |rank| {
        let text = format!(
            "rank {rank} cannot call should_preempt: PreemptMode::ChiefOnly allows only rank 0"
        );
        format!("{text} | {text}")
    };
    check(WorkersAskChief, 2, [preempted; 3]);
    check(ChiefOnly, 0, [preempted, &refused(1), &refused(2)]);
    check(WorkersAskThemselves, 1, ["no | no", preempted, "no | no"]);
}

/// Profiles this thread while it computes for this time. Returns the stored rows.
fn profiled_rows(folder: &Path, time: Duration) -> Vec<Value> {
    let context = alone(folder);
    let profiler = context.session().profile(Duration::ZERO).unwrap();
    context.session().report_metrics("training", 3, [("loss", 1.0)]).unwrap();
    let mut sum = 0.0f64;
    let start = Instant::now();
    while start.elapsed() < time {
        sum += sum.sin() + 1.0;
    }
    drop(profiler);
    assert!(sum > 0.0);
    let file = folder.join("trial/profiler/0-0-00000000.jsonl");
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn profiler_writes_its_own_rows_and_events() {
    let uses_cpu = |row: &Value| row["metrics"]["cpu_percent"].as_f64().unwrap() > 0.0;
    // One sample on drop, and at least one before.
    let is_complete = |rows: &[Value]| rows.len() >= 2 && rows.iter().any(uses_cpu);
    // On a busy machine, one of the two threads may not run in the first second.
    let mut profiled = [1, 5, 25].into_iter().map(|seconds| {
        let folder = tempfile::tempdir().unwrap();
        let rows = profiled_rows(folder.path(), Duration::from_secs(seconds));
        (folder, rows)
    });
    let profiled = profiled.find(|(_, rows)| is_complete(rows));
    let (folder, rows) = profiled.expect("two samples that show CPU usage");
    let last = rows.last().unwrap();
    assert_eq!((&last["group"], &last["batches"]), (&json!("profiler"), &json!(3)));
    let of = |name: &str| last["metrics"][name].as_f64().unwrap_or(-1.0);
    assert!(of("memory_mib") > 1.0 && of("machine_memory_percent") > 0.0, "{last}");
    assert!(folder.path().join("trial/tensorboard/profiler-rank-0").is_dir());
    // The next attempt gets a new number even if the profiled one left only profiler rows.
    assert_eq!(alone(folder.path()).config.attempt, 1);
}

#[test]
fn second_profiler_keeps_the_rows_of_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path());
    // Each takes a sample when it is dropped.
    (0..2).for_each(|_| drop(context.session().profile(Duration::from_secs(60)).unwrap()));
    let files = std::fs::read_dir(folder.path().join("trial/profiler")).unwrap();
    let num_rows =
        |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap().lines().count();
    assert_eq!(files.map(|file| num_rows(file.unwrap().path())).sum::<usize>(), 2);
}

/// Both ranks report, and rank 0 writes.
#[test]
fn images_and_texts_are_written_once() {
    let folder = tempfile::tempdir().unwrap();
    each(&gang(folder.path(), 2), |context| {
        let image = Image::new([1, 1, 2], &[0.0, 1.0]).unwrap();
        context.session().report_image("sample", 3, image);
        context.session().report_text("note", 3, "**well**");
        context.io().flush().unwrap();
    });
    let files = std::fs::read_dir(folder.path().join("trial/tensorboard")).unwrap();
    let events: Vec<u8> =
        files.flat_map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    let count = |part: &[u8]| events.windows(part.len()).filter(|bytes| *bytes == part).count();
    let parts: [&[u8]; 4] = [b"sample", b"IHDR", b"note", b"**well**"];
    assert_eq!(parts.map(count), [1; 4]);
}

/// The runner's response may have been lost: a restart at the granted length knows the result
/// without validating again.
#[test]
fn restart_at_the_length_knows_its_validation() {
    let folder = tempfile::tempdir().unwrap();
    let first = alone(folder.path());
    first.session().report_metrics("validation", 10, [("loss", 0.25)]).unwrap();
    first.session().store_path(Upload::at(10), |_| Ok(())).unwrap();
    drop(first);
    let second = alone(folder.path());
    second.session().restore_path(|_, _| Ok(())).unwrap();
    let metrics = second.io().validation_at(10).unwrap();
    assert_eq!(find_searched_metric(&second.config, &metrics).unwrap(), 0.25);
    assert_eq!(second.io().validation_at(9), None);
    // The attempt's own validation takes precedence.
    second.session().report_metrics("validation", 10, [("loss", 0.5)]).unwrap();
    let metrics = second.io().validation_at(10).unwrap();
    assert_eq!(metrics["validation_loss"], 0.5);
}

#[test]
fn completing_a_length_early_fails() {
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path());
    let session = context.session();
    assert_eq!(session.length(5, 8), 10);
    session.report_metrics("validation", 9, [("loss", 0.5)]).unwrap();
    let error = session.complete_length(9).unwrap_err().to_string();
    assert!(
        error.starts_with("batch 9 is not the granted length, which ends at batch 10"),
        "{error}"
    );
    session.report_metrics("validation", 10, [("loss", 0.5)]).unwrap();
    assert_eq!(session.complete_length(10).unwrap(), None);
}

/// Returns the context of a program with a length of 9 in its own count.
fn counting(folder: &Path, time_metric: Option<&str>) -> Context {
    let standalone = Standalone {
        folder: Some(folder.to_owned()),
        length: Some(Length::new(Unit::Units, 9)),
        quiet: true,
        ..Standalone::default()
    };
    let mut context = standalone.context().unwrap();
    context.config.time_metric = time_metric.map(str::to_owned);
    context
}

#[test]
fn units_are_the_programs_own_count() {
    let folder = tempfile::tempdir().unwrap();
    let context = counting(folder.path(), None);
    let session = context.session();
    assert_eq!((session.units(), session.length(5, 8)), (9, 9));
    session.report_metrics("validation", 8, [("loss", 0.5)]).unwrap();
    let error = session.complete_length(8).unwrap_err().to_string();
    assert!(error.starts_with("batch 8 is not the granted length"), "{error}");
    session.report_metrics("validation", 9, [("loss", 0.5)]).unwrap();
    assert_eq!(session.complete_length(9).unwrap(), None);
}

#[test]
fn time_metric_measures_the_length() {
    let folder = tempfile::tempdir().unwrap();
    let context = counting(folder.path(), Some("steps"));
    let session = context.session();
    assert_eq!((session.units(), session.length(5, 8)), (9, 9));
    let check = |batch: u64, steps: Option<f64>, expected: &str| {
        let steps = steps.map(|steps| ("steps", steps));
        session
            .report_metrics("validation", batch, [("loss", 0.5)].into_iter().chain(steps))
            .unwrap();
        match session.complete_length(batch) {
            Ok(more) => assert_eq!((more, expected), (None, ""), "batch {batch}"),
            Err(error) => assert!(error.to_string().starts_with(expected), "{error}"),
        }
    };
    check(100, None, "the validation lacks steps, which measures the trained length; report it");
    check(101, Some(8.5), "steps is 8.5 at batch 101, but the granted length is 9: call `units`");
    check(102, Some(f64::NAN), "steps is NaN at batch 102");
    check(103, Some(9.0), "");
}

/// The runner finds the searched metric by the same rules.
#[test]
fn searched_metric_accepts_the_val_prefix() {
    let mut config = Standalone::default().context().unwrap().config;
    let metrics: Logs = [("validation_loss".to_owned(), 0.5)].into();
    let mut check = |name: &str, expected: Result<f64, &str>| {
        config.metric = name.into();
        let searched = find_searched_metric(&config, &metrics).map_err(|error| error.to_string());
        assert_eq!(searched, expected.map_err(str::to_owned));
    };
    check("validation_loss", Ok(0.5));
    check("val_loss", Ok(0.5));
    let missing = "searched metric loss not found: validation reported validation_loss; report it \
                   or change searcher.metric";
    check("loss", Err(missing));
}
