//! Skipped tests are recorded with their reason, instead of passing silently.

use std::process::Command;

use stoker_tests::{describe_output, repository};

/// Runs tests of this program in a process without a cluster and without data. Returns the recorded
/// lines and the summary.
fn recorded(tests: &[&str]) -> (Vec<String>, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("skipped");
    let output = Command::new(std::env::current_exe().unwrap())
        .arg("--exact")
        .args(tests)
        .env("STOKER_TEST_CLUSTER", "off")
        .env("STOKER_CACHE", folder.path())
        .env("STOKER_TESTS_LEFT_OUT", &file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", describe_output(&output));
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let summary = Command::new(repository().join("scripts/left-out")).arg(&file).output().unwrap();
    assert!(summary.status.success(), "{}", describe_output(&summary));
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    (lines, String::from_utf8(summary.stdout).unwrap())
}

const CLUSTER_TEST: &str = "chart::install::upgrade_and_uninstall_keep_secrets_and_experiments";
const DATA_TEST: &str = "local_run::cifar10_subset_reaches_50_percent";

#[test]
fn skipped_tests_are_recorded_with_their_reason() {
    let (lines, summary) = recorded(&[CLUSTER_TEST, DATA_TEST]);
    let expected = [
        format!("stoker-tests {CLUSTER_TEST}\tSTOKER_TEST_CLUSTER=off"),
        format!("stoker-tests {DATA_TEST}\tneeds the data set cifar10"),
    ];
    assert_eq!(lines, expected);
    let expected = format!(
        "2 tests skipped:\n  STOKER_TEST_CLUSTER=off (1)\n    stoker-tests {CLUSTER_TEST}\n  \
         needs the data set cifar10 (1)\n    stoker-tests {DATA_TEST}\n"
    );
    assert_eq!(summary, expected);
}

#[test]
fn complete_runs_report_no_skipped_tests() {
    let (lines, summary) = recorded(&["architecture::dependencies_point_one_way"]);
    assert_eq!((lines.len(), summary.as_str()), (0, "no tests skipped\n"));
}

/// A test with a separate switch would pass silently.
#[test]
fn one_function_reads_the_cluster_switch() {
    let output = Command::new("git")
        .args([
            "grep",
            "--untracked",
            "--files-with-matches",
            "var.*\"STOKER_TEST_CLUSTER\"",
            "*.rs",
        ])
        .current_dir(repository())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "tests/cluster/src/lib.rs\n");
}
