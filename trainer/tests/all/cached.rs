//! Tests with several processes on one machine that use the same data set.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::process::{Pid, Signal, kill_process};
use stoker_api::names::{ENV_DATA_CACHE, ENV_DATA_CACHE_BYTES};
use stoker_trainer::{DataCache, Result, Split};

use crate::process::{Pod, ProcessOutcome, until};

/// Number of samples in the set.
const SAMPLES: u64 = 100;

/// File that the builder waits for after half of the samples.
const ENV_GATE: &str = "TEST_GATE";

/// The program: reads the set in this directory, and appends a line to a log when it builds the
/// set.
pub(crate) fn read(folder: &Path) -> ExitCode {
    let gate = std::env::var_os(ENV_GATE).map(PathBuf::from);
    let build = || -> Result<_> {
        let mut log =
            std::fs::OpenOptions::new().create(true).append(true).open(folder.join("log"))?;
        writeln!(log, "{}", std::process::id())?;
        Ok((0..SAMPLES).map(move |sample| {
            if let Some(gate) = gate.as_ref().filter(|_| sample == SAMPLES / 2) {
                until("the gate", || gate.exists());
            }
            Ok((sample, vec![sample as f32; 7]))
        }))
    };
    let opened = DataCache::standard();
    let opened = opened.and_then(|cache| cache.open("digits", "v1", Split::Training, build));
    let set = match opened {
        Ok(set) => set,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let sum: u64 = (0..set.len()).map(|sample| set.get(sample).unwrap().0).sum();
    println!("sum {sum}");
    ExitCode::SUCCESS
}

/// Creates a pod with the cache in this directory.
fn pod(folder: &Path) -> Pod {
    Pod::new().env(ENV_DATA_CACHE, folder.join("sets").to_str().unwrap())
}

fn builders(folder: &Path) -> usize {
    std::fs::read_to_string(folder.join("log")).unwrap_or_default().lines().count()
}

#[test]
fn concurrent_processes_build_once() {
    let folder = tempfile::tempdir().unwrap();
    let role = format!("cached {}", folder.path().display());
    let gate = folder.path().join("gate");
    let gated = || pod(folder.path()).env(ENV_GATE, gate.to_str().unwrap());
    let mut pods: Vec<_> = (0..6).map(|_| gated()).collect();
    let mut children: Vec<_> = pods.iter().map(|pod| pod.start(&role)).collect();
    until("the build", || builders(folder.path()) > 0);
    // By now, the lock contains the builder's name.
    let late = gated();
    children.push(late.start(&role));
    let builder = std::fs::read_to_string(folder.path().join("log")).unwrap();
    let waits = format!("waiting for process {} on ", builder.trim());
    until(&waits, || std::fs::read_to_string(late.file("errors")).unwrap().contains(&waits));
    std::fs::write(&gate, "").unwrap();
    pods.push(late);
    let left: Vec<_> = pods.iter().zip(children).map(|(pod, child)| pod.wait(child)).collect();
    let is_right = |process: &ProcessOutcome| process.code == 0 && process.out.contains("sum 4950");
    assert!(left.iter().all(is_right), "{left:?}");
    assert_eq!(builders(folder.path()), 1);
    // A later process builds nothing.
    assert_eq!(pod(folder.path()).run(&role).code, 0);
    assert_eq!(builders(folder.path()), 1);
    let left = pod(folder.path()).env(ENV_DATA_CACHE_BYTES, "50 GB").run(&role);
    let expected = "STOKER_DATA_CACHE_BYTES is \"50 GB\", but must be a number of bytes";
    assert!(left.code == 1 && left.errors.contains(expected), "{left:?}");
}

#[test]
fn partial_set_of_killed_builder_is_unused() {
    let folder = tempfile::tempdir().unwrap();
    let role = format!("cached {}", folder.path().display());
    let gate = folder.path().join("never");
    let first = pod(folder.path()).env(ENV_GATE, gate.to_str().unwrap());
    let second = pod(folder.path());
    let child = first.start(&role);
    let half = folder.path().join("sets/digits/v1/.training.half/00000.seg");
    until("the build", || half.exists());
    let waiting = second.start(&role);
    until("the second builder's wait", || {
        let errors = std::fs::read_to_string(second.file("errors"));
        errors.is_ok_and(|errors| errors.contains("waiting for process"))
    });
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    let left = second.wait(waiting);
    assert_eq!(first.wait(child).code, -1);
    assert!(left.code == 0 && left.out.contains("sum 4950"), "{left:?}");
    assert!(left.errors.contains("waiting for process"), "{left:?}");
    assert_eq!(builders(folder.path()), 2);
    assert!(!half.exists());
}
