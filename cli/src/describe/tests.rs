//! Golden texts of descriptions.

use stoker_api::trial::Attempt;

use super::*;
use crate::explain::tests::record;

fn now() -> Timestamp {
    "2026-11-21T19:06:00Z".parse().unwrap()
}

/// Returns the description of an experiment on a cluster, or of a local run.
fn describe(experiment: &Experiment, trials: &[TrialRecord], is_local: bool) -> String {
    Description {
        experiment,
        trials: &trials.iter().collect::<Vec<_>>(),
        explained: &Explained::new(experiment, trials),
        importance: &importance(experiment, trials),
        phase: "Running".to_owned(),
        storage: "s3://bucket/a".to_owned(),
        checkpoint: &|index, name| format!("s3://bucket/a/{index}/{name}"),
        id: if is_local { "mnist-0b3f9c1e" } else { "mnist" },
        is_local,
        now: now(),
    }
    .to_string()
}

/// Lets an attempt of a trial run.
fn start(trial: &mut TrialRecord) {
    trial.status.phase = Phase::Running;
    trial.status.attempts.push(Attempt::default());
}

fn experiment() -> (Experiment, Vec<TrialRecord>) {
    let (mut experiment, mut trials) = record();
    let status = experiment.status.as_mut().unwrap();
    status.progress_percent = 25;
    let set = json!({
        "best": { "index": 1, "metric": "0.3", "checkpoint": "000000000100-0" },
        "conditions": [{
            "type": "Valid", "status": "True", "reason": "Valid", "message": "",
            "lastTransitionTime": "2026-11-21T19:00:01Z",
        }],
    });
    status.best = serde_json::from_value(set["best"].clone()).unwrap();
    status.conditions = serde_json::from_value(set["conditions"].clone()).unwrap();
    start(&mut trials[1]);
    for trial in &mut trials {
        trial.spec.hyperparameters = json!({ "x": 0.5 });
    }
    (experiment, trials)
}

#[test]
fn description_on_a_cluster_reads_from_top_to_bottom() {
    let (experiment, trials) = experiment();
    let expected = "\
Name:       mnist
Namespace:  ml
Desired:    active
Phase:      Running
Progress:   25%
Search:     asyncHalving, 5 trials, 1 concurrent, 9 epochs each; loss, smaller is better
Program:    true in the stock image
Pods:       1 per trial, with 1 slot (CPU rank) each
Storage:    s3://bucket/a
Trials:     3: 1 running, 2 paused
Best:       trial 1 with loss 0.3
            hyperparameters: x=0.5
            checkpoint: s3://bucket/a/1/000000000100-0

Conditions:
  TYPE   STATUS  REASON  SINCE  MESSAGE
  Valid  True    Valid   5m59s

Brackets:
  BRACKET  TRIALS  TRAINING  PAUSED  PROMOTIONS  STOPPED  COMPLETED  OTHERS  PLACES  NEXT
  0        3 of 5  1         2       1           0        0          0       1       \
creates a trial when a place is free, 2 are left

Rungs:
  BRACKET  EPOCHS  TRAINING  RESULTS  PROMOTED  PAUSED  ENDED  CUT-OFF  BEST  NEXT
  0        3       0         3        1         2       0      0.3      0.3   \
promotes the next result below 0.3
  0        9       1         0        0         0       0      -        -     last rung

Trials:
  TRIAL  STATE    LOSS  BEST  EPOCHS  WHY
  1      Running  -     0.3   9       promoted to 9 epochs: 0.3 ranks 1st of 3 results at 3 \
epochs, and the best one continues
  2      Paused   0.4   0.4   3       paused at 3 epochs: 0.4 ranks 2nd of 3 results, and the best \
one continues (it has 0.3)
  0      Paused   0.5   0.5   3       paused at 3 epochs: 0.5 ranks 3rd of 3 results, and the best \
one continues (it has 0.3)

Importance: needs 10 results at one length, has 3 at 3 epochs";
    let text = describe(&experiment, &trials, false);
    assert_eq!(text, expected, "{text}");
}

#[test]
fn description_of_a_local_run_has_no_pods() {
    let (mut experiment, mut trials) = experiment();
    experiment.status.as_mut().unwrap().conditions.clear();
    trials[0].status.phase = Phase::Failed;
    trials[0].status.message = Some("no such file".to_owned());
    let text = describe(&experiment, &trials, true);
    let expected = "\
Name:      mnist
Run:       mnist-0b3f9c1e
Phase:     Running
Progress:  25%
Search:    asyncHalving, 5 trials, 1 concurrent, 9 epochs each; loss, smaller is better
Program:   true
Storage:   s3://bucket/a
Trials:    3: 1 running, 2 paused
Best:      trial 1 with loss 0.3
           hyperparameters: x=0.5
           checkpoint: s3://bucket/a/1/000000000100-0
Failures:  trial 0: no such file

Brackets:
";
    assert!(text.starts_with(expected), "{text}");
}

/// Returns an experiment and trials whose metric is a function of `x` alone.
fn many(num: u32) -> (Experiment, Vec<TrialRecord>) {
    let (mut experiment, trials) = record();
    experiment.status = None;
    let y = json!({ "oneOf": [
        { "kind": "a", "z": { "double": { "min": 0, "max": 1 } } }, { "kind": "b" },
    ] });
    experiment.spec.hyperparameters["y"] = y;
    let trial = |index: u32| {
        let mut trial = trials[0].clone();
        let x = f64::from(index * 37 % 100) / 100.0;
        let y = match index % 3 {
            0 => json!({ "kind": "b" }),
            _ => json!({ "kind": "a", "z": f64::from(index % 7) / 7.0 }),
        };
        trial.spec.index = index;
        trial.spec.hyperparameters = json!({ "x": x, "y": y });
        let metric = if index == 1 { "NaN".to_owned() } else { x.to_string() };
        let result = json!([{ "result": { "units": 3, "metric": metric } }]);
        trial.status.facts = serde_json::from_value(result).unwrap();
        trial.status.phase = if index.is_multiple_of(9) { Phase::Failed } else { Phase::Paused };
        trial
    };
    (experiment, (0..num).map(trial).collect())
}

#[test]
fn importance_is_a_table_with_bars() {
    let (experiment, trials) = many(60);
    let text = importance(&experiment, &trials).section("loss");
    let lines: Vec<&str> = text.lines().collect();
    let title = "Importance for loss at 3 epochs, from 59 results, without one that is not finite:";
    assert_eq!(lines[..3], ["", "", title], "{text}");
    assert_eq!(
        lines[3].split_whitespace().collect::<Vec<_>>().join(" "),
        "HYPERPARAMETER SHARE OF VARIANCE"
    );
    let is_row = |line: &str, name: &str, bar: &str| {
        let rest = line.trim_start().strip_prefix(name).unwrap_or_default();
        rest.starts_with("  ") && rest.contains(" ± ") && rest.ends_with(bar)
    };
    assert!(is_row(lines[4], "x", "===================="), "{text}");
    assert_eq!(lines.len(), 8, "{text}");
    assert!(lines.iter().any(|line| is_row(line, "y", "")), "{text}");
    assert!(lines.iter().any(|line| is_row(line, "y.z (kind=a)", "")), "{text}");
    assert!(lines[7].trim_start().starts_with("(combinations)"), "{text}");
    let object = importance(&experiment, &trials).add_to("loss", json!({}));
    let found = &object["importance"];
    assert_eq!(found["hyperparameters"][0]["name"], "x", "{found}");
    assert_eq!(
        (&found["metric"], &found["units"], &found["unit"], &found["results"]),
        (&json!("loss"), &json!(3), &json!("epochs"), &json!(59))
    );
    let few = importance(&experiment, &trials[..4]).add_to("loss", json!({}));
    let expected = json!({ "error": "needs 10 results at one length, has 3 at 3 epochs" });
    assert_eq!(few["importance"], expected);
}

#[test]
fn long_tables_show_open_failed_and_best_trials() {
    let (experiment, mut trials) = many(60);
    for trial in &mut trials[50..] {
        start(trial);
    }
    let refs: Vec<&TrialRecord> = trials.iter().collect();
    let explained = Explained::unavailable("the record is gone".to_owned());
    let table = TrialTable { trials: &refs, explained: &explained };
    assert_eq!(table.counts(), "60: 10 running, 44 paused, 6 failed");
    let text = table.section(&experiment.spec.searcher, "mnist");
    let lines: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(lines[0], "Trials (20 of 60; `stoker trial list mnist` lists all):");
    let rows: Vec<Vec<&str>> =
        lines[2..].iter().map(|line| line.split_whitespace().take(3).collect()).collect();
    assert_eq!(rows.len(), 20);
    let num = |state: &str| rows.iter().filter(|row| row[1] == state).count();
    assert_eq!((num("Running"), num("Failed"), num("Paused")), (8, 4, 8), "{text}");
    assert_eq!(rows[0], ["0", "Failed", "0"], "the best is first");
    let values: Vec<f64> = rows.iter().map(|row| row[2].parse().unwrap()).collect();
    assert!(values.is_sorted(), "{values:?}");
}

#[test]
fn one_trial_is_singular() {
    let (mut experiment, _) = experiment();
    let searcher = json!({
        "metric": "loss", "maxLength": { "epochs": 1 }, "random": { "maxTrials": 1 },
    });
    experiment.spec.searcher = serde_json::from_value(searcher).unwrap();
    let text = search(&experiment.spec.searcher);
    assert!(text.starts_with("random, 1 trial, 16 concurrent, 1 epoch each"), "{text}");
}
