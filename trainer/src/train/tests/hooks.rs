//! Order of callback hooks, also across stops.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use crate::callback::{CheckpointFiles, CsvLog, TensorBoard, Weights};
use crate::collective::{Distributed, ThreadRank};
use crate::stop::StopSignal;

/// Hooks that were called, in order.
pub(super) type Calls = Arc<Mutex<Vec<String>>>;

/// Records every hook, and requests a stop after a batch.
pub(super) struct Notes {
    pub(super) calls: Calls,
    pub(super) preempt_at: Option<(u64, StopSignal)>,
}

impl Notes {
    fn note(&self, call: impl Into<String>) -> Result<()> {
        self.calls.lock().unwrap().push(call.into());
        Ok(())
    }
}

impl Callback for Notes {
    fn on_train_begin(&mut self, _: &mut Control) -> Result<()> {
        self.note("train_begin")
    }

    fn on_epoch_begin(&mut self, epoch: u64, _: &mut Control) -> Result<()> {
        self.note(format!("epoch_begin {epoch}"))
    }

    fn on_workload_begin(&mut self, requested: u64, control: &mut Control) -> Result<()> {
        self.note(format!("workload_begin {requested} at {}", control.batches()))
    }

    fn on_batch_begin(&mut self, control: &mut Control) -> Result<()> {
        self.note(format!("batch_begin {}", control.batches()))
    }

    fn on_batch_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        assert!(logs.contains_key("loss"), "{logs:?}");
        if let Some((batch, stop)) = &self.preempt_at
            && control.batches() == *batch
        {
            stop.set();
        }
        self.note(format!("batch_end {}", control.batches()))
    }

    fn on_workload_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        assert!(logs.contains_key("loss"), "{logs:?}");
        self.note(format!("workload_end at {}", control.batches()))
    }

    fn on_validation_begin(&mut self, _: &mut Control) -> Result<()> {
        self.note("validation_begin")
    }

    fn on_validation_batch_begin(&mut self, batch: u64, _: &mut Control) -> Result<()> {
        self.note(format!("validation_batch_begin {batch}"))
    }

    fn on_validation_batch_end(&mut self, batch: u64, _: &mut Control) -> Result<()> {
        self.note(format!("validation_batch_end {batch}"))
    }

    fn on_validation_end(&mut self, logs: &Logs, _: &mut Control) -> Result<()> {
        assert!(logs.contains_key("val_loss"), "{logs:?}");
        self.note("validation_end")
    }

    fn on_epoch_end(&mut self, epoch: u64, logs: &Logs, _: &mut Control) -> Result<()> {
        assert!(logs.contains_key("loss"), "{logs:?}");
        self.note(format!("epoch_end {epoch}"))
    }

    fn on_checkpoint(&mut self, files: &mut CheckpointFiles, control: &mut Control) -> Result<()> {
        files.add("note.txt", control.batches().to_string())?;
        self.note(format!("checkpoint {}", control.batches()))
    }

    fn on_train_end(&mut self, _: &mut Control) -> Result<()> {
        self.note("train_end")
    }

    fn load_state(&mut self, _: Value) -> Result<()> {
        self.note("load_state")
    }

    fn on_restore(&mut self, files: &CheckpointFiles) -> Result<()> {
        let noted = files.get("note.txt").map(|note| String::from_utf8_lossy(note).into_owned());
        self.note(format!("restore {}", noted.unwrap_or_default()))
    }

    fn state(&self) -> Result<Value> {
        Ok(json!("noted"))
    }
}

fn train(folder: &Path, preempt_at: Option<u64>, mut more: Vec<Box<dyn Callback>>) -> Vec<String> {
    let context = alone(Some(folder), 20).context().unwrap();
    let calls = Calls::default();
    let preempt_at = preempt_at.map(|batch| (batch, context.stop.clone()));
    more.push(Notes { calls: calls.clone(), preempt_at }.boxed());
    let data = || Data::arrays(samples());
    let fit = Fit::new(data().unwrap()).validation(data().unwrap()).batch_size(16).callbacks(more);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let _ = context.fit(Net::new(context.device()), optimizers(), step, fit);
    calls.lock().unwrap().clone()
}

/// Which hooks may follow each hook, by name.
const LEGAL: [(&str, &[&str]); 16] = [
    ("", &["train_begin"]),
    ("train_begin", &["load_state", "epoch_begin"]),
    ("load_state", &["restore"]),
    ("restore", &["epoch_begin", "workload_begin", "validation_begin", "checkpoint", "train_end"]),
    ("epoch_begin", &["workload_begin"]),
    ("workload_begin", &["batch_begin"]),
    ("batch_begin", &["batch_end"]),
    // A process that is preempted saves first, even within a workload.
    ("batch_end", &["batch_begin", "workload_end", "checkpoint"]),
    (
        "workload_end",
        &["workload_begin", "validation_begin", "epoch_end", "checkpoint", "train_end"],
    ),
    ("validation_begin", &["validation_batch_begin"]),
    ("validation_batch_begin", &["validation_batch_end"]),
    ("validation_batch_end", &["validation_batch_begin", "validation_end"]),
    ("validation_end", &["epoch_end", "workload_begin", "epoch_begin", "checkpoint", "train_end"]),
    ("epoch_end", &["epoch_begin", "checkpoint", "train_end"]),
    ("checkpoint", &["workload_begin", "epoch_begin", "workload_end", "train_end"]),
    ("train_end", &[]),
];

pub(super) fn name(call: &str) -> &str {
    call.split(' ').next().unwrap_or_default()
}

fn check_legal(calls: &[String]) {
    check_legal_with(calls, &[]);
}

/// Same as [`check_legal`], with additional pairs of consecutive hooks.
pub(super) fn check_legal_with(calls: &[String], more: &[(&str, &str)]) {
    let mut before = "";
    for call in calls {
        let (_, legal) = LEGAL.iter().find(|(hook, _)| *hook == before).unwrap();
        let is_legal = legal.contains(&name(call)) || more.contains(&(before, name(call)));
        assert!(is_legal, "{call} after {before}\n{calls:#?}");
        before = name(call);
    }
    assert_eq!(before, "train_end", "{calls:#?}");
}

#[test]
fn hooks_run_in_the_documented_order() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let calls = train(folder.path(), None, vec![]);
    check_legal(&calls);
    // An epoch has seven batches, a workload at most four. Each epoch ends with a validation and a
    // checkpoint.
    let expected =
        ["train_begin", "epoch_begin 0", "workload_begin 4 at 0", "batch_begin 0", "batch_end 1"];
    assert_eq!(calls[..5], expected);
    let workloads: Vec<_> = calls.iter().filter(|call| name(call) == "workload_begin").collect();
    let expected = ["4 at 0", "3 at 4", "1 at 7", "4 at 8", "2 at 12", "2 at 14", "4 at 16"];
    let expected: Vec<_> =
        expected.iter().map(|workload| format!("workload_begin {workload}")).collect();
    assert_eq!(workloads, expected.iter().collect::<Vec<_>>());
    let count = |hook: &str| calls.iter().filter(|call| name(call) == hook).count();
    let counts = ["batch_end", "validation_end", "validation_batch_end", "epoch_end", "checkpoint"];
    assert_eq!(counts.map(count), [20, 3, 21, 2, 3]);
    let epoch: Vec<_> = calls.iter().skip_while(|call| *call != "batch_end 7").take(3).collect();
    assert_eq!(epoch, ["batch_end 7", "workload_end at 7", "validation_begin"]);
    let files = last_checkpoint(folder.path());
    assert_eq!(files["callbacks-note.txt"], b"20");
}

/// Returns whether a call is the same however often the training was stopped.
pub(super) fn of_training(call: &&String) -> bool {
    let of_process = ["train_begin", "train_end", "load_state", "restore", "checkpoint"];
    !of_process.contains(&name(call)) && !name(call).starts_with("workload")
}

#[test]
fn resumed_run_calls_the_same_hooks() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let straight = train(folder.path(), None, vec![]);
    let straight: Vec<_> = straight.iter().filter(of_training).cloned().collect();
    for stop_at in 1..20 {
        let folder = tempfile::tempdir().unwrap();
        let mut all = train(folder.path(), Some(stop_at), vec![]);
        check_legal(&all);
        let rest = train(folder.path(), None, vec![]);
        check_legal(&rest);
        assert_eq!(rest[2], format!("restore {stop_at}"), "the file of the last checkpoint");
        all.extend(rest);
        let all: Vec<_> = all.iter().filter(of_training).cloned().collect();
        assert_eq!(all, straight, "stopped at {stop_at}");
    }
}

/// Requests a change of training on rank 0 only.
struct Chief;

impl Callback for Chief {
    fn chief_only(&self) -> bool {
        true
    }

    fn on_epoch_end(&mut self, epoch: u64, _: &Logs, control: &mut Control) -> Result<()> {
        if epoch == 1 {
            control.stop_training("enough");
        }
        Ok(())
    }
}

#[test]
fn chief_only_callback_cannot_change_training() {
    struct Slows;
    impl Callback for Slows {
        fn on_epoch_end(&mut self, _: u64, _: &Logs, control: &mut Control) -> Result<()> {
            control.scale_learning_rate(0.5);
            Ok(())
        }
    }
    let call = |ranks: &Distributed, epoch| {
        // A request of an earlier callback must not hide that of the chief.
        let mut callbacks = vec![Slows.boxed(), Chief.boxed()];
        let mut control = Control::default();
        let done = call_hook(&mut callbacks, &mut control, ranks, |callback, control| {
            callback.on_epoch_end(epoch, &Logs::new(), control)
        });
        done.map(|()| control.stop).map_err(|error| error.to_string())
    };
    assert_eq!(call(&Distributed::single_rank(), 1), Ok(Some("enough".into())));
    let ranks =
        ThreadRank::group(2).into_iter().map(|rank| Distributed::from_collective(Box::new(rank)));
    let ranks: Vec<_> = ranks.collect();
    assert_eq!(call(&ranks[0], 0), Ok(None));
    let error = call(&ranks[0], 1).unwrap_err();
    assert!(error.starts_with("callback Chief: a `chief_only` callback cannot"), "{error}");
    assert_eq!(call(&ranks[1], 1), Ok(None));
}

#[test]
fn callback_error_keeps_its_exit_code() {
    struct Refuses;
    impl Callback for Refuses {
        fn on_checkpoint(&mut self, _: &mut CheckpointFiles, _: &mut Control) -> Result<()> {
            Err(crate::InvalidHyperparameters("too large".into()).into())
        }
    }
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let context = alone(Some(folder.path()), 20).context().unwrap();
    let data = Data::arrays(samples()).unwrap();
    let fit = Fit::new(data).batch_size(16).callbacks(vec![Refuses.boxed()]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let error = context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters);
    assert_eq!(error.to_string(), "callback Refuses: invalid hyperparameters: too large");
}

/// Keeps the weights that it receives.
struct Keeps(Arc<Mutex<BTreeMap<u64, Weights>>>);

impl Callback for Keeps {
    fn wants_weights(&self, epoch: u64) -> bool {
        epoch == 1
    }

    fn on_weights(&mut self, epoch: u64, weights: &Weights, _: &mut Control) -> Result<()> {
        let tensors = weights.iter().map(|(path, values)| (path.into(), values.to_vec())).collect();
        let weights = Weights { tensors, num_trained: weights.num_trained() };
        self.0.lock().unwrap().insert(epoch, weights);
        Ok(())
    }
}

#[test]
fn csv_histograms_and_weights_survive_a_resume() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("log.csv");
    let kept: Arc<Mutex<BTreeMap<u64, Weights>>> = Arc::default();
    let callbacks = || {
        let keeps = Keeps(kept.clone());
        vec![CsvLog::new(&table).boxed(), TensorBoard::new().boxed(), keeps.boxed()]
    };
    train(folder.path(), Some(9), callbacks());
    train(folder.path(), None, callbacks());
    let text = std::fs::read_to_string(&table).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "epoch,accuracy,loss,val_accuracy,val_loss");
    assert_eq!(lines.iter().map(|line| &line[..2]).collect::<Vec<_>>(), ["ep", "0,", "1,"]);
    let kept = kept.lock().unwrap();
    assert_eq!(kept.keys().collect::<Vec<_>>(), [&1]);
    let paths: Vec<_> = kept[&1].iter().map(|(path, values)| (path, values.len())).collect();
    assert_eq!(paths[0], ("hidden.weight", 320));
    assert_eq!(kept[&1].num_trained(), 320 + 16 + 32 + 80 + 5);
    let model = rows(folder.path()).into_iter().find(|(_, group, _)| group == "model").unwrap();
    assert_eq!((model.0, &model.2["num_parameters"]), (7, &json!(453.0)));
    let mut events = vec![];
    for file in std::fs::read_dir(folder.path().join("trial/tensorboard")).unwrap() {
        events.extend(std::fs::read(file.unwrap().path()).unwrap());
    }
    let find = |bytes: &[u8]| events.windows(bytes.len()).position(|part| part == bytes);
    let has = |text: &str| find(text.as_bytes()).is_some();
    assert!(has("hidden.weight") && has("norm.running_mean"), "no histograms");
    // Step 10, then the session log with the status START: events up to batch 9 remain valid.
    assert!(find(&[0x10, 10, 0x3a, 2, 8, 1]).is_some(), "no restart after batch 9");
}

#[test]
fn predict_calls_its_hooks() {
    struct Counts(Arc<Mutex<Vec<String>>>);
    impl Callback for Counts {
        fn on_predict_begin(&mut self) -> Result<()> {
            self.0.lock().unwrap().push("begin".into());
            Ok(())
        }

        fn on_predict_batch_begin(&mut self, batch: u64) -> Result<()> {
            self.0.lock().unwrap().push(format!("{batch}"));
            Ok(())
        }

        fn on_predict_batch_end(&mut self, batch: u64) -> Result<()> {
            if batch == 2 { Err("no more".into()) } else { Ok(()) }
        }
    }
    let _stream = lock_random_stream();
    let context = alone(None, 1).context().unwrap();
    let data = Data::arrays(samples()).unwrap();
    let calls: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut callbacks = vec![Counts(calls.clone()).boxed()];
    let model = Net::new(context.device());
    let forward = |model: &Net, (x, _): Pair| model.forward(x);
    let error = context.predict_with(&model, &data, 16, forward, &mut callbacks).unwrap_err();
    assert_eq!(error.to_string(), "callback Counts: no more");
    assert_eq!(*calls.lock().unwrap(), ["begin", "0", "1", "2"]);
}
