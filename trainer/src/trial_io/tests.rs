//! Directory of a program without a runner: lock, resume and retention.

use std::collections::BTreeMap;
use std::path::Path;

use stoker_api::contract::{Manifest, RESUME_FROM_MAX};
use stoker_storage::layout;

use super::*;
use crate::{Context, Standalone};

fn alone(folder: &Path) -> Result<Context> {
    let folder = Some(folder.to_owned());
    Standalone { folder, quiet: true, ..Standalone::default() }.context()
}

/// Writes a manifest of a checkpoint with this name.
fn write(folder: &Path, name: &str, format: u32) {
    let path = folder.join("trial/checkpoints").join(name);
    std::fs::create_dir_all(&path).unwrap();
    let (batches, attempt) = layout::parse_checkpoint_name(name).unwrap();
    let manifest = Manifest {
        format,
        experiment_id: "alone".into(),
        trial: 0,
        attempt,
        batches,
        sample_sha256: None,
        metric: None,
        validation: BTreeMap::new(),
        files: BTreeMap::new(),
        unsent: vec![],
        metadata: BTreeMap::new(),
    };
    let text = serde_json::to_vec(&manifest).unwrap();
    std::fs::write(path.join("manifest.json"), text).unwrap();
}

/// Saves a checkpoint as a training loop does.
fn save(context: &Context, batches: u64, metric: Option<f64>) {
    let mut io = context.io();
    io.save(batches, metric, Box::new(|| Ok(crate::checkpoint::NewContents::new()))).unwrap();
    io.report_saved(true).unwrap();
    io.flush().unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("trial/checkpoints")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_second_program_in_a_directory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let first = alone(path).unwrap();
    let error = alone(path).unwrap_err().to_string();
    let expected =
        format!("directory {} is in use by process {}", path.display(), std::process::id());
    assert!(error.starts_with(&expected), "{error}");
    drop(first);
    alone(path).unwrap();
}

#[test]
fn a_start_reads_only_the_newest_manifests() {
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<String> = (1..=40).map(|batches| layout::checkpoint_name(batches, 0)).collect();
    all.iter().for_each(|name| write(folder.path(), name, 1));
    let context = alone(folder.path()).unwrap();
    let io = context.io();
    let names: Vec<_> = io.resume_from().iter().map(|checkpoint| checkpoint.name.clone()).collect();
    drop(io);
    let newest: Vec<_> = all.iter().rev().take(RESUME_FROM_MAX).cloned().collect();
    assert_eq!(names, newest);
    assert_eq!(context.config.attempt, 1);
}

#[test]
fn the_directory_keeps_latest_and_best_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let expect = |batches: &[(u64, u32)]| {
        let expected: Vec<String> = batches
            .iter()
            .map(|(batches, attempt)| layout::checkpoint_name(*batches, *attempt))
            .collect();
        assert_eq!(names(folder.path()), expected);
    };
    let context = alone(folder.path()).unwrap();
    save(&context, 1, Some(0.5));
    save(&context, 2, Some(0.25));
    for batches in 3..=6 {
        save(&context, batches, Some(0.75));
    }
    // The best checkpoint, and the latest three as fallbacks.
    expect(&[(2, 0), (4, 0), (5, 0), (6, 0)]);
    drop(context);
    // An interrupted save.
    let partial = folder.path().join("trial/checkpoints/000000000007-0");
    std::fs::create_dir(&partial).unwrap();
    std::fs::write(partial.join("model.bpk"), "x").unwrap();
    let context = alone(folder.path()).unwrap();
    save(&context, 8, None);
    expect(&[(2, 0), (5, 0), (6, 0), (8, 1)]);
    context.io().end_training();
    expect(&[(2, 0), (8, 1)]);
    save(&context, 9, Some(0.125));
    context.io().end_training();
    expect(&[(9, 1)]);
}

#[test]
fn the_best_after_a_deleted_checkpoint_stays() {
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path()).unwrap();
    save(&context, 1, Some(0.5));
    save(&context, 2, Some(0.25));
    save(&context, 3, None);
    context.session().delete("000000000002-0").unwrap();
    (4..=6).for_each(|batches| save(&context, batches, None));
    context.io().end_training();
    assert_eq!(names(folder.path()), ["000000000001-0", "000000000006-0"]);
}

#[test]
fn unreadable_checkpoints_are_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let unreadable = [1000, 2000, 3000].map(|batches| layout::checkpoint_name(batches, 0));
    unreadable.iter().for_each(|name| write(folder.path(), name, 99));
    let context = alone(folder.path()).unwrap();
    let of_loop = context.io().restore(|_| false).map(drop).unwrap_err().to_string();
    let of_session = context.session().restore_path(|_, _| Ok(())).unwrap_err().to_string();
    let path = folder.path().join("trial/checkpoints");
    let expected = format!("cannot resume from {}: all its checkpoints", path.display());
    for error in [of_loop, of_session] {
        assert!(error.starts_with(&expected), "{error}");
        assert!(error.contains("the newest is 000000003000-0: cannot read"), "{error}");
        assert!(error.contains("it has format 99") && error.contains("move them away"), "{error}");
    }
    drop(context);
    // With an older checkpoint that can be read, the program resumes.
    write(folder.path(), "000000000010-0", 1);
    let context = alone(folder.path()).unwrap();
    let restored = context.session().restore_path(|_, saved| Ok(saved.batches)).unwrap();
    assert_eq!(restored, Some(10));
    (20..=24).for_each(|batches| save(&context, batches, None));
    context.io().end_training();
    assert_eq!(names(folder.path())[0], layout::checkpoint_name(24, context.config.attempt));
    assert_eq!(names(folder.path())[1..], unreadable);
    drop(context);
    // The next process has refused none of them.
    let context = alone(folder.path()).unwrap();
    assert_eq!(context.io().restore(|_| false).unwrap().refused, BTreeMap::new());
    (25..=28).for_each(|batches| save(&context, batches, None));
    context.io().end_training();
    let last = layout::checkpoint_name(28, context.config.attempt);
    assert_eq!(names(folder.path()), [last.as_str(), "000000003000-0"]);
}

#[test]
fn unreadable_manifest_does_not_prevent_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Storage::open(folder.path().to_str().unwrap(), None).unwrap();
    let rt = tokio::runtime::Runtime::new().unwrap();
    std::fs::write(folder.path().join("a"), "{}").unwrap();
    // A link to itself cannot be read.
    std::os::unix::fs::symlink(folder.path().join("b"), folder.path().join("b")).unwrap();
    let read = |names: &[&str]| {
        let manifests = names.iter().map(|name| ((*name).to_owned(), (*name).to_owned()));
        rt.block_on(resume::read_manifests(&storage, manifests))
    };
    let refs = read(&["b", "a", "b"]).unwrap();
    let hashes: Vec<usize> = refs.iter().map(|found| found.manifest_sha256.len()).collect();
    assert_eq!(hashes, [0, 64, 0]);
    let error = read(&["b", "b"]).unwrap_err().to_string();
    assert!(error.contains("\"b\""), "{error}");
}

#[test]
fn unreadable_manifest_does_not_stop_retention() {
    let folder = tempfile::tempdir().unwrap();
    let [unreadable, intact] = [1, 2].map(|batches| layout::checkpoint_name(batches, 0));
    write(folder.path(), &unreadable, 1);
    write(folder.path(), &intact, 1);
    let context = alone(folder.path()).unwrap();
    let manifest = folder.path().join("trial/checkpoints").join(&unreadable).join("manifest.json");
    std::fs::remove_file(&manifest).unwrap();
    std::os::unix::fs::symlink(&manifest, &manifest).unwrap();
    (3..=7).for_each(|batches| save(&context, batches, None));
    context.io().end_training();
    let last = layout::checkpoint_name(7, context.config.attempt);
    assert_eq!(names(folder.path()), [unreadable, last]);
}

/// On a stop, an earlier save may still be in progress.
#[test]
fn stop_saves_although_an_earlier_save_failed() {
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path()).unwrap();
    // Slow, so that the save is still in progress.
    let make = Box::new(|| {
        std::thread::sleep(Duration::from_millis(300));
        Err("no memory".to_owned())
    });
    context.io().save(1, None, make).unwrap();
    assert!(context.io().finish_earlier_save());
    save(&context, 2, None);
    assert_eq!(names(folder.path()), ["000000000002-0"]);
    assert!(!context.io().finish_earlier_save());
    let last = context.io().last_saved().map(|saved| saved.name);
    assert_eq!(last.as_deref(), Some("000000000002-0"));
}

/// Minutes of the last response and of the start of the wait, and whether the runner is silent at
/// minute 60.
#[test]
fn silence_begins_with_the_last_response() {
    let first = Instant::now();
    let at = |minutes: u64| first + Duration::from_secs(60 * minutes);
    let cases = [
        (None, 50, true),
        (None, 51, false),
        (Some(0), 50, true),
        // The runner responded before the wait, or last during it.
        (Some(0), 51, false),
        (Some(50), 0, true),
        (Some(51), 0, false),
    ];
    for (responded_at, start, expected) in cases {
        let actual = is_silent(responded_at.map(at), at(start), at(60));
        assert_eq!(actual, expected, "{responded_at:?} {start}");
    }
}

#[test]
fn training_alone_ends_with_latest_and_best() {
    // A program that ends has seeded the random stream at its start.
    let _stream = crate::train::tests::lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path()).unwrap();
    let session = context.session();
    for batches in 1..=5 {
        let upload = crate::Upload::at(batches);
        session.store_path(upload, |path| Ok(std::fs::write(path.join("x"), "x")?)).unwrap();
    }
    crate::train::program::finish(Ok(context), |_| Ok(()));
    assert_eq!(names(folder.path()), ["000000000005-0"]);
}
