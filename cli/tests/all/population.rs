//! Tests of population based training by `stoker run`, with trainers whose weights tell which
//! trials have trained them.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use stoker_api::contract::{CheckpointRef, Directive, ExitCode, ReportEvent};
use stoker_api::names::parse_checkpoint_name;

use crate::fixture::{RunFixture, check, last_line};
use crate::run::kill_runners;
use crate::trainer::Trainer;

/// Batches of a round: more than the checkpoints that a trial keeps to fall back to.
const ROUND: u64 = 6;

/// Trials that have trained some weights, each with the batch up to which it has.
type Weights = Vec<(u32, u64)>;

impl Trainer {
    /// Trains in rounds, and saves a checkpoint at each batch.
    pub(crate) fn train_population(&self) -> ExitCode {
        let resumed = self.config.resume_from.first();
        let (mut batches, mut weights) = resumed.map_or((0, vec![]), |from| self.load(from));
        let mut units = self.config.units;
        self.post(
            batches,
            ReportEvent::Started {
                resumed_from: resumed.map(|checkpoint| checkpoint.name.clone()),
                batches_total: units,
                refused: Default::default(),
            },
        );
        loop {
            while batches < units {
                std::thread::sleep(Duration::from_millis(
                    self.config.data["sleepMs"].as_u64().unwrap(),
                ));
                batches += 1;
                match weights.last_mut().filter(|(trial, _)| *trial == self.config.trial) {
                    Some((_, until)) => *until = batches,
                    None => weights.push((self.config.trial, batches)),
                }
                let text = serde_json::to_string(&weights).unwrap();
                self.save_model(batches, None, &text);
                let event = ReportEvent::Progress { batches_total: units, activity: None };
                match self.post(batches, event) {
                    Directive::Fenced => return ExitCode::Infrastructure,
                    Directive::Preempt => return ExitCode::Preempted,
                    _ if self.stop.load(Ordering::SeqCst) => return ExitCode::Preempted,
                    _ => {}
                }
            }
            // Trials with a large `x` are better.
            let loss = 1.0 - self.config.hyperparameters["x"].as_f64().unwrap();
            let metrics = [("loss".to_owned(), loss.to_string())].into();
            let event = ReportEvent::Validated { metrics, granted_units: Some(units) };
            match self.wait_for_decision(batches, units, event) {
                Directive::Continue { units: more } => units = more,
                Directive::Stop => {
                    self.post(batches, ReportEvent::Exiting { code: 0, message: None });
                    return ExitCode::Completed;
                }
                Directive::Fenced => return ExitCode::Infrastructure,
                _ => return ExitCode::Preempted,
            }
        }
    }

    /// Reports the end of a round, and returns the directive for the next one.
    fn wait_for_decision(&self, batches: u64, units: u64, event: ReportEvent) -> Directive {
        let mut directive = self.post(batches, event);
        loop {
            match directive {
                Directive::Wait if self.stop.load(Ordering::SeqCst) => return Directive::Preempt,
                Directive::Wait => {}
                decided => return decided,
            }
            std::thread::sleep(Duration::from_millis(10));
            let event = ReportEvent::Progress { batches_total: units, activity: None };
            directive = self.post(batches, event);
        }
    }

    /// Returns the batch and the weights of a checkpoint, which may be another trial's.
    fn load(&self, from: &CheckpointRef) -> (u64, Weights) {
        let storage = &self.config.storage;
        let trial_path = from.trial_path.as_ref().unwrap_or(&storage.trial_path);
        let folder = Path::new(&storage.url).join(trial_path).join("checkpoints").join(&from.name);
        let weights = std::fs::read(folder.join("model")).unwrap();
        (parse_checkpoint_name(&from.name).unwrap().0, serde_json::from_slice(&weights).unwrap())
    }
}

/// Four trials train three rounds, and one of them is replaced after each round.
fn fixture() -> RunFixture {
    let search = json!({
        "populationSize": 4,
        "lengthPerRound": { "batches": ROUND },
        "numRounds": 3,
        "truncateFraction": 0.25,
    });
    let mut fixture = RunFixture::new(json!({ "pbt": search }), "population");
    fixture.spec["searcher"].as_object_mut().unwrap().remove("maxLength");
    fixture
}

/// Returns the trials without what depends on interruptions: times, attempts and the attempts that
/// wrote checkpoints.
fn decisions(fixture: &RunFixture) -> Vec<Value> {
    let trial = |trial: Value| {
        let source = &trial["spec"]["source"];
        let facts = trial["status"]["facts"].as_array().unwrap().iter().map(|fact| {
            let result = &fact["result"];
            json!([result["units"], result["metric"], fact["closed"]["cause"]])
        });
        json!([
            trial["spec"]["hyperparameters"],
            trial["spec"]["seed"],
            [&source["trial"], &source["units"]],
            facts.collect::<Vec<_>>(),
        ])
    };
    fixture.trials().into_iter().map(trial).collect()
}

/// Checks that the weights of each trial come from its source.
fn check_weights(fixture: &RunFixture) {
    for trial in fixture.trials() {
        let index = trial["spec"]["index"].as_u64().unwrap();
        let checkpoints = trial["status"]["checkpoints"].as_array().unwrap();
        let name = checkpoints.last().unwrap()["name"].as_str().unwrap();
        let weights = fixture.model(index, name);
        let weights: Vec<(u64, u64)> = serde_json::from_str(&weights).unwrap();
        let (last, earlier) = weights.split_last().unwrap();
        assert_eq!(last.0, index, "{weights:?}");
        let source = &trial["spec"]["source"];
        let expected =
            source["trial"].as_u64().map(|trial| (trial, source["units"].as_u64().unwrap()));
        assert_eq!(earlier.last().copied(), expected, "trial {index}: {weights:?}");
        assert_eq!(trial["spec"]["pins"], Value::Null, "trial {index}");
        let first = &trial["status"]["attempts"][0];
        assert_eq!(first["resumedFrom"], source["checkpoint"], "trial {index}");
    }
}

/// With one slot, copies start last, when their sources have trained the whole round and have
/// saved more checkpoints than are kept. So the sources must keep the checkpoints for the copies.
#[test]
fn copies_start_from_their_sources() {
    let fixture = fixture();
    let output = fixture.run(&["--slots", "1"]);
    check(&output, 0, "");
    let line = last_line(&output);
    assert_eq!((&line["phase"], &line["trials"]), (&"Completed".into(), &6.into()));
    check_weights(&fixture);
    let copies: Vec<Value> =
        fixture.trials().iter().map(|trial| trial["spec"]["source"]["units"].clone()).collect();
    assert_eq!(copies, [Value::Null, Value::Null, Value::Null, Value::Null, 6.into(), 12.into()]);
    assert_eq!(fixture.checkpoints(), fixture.stored_checkpoints());
}

#[test]
fn killed_runner_makes_the_same_copies() {
    let undisturbed = fixture();
    check(&undisturbed.run(&[]), 0, "");
    let mut interrupted = fixture();
    interrupted.spec["data"]["sleepMs"] = json!(30);
    kill_runners(&interrupted, 4);
    check(&interrupted.run(&[]), 0, "");
    assert_eq!(decisions(&interrupted), decisions(&undisturbed));
    check_weights(&interrupted);
}
