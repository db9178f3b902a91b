//! Uploads, downloads and deletions of checkpoints, also by several ranks.

use std::io::Read as _;

use rustix::fs::{CWD, Mode, OFlags, mkfifoat, open};
use stoker_storage::hash::sha256_hex;

use super::*;
use crate::reporter::tests::TestReportServer;

#[test]
fn checkpoints_are_downloaded_and_deleted() {
    let (folder, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let context = alone(folder.path());
    let session = context.session();
    let files = [("a.txt", "one"), ("deep/er/b.txt", "two"), ("notes.tmp", "three")];
    let first = Upload::at(1).metadata("epoch", 7).select(|name| !name.ends_with(".tmp"));
    let first = session.store_path(first, |folder| write(folder, &files)).unwrap();
    let second = session.store_path(Upload::at(2), |folder| write(folder, &files[..1])).unwrap();
    assert_eq!((first.as_str(), second.as_str()), ("000000000001-0", "000000000002-0"));
    // The name of the last checkpoint is returned again: after a stop request, a program stores
    // what it has just stored.
    assert_eq!(session.store_path(Upload::at(2), |_| Ok(())).unwrap(), second);
    let error = session.store_path(Upload::at(1), |_| Ok(())).unwrap_err().to_string();
    assert!(
        error.ends_with("001-0 already exists: an attempt makes one checkpoint per batch"),
        "{error}"
    );
    let saved = session.metadata(session.checkpoint(&first)).unwrap();
    assert_eq!(saved.metadata, [("epoch".to_owned(), json!(7))].into());
    assert_eq!(saved.files, [("a.txt".to_owned(), 3), ("deep/er/b.txt".to_owned(), 3)].into());
    let some = Download::new(session.checkpoint(&first)).select(|name| name.contains("/er/"));
    assert_eq!(session.download(some, to.path().join("x")).unwrap(), saved);
    let text = std::fs::read_to_string(to.path().join("x/deep/er/b.txt")).unwrap();
    assert_eq!((text.as_str(), to.path().join("x/a.txt").exists()), ("two", false));
    session.download(session.checkpoint(&first), to.path().join("y")).unwrap();
    // A download is a valid checkpoint directory and can be downloaded from.
    let again = CheckpointSource::folder(to.path().join("y"));
    session.download(again, to.path().join("z")).unwrap();
    assert_eq!(std::fs::read_to_string(to.path().join("z/a.txt")).unwrap(), "one");
    let error = session.delete(&second).unwrap_err().to_string();
    assert!(error.contains("is the latest"), "{error}");
    session.delete(&first).unwrap();
    assert!(!folder.path().join("trial/checkpoints").join(&first).exists());
    let error = session.delete(&first).unwrap_err().to_string();
    assert_eq!(error, "checkpoint 000000000001-0 not found in trial");
    let manifest = |folder: &Path| write(folder, &[("manifest.json", "{}")]);
    let error = session.store_path(Upload::at(3), manifest).unwrap_err().to_string();
    assert!(error.ends_with("manifest.json is a reserved file name"), "{error}");
    let error = session.upload(to.path().join("none"), Upload::at(3)).unwrap_err().to_string();
    let is_missing = error.contains("No such file");
    assert!(error.starts_with("cannot read directory ") && is_missing, "{error}");
    assert_eq!(session.info().latest_checkpoint.as_deref(), Some("000000000002-0"));
}

/// Returns whether the watchdog takes the rank for waiting.
fn is_waiting(context: &Context) -> bool {
    context.distributed().progress.position().contains("waiting")
}

#[test]
fn reading_the_storage_is_waiting() {
    let (folder, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (context, record) = (alone(folder.path()), root.path().join("trial/record.json"));
    std::fs::create_dir_all(root.path().join("trial/checkpoints")).unwrap();
    // A storage that does not answer: reading the pipe blocks until it is opened for writing.
    mkfifoat(CWD, &record, Mode::RUSR | Mode::WUSR).unwrap();
    let from = || CheckpointSource::stored(root.path().to_str().unwrap(), "trial");
    let check = |read: &(dyn Fn() -> Result<()> + Sync)| {
        assert!(!is_waiting(&context));
        let is_seen = std::thread::scope(|scope| {
            let (reader, start) = (scope.spawn(read), Instant::now());
            let mut is_seen = false;
            while !is_seen && start.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(1));
                is_seen = is_waiting(&context);
            }
            while !reader.is_finished() {
                let _ = open(&record, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty());
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(reader.join().unwrap().is_err());
            is_seen
        });
        assert!(is_seen && !is_waiting(&context));
    };
    let to = folder.path().join("to");
    check(&|| context.session().metadata(from()).map(drop));
    check(&|| context.session().download(from(), &to).map(drop));
    check(&|| context.load_checkpoint_model(true, from()).map(drop));
}

/// A directory on a network file system may never respond.
#[test]
fn accessing_a_directory_is_not_waiting() {
    let (folder, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let context = alone(folder.path());
    let progress = &context.distributed().progress;
    let source = CheckpointSource::folder(folder.path());
    assert!(!source.while_reading(progress, || is_waiting(&context)));
    let text = "x".repeat(1 << 20);
    let write = |folder: &Path| write(folder, &[("x", &text)]);
    let name = context.session().store_path(Upload::at(1), write).unwrap();
    // Writing to the pipe blocks until all is read.
    let pipe = to.path().join("x#partial");
    mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    let download = || {
        let session = context.session();
        session.download(session.checkpoint(&name), to.path())
    };
    std::thread::scope(|scope| {
        let writer = scope.spawn(download);
        // Opening the pipe would block if the download failed before.
        let reader = open(&pipe, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).unwrap();
        let mut reader = std::fs::File::from(reader);
        let pause = || std::thread::sleep(Duration::from_millis(1));
        while !writer.is_finished() && !matches!(reader.read(&mut [0]), Ok(1)) {
            pause();
        }
        // The rest is more than fits into the pipe.
        assert!(writer.is_finished() || !is_waiting(&context));
        while !writer.is_finished() {
            let _ = std::io::copy(&mut reader, &mut std::io::sink());
            pause();
        }
        writer.join().unwrap().unwrap();
    });
}

#[test]
fn reading_a_directory_is_progress() {
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path());
    let session = context.session();
    let name = session.store_path(Upload::at(1), |folder| write(folder, &[("x", "y")])).unwrap();
    let source = CheckpointSource::folder(folder.path().join("trial/checkpoints").join(name));
    // The counter of the activity increases.
    let state = || format!("{:?}", context.distributed().progress);
    let before = state();
    session.metadata(source).unwrap();
    assert_ne!(state(), before);
}

/// The watchdog judges a rank again that waited within a validation.
#[test]
fn waits_restore_the_activity() {
    let folder = tempfile::tempdir().unwrap();
    let context = alone(folder.path());
    let (session, progress) = (context.session(), &context.distributed().progress);
    progress.record_activity(RankActivity::Evaluate);
    session.store_path(Upload::at(1), |folder| write(folder, &[("x", "y")])).unwrap();
    assert_eq!(progress.position(), "before its first step in a validation");
    // Without a longer length, training is over, and an export may take any time.
    session.report_metrics("validation", 1, [("loss", 0.5)]).unwrap();
    assert_eq!(session.complete_length(1).unwrap(), None);
    assert_eq!(
        progress.position(),
        "before its first step waiting for the storage or the runner, last reported batch 1"
    );
}

#[test]
fn program_without_directory_runs_without_checkpoints() {
    let context = Standalone { quiet: true, ..Standalone::default() }.context().unwrap();
    let session = context.session();
    assert_eq!(session.restore_path(|_, _| Ok(())).unwrap(), None);
    let name = session.store_path(Upload::at(5), |_| Ok(())).unwrap();
    assert_eq!(name, "000000000005-0");
    session.report_metrics("training", 5, [("loss", 1.0)]).unwrap();
    session.report_progress(5);
    session.set_status("warming up");
    assert_eq!(
        (session.complete_length(5).unwrap(), session.should_preempt().unwrap().is_none()),
        (None, true)
    );
    let info = session.info();
    assert_eq!((info.storage_url, info.size, info.has_runner), (None, 1, false));
    drop(session.profile(Duration::from_secs(1)).unwrap());
}

#[test]
fn ranks_upload_shards_of_one_checkpoint() {
    let (folder, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let contexts = gang(folder.path(), 3);
    let share = |context: &Context| {
        let rank = context.distributed().rank();
        let own = format!("ranks/{rank}.bin");
        let upload =
            Upload::at(4).sharded().metadata("world", 3).metadata(&format!("of{rank}"), rank);
        let text = format!("share {rank}");
        let files = [("same.txt", "all"), (own.as_str(), text.as_str())];
        context.session().store_path(upload, |folder| write(folder, &files))
    };
    for name in each(&contexts, share) {
        assert_eq!(name.unwrap(), "000000000004-0");
    }
    let fetched = each(&contexts, |context| {
        let session = context.session();
        let from = session.checkpoint("000000000004-0");
        session.download(from, to.path()).unwrap()
    });
    let names: Vec<_> = fetched[2].files.keys().map(String::as_str).collect();
    assert_eq!(names, ["ranks/0.bin", "ranks/1.bin", "ranks/2.bin", "same.txt"]);
    assert_eq!(json!(fetched[2].metadata), json!({"of0": 0, "of1": 1, "of2": 2, "world": 3}));
    drop(contexts);
    // After a restart, all ranks of a machine read from one directory.
    let contexts = gang(folder.path(), 3);
    let restored = each(&contexts, |context| {
        let rank = context.distributed().rank();
        let read = |folder: &Path, saved: &CheckpointMetadata| {
            assert_eq!(saved.batches, 4);
            Ok((
                folder.to_owned(),
                std::fs::read_to_string(folder.join(format!("ranks/{rank}.bin")))?,
            ))
        };
        context.session().restore_path(read).unwrap().unwrap()
    });
    let is_gone = |folder: &Path| *folder == *restored[0].0 && !folder.exists();
    assert!(restored.iter().all(|(folder, _)| is_gone(folder)), "{restored:?}");
    let texts: Vec<_> = restored.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(texts, ["share 0", "share 1", "share 2"]);
}

#[test]
fn conflicting_shards_fail_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let contexts = gang(folder.path(), 3);
    let upload = |batch, text: &'static (dyn Fn(usize) -> String + Sync), fails: usize| {
        each(&contexts, |context| {
            let rank = context.distributed().rank();
            let upload = Upload::at(batch).sharded().metadata("rank", rank.min(1));
            let files = [("x", text(rank))];
            let files: Vec<_> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
            let session = context.session();
            let stored = match rank == fails {
                true => session.upload(folder.path().join("none"), upload),
                false => session.store_path(upload, |folder| write(folder, &files)),
            };
            stored.unwrap_err()
        })
    };
    for error in upload(1, &|rank| format!("{}", rank / 2), usize::MAX) {
        let error = error.to_string();
        assert!(
            error.starts_with("checkpoint 000000000001-0: ranks disagree: metadata rank is 0 "),
            "{error}"
        );
        assert!(error.contains("file x is 1 bytes (5feceb66) on rank 0 and 1 bytes"), "{error}");
        assert_eq!(error.matches("metadata rank is 0 on an earlier rank").count(), 2, "{error}");
    }
    let errors = upload(2, &|_| "same".into(), 1);
    let codes: Vec<_> = errors.iter().map(|error| exit_code(&**error)).collect();
    assert_eq!(codes, [ExitCode::PeerFailed, ExitCode::UserError, ExitCode::PeerFailed]);
    assert!(errors[2].to_string().starts_with("rank 1: cannot read directory "), "{}", errors[2]);
    let left = std::fs::read_dir(folder.path().join("trial/checkpoints"));
    let has_file = |entry: &std::fs::DirEntry| entry.path().join("x").exists();
    assert_eq!(left.map_or(0, |left| left.flatten().filter(has_file).count()), 0);
}

/// Returns the contexts of two ranks of an attempt of a copy, under this runner.
fn copies(folder: &Path, sha256: &str, server: &TestReportServer, attempt: u32) -> Vec<Context> {
    let token = folder.join("token");
    std::fs::write(&token, "one").unwrap();
    let source = json!({
        "name": "000000000005-0", "manifestSha256": sha256, "trialPath": "trial",
    });
    let config = json!({
        "version": 1, "experiment": "x", "experimentId": "alone", "trial": 3, "attempt": attempt,
        "seed": 99, "experimentSeed": 7, "hyperparameters": {}, "unit": "batches", "units": 8,
        "metric": "val_loss", "smallerIsBetter": true, "schedulingUnit": 100,
        "aggregationFrequency": 1, "storage": {"url": folder, "trialPath": "copy"},
        "resumeFrom": [source], "unreportedSince": attempt.checked_sub(1),
        "door": {"url": format!("http://{}/", server.address), "tokenFile": token},
    });
    let context = |(number, rank): (usize, ThreadRank)| {
        let mut config: TrialConfig = serde_json::from_value(config.clone()).unwrap();
        let io = TrialIo::open(&mut config, None, number == 0).unwrap();
        let ranks = Distributed::from_collective(Box::new(rank));
        Context::new(config, io, StopSignal::default(), Device::flex().autodiff(), ranks)
    };
    ThreadRank::group(2).into_iter().enumerate().map(context).collect()
}

/// Stores the checkpoint of the source of a copy. Returns the hash of its manifest.
fn store_source(folder: &Path) -> String {
    let name = alone(folder).session().store_path(Upload::at(5), |_| Ok(())).unwrap();
    let manifest = folder.join("trial/checkpoints").join(name).join("manifest.json");
    sha256_hex(&std::fs::read(manifest).unwrap())
}

#[test]
fn all_ranks_of_a_copy_complete_their_length() {
    let folder = tempfile::tempdir().unwrap();
    let sha256 = store_source(folder.path());
    let server = TestReportServer::with_directives(|_| Directive::Stop);
    let contexts = copies(folder.path(), &sha256, &server, 0);
    let restored = each(&contexts, |context| {
        let restored = context.session().restore_path(|_, saved| Ok(saved.batches)).unwrap();
        (restored, context.io().check_is_copied().map_err(|error| error.to_string()))
    });
    assert_eq!(restored, [(Some(5), Ok(())), (Some(5), Ok(()))]);
    let completed = each(&contexts, |context| {
        let session = context.session();
        assert_eq!(session.length(5, 8), 8);
        session.report_metrics("validation", 8, [("loss", 0.5)]).unwrap();
        session.complete_length(8).map_err(|error| error.to_string())
    });
    assert_eq!(completed, [Ok(None), Ok(None)]);
}

/// The first attempt of a copy stores a checkpoint while the report server is unavailable.
#[test]
fn unreported_checkpoint_of_a_copy_precedes_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let sha256 = store_source(folder.path());
    let restored_by = |contexts: &[Context]| {
        each(contexts, |context| {
            context.session().restore_path(|_, saved| Ok(saved.batches)).unwrap()
        })
    };
    let unavailable = TestReportServer::scripted(vec![(503, String::new())]);
    let contexts = copies(folder.path(), &sha256, &unavailable, 0);
    assert_eq!(restored_by(&contexts), [Some(5), Some(5)]);
    contexts[0].session().store_path(Upload::at(7), |_| Ok(())).unwrap();
    drop(contexts);

    let server = TestReportServer::with_directives(|_| Directive::Stop);
    let contexts = copies(folder.path(), &sha256, &server, 1);
    assert_eq!(restored_by(&contexts), [Some(7), Some(7)]);
    let completed = each(&contexts, |context| {
        let session = context.session();
        session.length(5, 8);
        session.report_metrics("validation", 8, [("loss", 0.5)]).unwrap();
        session.complete_length(8).map_err(|error| error.to_string())
    });
    assert_eq!(completed, [Ok(None), Ok(None)]);
    let received = server.received.lock().unwrap();
    let [first, second] = [0, 1].map(|index| &received[index].1.event);
    let ReportEvent::Checkpointed { name, .. } = first else { panic!("{first:?}") };
    let ReportEvent::Started { resumed_from, .. } = second else { panic!("{second:?}") };
    assert_eq!((name.as_str(), resumed_from.as_ref()), ("000000000007-0", Some(name)));
}

/// A result also needs the other objectives, and the metric that measures the length.
#[test]
fn restart_knows_all_metrics_of_its_validation() {
    let folder = tempfile::tempdir().unwrap();
    let first = counting(folder.path(), Some("steps"));
    let metrics = [("loss", 0.25), ("latency", f64::INFINITY), ("steps", 9.0)];
    first.session().report_metrics("validation", 100, metrics).unwrap();
    let name = first.session().store_path(Upload::at(100), |_| Ok(())).unwrap();
    let reported = first.io().validation_at(100);
    assert_eq!(reported.as_ref().map(Logs::len), Some(3));
    drop(first);
    let second = counting(folder.path(), Some("steps"));
    second.session().restore_path(|_, _| Ok(())).unwrap();
    assert_eq!(second.io().validation_at(100), reported);
    assert_eq!(second.session().complete_length(100).unwrap(), None);
    drop(second);
    // Manifests of earlier versions contain only the searched metric.
    let path = folder.path().join("trial/checkpoints").join(name).join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(manifest["validation"]["validation_latency"], "inf");
    manifest.as_object_mut().unwrap().remove("validation");
    std::fs::write(&path, manifest.to_string()).unwrap();
    let third = counting(folder.path(), None);
    third.session().restore_path(|_, _| Ok(())).unwrap();
    let searched: Logs = [(third.config.metric.clone(), 0.25)].into();
    assert_eq!(third.io().validation_at(100), Some(searched));
}
