//! Tests of `stoker trial metrics` and `stoker experiment metrics` after a local run.

use std::fs::File;
use std::io::IsTerminal as _;

use serde_json::{Value, json};
use stoker_storage::metrics::{Row, segments};

use crate::fixture::{RunFixture, check, output_text, stoker};
use crate::trainer::Trainer;

impl Trainer {
    /// Writes a row of metrics, as a separate segment.
    pub(crate) fn write_row(&self, group: &str, batches: u64, loss: f64) {
        let storage = &self.config.storage;
        let attempt = self.config.attempt;
        let metrics = [("loss".to_owned(), loss)].into();
        let row =
            Row { group: group.to_owned(), batches, epoch: 0, attempt, time: Some(1.5), metrics };
        let segments = segments(&storage.trial_path, attempt);
        // A validation follows the training row of the same batch.
        let path = segments.path(2 * batches + u64::from(group == "validation"));
        let path = std::path::Path::new(&storage.url).join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, serde_json::to_string(&row).unwrap() + "\n").unwrap();
    }

    /// Returns the loss of a training row: the batches, and 100 more in the second attempt.
    pub(crate) fn training_loss(&self, batches: u64) -> f64 {
        match batches {
            3 => f64::NAN,
            _ => (batches + 100 * u64::from(self.config.attempt)) as f64,
        }
    }
}

/// Runs a grid of three trials. Each fails after batch 7 and resumes from batch 5.
fn fixture() -> RunFixture {
    let fixture = RunFixture::new(json!({"grid": {}}), "metrics");
    check(&fixture.run(&[]), 0, "");
    fixture
}

#[track_caller]
fn stdout(fixture: &RunFixture, arguments: &str, code: i32) -> String {
    let mut command = stoker();
    command.args(arguments.split_whitespace()).arg("--root").arg(fixture.root());
    let output = command.output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(code), "{arguments}: {text}");
    if code == 0 { String::from_utf8(output.stdout).unwrap() } else { text }
}

#[test]
fn metrics_of_a_trial_are_printed() {
    let fixture = fixture();
    let cells = |arguments: &str| -> Vec<Vec<String>> {
        let text = stdout(&fixture, arguments, 0);
        let split = |line: &str| line.split("  ").map(|cell| cell.trim().to_owned()).collect();
        let rows = text.lines().map(|line: &str| -> Vec<String> { split(line) });
        rows.map(|row| row.into_iter().filter(|cell| !cell.is_empty()).collect()).collect()
    };
    let table = cells("trial metrics scripted-0 --group training");
    assert_eq!(table[0], ["GROUP", "METRIC", "POINTS", "FIRST", "BEST", "LAST", "CURVE"]);
    // The second attempt has replaced the batches after 5.
    let points = "10 (1 not finite)";
    assert_eq!(table[1], ["training", "loss", points, "1", "1", "110", "▁▁ ▁▁█████"]);
    assert_eq!(cells("trial metrics scripted 0").len(), 3, "a header and two groups");
    let table = cells("trial metrics scripted-0 --group training --all-attempts");
    let points = "7 (1 not finite)";
    assert_eq!(table[1], ["training", "loss", "0", points, "1", "1", "7", "▁▂ ▅▆▇█"]);
    assert_eq!(table[2][..6], ["training", "loss", "1", "5", "106", "106"]);
    let text = stdout(&fixture, "trial metrics scripted-0 --metric accuracy", 2);
    assert!(text.contains("not found; available: loss in training, loss in validation"), "{text}");
    stdout(&fixture, "trial metrics scripted-7", 2);
    let text = stdout(&fixture, "trial list scripted --output csv", 2);
    assert!(text.contains("invalid value 'csv'"), "{text}");
}

#[test]
fn metrics_of_an_experiment_are_printed() {
    let fixture = fixture();
    let trials = fixture.trials();
    let mut expected: Vec<(f64, String)> = trials
        .iter()
        .map(|trial| {
            let metric = trial["status"]["facts"][0]["result"]["metric"].as_str().unwrap();
            (metric.parse().unwrap(), trial["spec"]["index"].to_string())
        })
        .collect();
    expected.sort_by(|one, other| one.partial_cmp(other).unwrap());
    let table = stdout(&fixture, "experiment metrics scripted", 0);
    assert!(table.starts_with("loss in validation, smaller is better\n\nTRIAL"), "{table}");
    let order = table.lines().skip(3).map(|line| line.split_whitespace().next().unwrap());
    assert!(order.eq(expected.iter().map(|(_, index)| index)), "{table} {expected:?}");

    let csv = stdout(&fixture, "experiment metrics scripted --group training -o csv", 0);
    let line = |trial: u32, batches: u32| match batches {
        3 => format!("{trial},training,3,0,0,1.5,loss,NaN"),
        1..=5 => format!("{trial},training,{batches},0,0,1.5,loss,{batches}.0"),
        _ => format!("{trial},training,{batches},0,1,1.5,loss,{}.0", 100 + batches),
    };
    let mut lines = vec!["trial,group,batches,epoch,attempt,time,metric,value".to_owned()];
    lines.extend((0..3).flat_map(|trial| (1..=10).map(move |batches| line(trial, batches))));
    assert_eq!(csv.lines().collect::<Vec<_>>(), lines);
    let all = stdout(&fixture, "experiment metrics scripted --all-attempts -o csv", 0);
    // In addition: two superseded rows and one validation per trial.
    assert_eq!(all.lines().count(), 1 + 3 * (10 + 2 + 1), "{all}");

    let json = stdout(&fixture, "--output json experiment metrics scripted", 0);
    let rows: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 3 * (10 + 1), "{json}");
    assert_eq!(
        rows[2],
        json!({"trial": 0, "group": "training", "batches": 3, "epoch": 0, "attempt": 0,
            "time": 1.5, "metrics": {"loss": null}, "nonfinite": {"loss": "NaN"}}),
    );
}

#[test]
fn parquet_refuses_terminals_and_full_disks() {
    let fixture = fixture();
    let check_device = |path: &str, code: i32, expected: &str| {
        let mut command = stoker();
        command.args(["experiment", "metrics", "scripted", "--output", "parquet", "--root"]);
        let device = File::options().read(true).write(true).open(path).unwrap();
        assert_eq!(device.is_terminal(), path == "/dev/ptmx");
        let output = command.arg(fixture.root()).stdout(device).output().unwrap();
        check(&output, code, expected);
    };
    let full = "cannot write Parquet to standard output: No space left on device";
    check_device("/dev/full", 1, full);
    // The controlling side of a pseudo-terminal is a terminal, too.
    let terminal =
        "standard output is a terminal; redirect it, for example with `> metrics.parquet`";
    check_device("/dev/ptmx", 2, terminal);
}
