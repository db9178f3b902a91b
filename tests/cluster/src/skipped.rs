//! Skipped tests: each one is recorded, so that a test run can count and list them at its end.

use std::fmt::Display;
use std::io::Write as _;
use std::panic::Location;

/// Variable with the path of the file that lists skipped tests. `scripts/test` sets it and prints
/// the file with `scripts/left-out`.
const VARIABLE: &str = "STOKER_TESTS_LEFT_OUT";

/// Records that the calling test is skipped, and why. The test must return after this call.
///
/// Appends a line `PACKAGE TEST<TAB>REASON` to the file in `STOKER_TESTS_LEFT_OUT`, or writes it to
/// standard error if the variable is unset.
///
/// # Panics
///
/// If the file cannot be written: a skipped test would otherwise look like a passed one.
#[track_caller]
pub fn record_skip(reason: impl Display) {
    let line = line(&test_name(Location::caller()), &reason.to_string());
    let file = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    let Some(path) = file else {
        // Not `eprint!`, which the test harness captures.
        let _ = write!(std::io::stderr(), "skipped: {line}");
        return;
    };
    // Write each line with a single call, since several test processes may append concurrently.
    let written = std::fs::File::options()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        panic!("cannot record a skipped test in {}: {error}", path.display());
    }
}

/// Returns whether the process runs as root. Otherwise records the calling test as skipped.
///
/// `purpose` completes the sentence "needs root for ...".
#[track_caller]
pub fn has_root(purpose: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        record_skip(format!("needs root for {purpose}"));
    }
    is_root
}

fn line(test: &str, reason: &str) -> String {
    let reason = reason.replace(['\t', '\n'], " ");
    match std::env::var("CARGO_PKG_NAME") {
        Ok(package) => format!("{package} {test}\t{reason}\n"),
        Err(_) => format!("{test}\t{reason}\n"),
    }
}

/// Name of the test's thread, which is the test's name. In an unnamed thread, the source position.
fn test_name(caller: &Location<'_>) -> String {
    match std::thread::current().name() {
        Some(name) => name.to_owned(),
        None => format!("{}:{}", caller.file(), caller.line()),
    }
}
