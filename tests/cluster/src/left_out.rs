//! Tests that are left out: each one is recorded, so that a test run can count and name them at its end.

use std::fmt::Display;
use std::io::Write as _;
use std::panic::Location;

/// The variable that names the file of tests that were left out. `scripts/test` sets it and prints the
/// file with `scripts/left-out`.
const VARIABLE: &str = "STOKER_TESTS_LEFT_OUT";

/// Records that the calling test is left out, and why. The test must return after this.
///
/// Appends a line `PACKAGE TEST<TAB>REASON` to the file that `STOKER_TESTS_LEFT_OUT` names, or writes
/// it to standard error if the variable is unset.
///
/// # Panics
///
/// If the file cannot be written: an unrecorded test would look like one that passed.
#[track_caller]
pub fn leave_out(reason: impl Display) {
    let line = line(&test_name(Location::caller()), &reason.to_string());
    let file = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    let Some(path) = file else {
        // Not `eprint!`, which the test harness captures.
        let _ = write!(std::io::stderr(), "left out: {line}");
        return;
    };
    // One write per line: several test processes may append at once.
    let written = std::fs::File::options()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        panic!("cannot record a test that is left out in {}: {error}", path.display());
    }
}

/// Reports whether the process runs as root, and records the calling test as left out otherwise.
///
/// `purpose` completes the sentence "needs root for ...".
#[track_caller]
pub fn has_root(purpose: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        leave_out(format!("needs root for {purpose}"));
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

/// The name of the test's thread, which is the test's. In a thread without a name, the source position.
fn test_name(caller: &Location<'_>) -> String {
    match std::thread::current().name() {
        Some(name) => name.to_owned(),
        None => format!("{}:{}", caller.file(), caller.line()),
    }
}
