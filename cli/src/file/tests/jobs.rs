//! Tests of files of inference jobs.

use super::*;

#[test]
fn job_errors_have_positions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.yaml");
    let check = |from: &str, to: &str, set: &str, expected: &str| {
        assert!(GOOD_JOB.contains(from), "{from}");
        std::fs::write(&path, GOOD_JOB.replacen(from, to, 1)).unwrap();
        let sets: Vec<_> = Some(set.to_owned()).into_iter().filter(|set| !set.is_empty()).collect();
        let text = match load_job(&path, &sets) {
            Ok(loaded) => format!("{} of {}", loaded.valid.spec.shard_rows, loaded.name),
            Err(error) => {
                error.problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
            }
        };
        assert_eq!(text, expected, "{to}");
        assert_eq!(is_job(&path), !to.contains("kind"));
    };
    check("", "", "", "10 of species");
    check("", "", "shardRows=7", "7 of species");
    check("shardRows: 10", "shardRows: 0", "", "9:3: spec.shardRows: must be at least 1 (found 0)");
    let typo = "9:3: spec.shardRow: unknown field: did you mean `shardRows`? (found 10)";
    check("shardRows", "shardRow", "", typo);
    let format = "8:26: spec.input.format: must be one of jsonLines, csv, parquet, arrow: did you \
                  mean `csv`? (found \"tsv\")";
    check("url: rows.csv", "url: rows.csv, format: tsv", "", format);
    let trial = "7:16: spec.checkpoint.trial: must be a trial's name, EXPERIMENT-INDEX, such as \
                 mnist-3 (found \"iris\")";
    check("iris-0", "iris", "", trial);
    let kind = "2:1: kind: is an Experiment; use `stoker run` or `stoker experiment create`";
    check("kind: InferenceJob", "kind: Experiment", "", kind);
}

#[test]
fn wrong_kind_and_wrong_version_are_both_reported() {
    let from = "apiVersion: stoker.dev/v1alpha1\nkind: Experiment";
    assert!(GOOD.contains(from));
    let text = GOOD.replacen(from, "apiVersion: stoker.dev/v1\nkind: experiment", 1);
    let version = ("1:1: apiVersion:", "must be stoker.dev/v1alpha1 (found \"stoker.dev/v1\")");
    check_errors(&text, &[], &[version, ("2:1: kind:", "must be Experiment or Inference")]);
}
