//! Order of hooks in settings that change it: validation periods, checkpoint policies, custom
//! loops, several ranks, and a runner that extends the length. Each is tested uninterrupted and
//! stopped after each batch.

use stoker_api::contract::{
    CheckpointRef, Directive, Report, ReportEndpoint, ReportEvent, TrialConfig,
};
use stoker_api::experiment::CheckpointPolicy;

use super::callbacks::{Falling, Falls, counted, falling_optimizers};
use super::data_kinds::of_ranks_with_config;
use super::hooks::{Calls, Notes, check_legal_with, name, of_training};
use super::*;
use crate::reporter::tests::TestReportServer;
use crate::train::custom_loop::NextAction;

/// Two epochs of three batches, and one batch more.
const BATCHES: u64 = 7;

/// First length granted by the runner: in the middle of an epoch.
const FIRST_LENGTH: u64 = 4;

/// A setting that changes the order of hooks.
struct Setting {
    name: &'static str,
    size: usize,
    configure: fn(&mut TrialConfig),
    validates: bool,
    has_custom_loop: bool,
    is_prolonged: bool,
    stops_after: u64,
    /// Pairs of consecutive hooks that occur only in this setting.
    more: &'static [(&'static str, &'static str)],
    /// All calls of an uninterrupted run, as formatted by [`summary`].
    expected: &'static str,
}

/// Rows every two batches; a validation and a checkpoint after each epoch.
const PLAIN: Setting = Setting {
    name: "plain",
    size: 1,
    configure: |_| (),
    validates: true,
    has_custom_loop: false,
    is_prolonged: false,
    stops_after: u64::MAX,
    more: &[],
    expected: "train_begin epoch_begin 0 (2: 1 2) (1: 3) validated 3 epoch_end 0 saved 3 \
               epoch_begin 1 (1: 4) (2: 5 6) validated 3 epoch_end 1 saved 6 \
               epoch_begin 2 (1: 7) validated 3 saved 7 train_end",
};

/// If validations set the pace, an epoch may end and begin within a workload.
const WITHIN: &[(&str, &str)] = &[("batch_end", "epoch_end"), ("epoch_begin", "batch_begin")];

const SETTINGS: [Setting; 11] = [
    PLAIN,
    Setting {
        name: "a validation before the first batch",
        configure: |config| config.perform_initial_validation = true,
        more: &[("train_begin", "validation_begin")],
        expected: "train_begin validated 3 epoch_begin 0 (2: 1 2) (1: 3) validated 3 epoch_end 0 \
                   saved 3 epoch_begin 1 (1: 4) (2: 5 6) validated 3 epoch_end 1 saved 6 \
                   epoch_begin 2 (1: 7) validated 3 saved 7 train_end",
        ..PLAIN
    },
    Setting {
        name: "no validation data",
        validates: false,
        expected: "train_begin epoch_begin 0 (2: 1 2) (1: 3) epoch_end 0 saved 3 \
                   epoch_begin 1 (1: 4) (2: 5 6) epoch_end 1 saved 6 \
                   epoch_begin 2 (1: 7) saved 7 train_end",
        ..PLAIN
    },
    Setting {
        name: "no validation data, with an initial validation",
        validates: false,
        configure: |config| config.perform_initial_validation = true,
        expected: "train_begin epoch_begin 0 (2: 1 2) (1: 3) epoch_end 0 saved 3 \
                   epoch_begin 1 (1: 4) (2: 5 6) epoch_end 1 saved 6 \
                   epoch_begin 2 (1: 7) saved 7 train_end",
        ..PLAIN
    },
    Setting {
        name: "validations in the middle of epochs",
        configure: |config| config.validation_period = Some(Length::new(Unit::Batches, 2)),
        expected: "train_begin epoch_begin 0 (2: 1 2) validated 3 (1: 3) epoch_end 0 saved 3 \
                   epoch_begin 1 (1: 4) validated 3 (2: 5 6) validated 3 epoch_end 1 saved 6 \
                   epoch_begin 2 (1: 7) validated 3 saved 7 train_end",
        ..PLAIN
    },
    Setting {
        name: "every validation is saved",
        configure: |config| saves_by(config, CheckpointPolicy::All),
        more: WITHIN,
        expected: "train_begin epoch_begin 0 (2: 1 2) validated 3 saved 2 \
                   (2: 3 epoch_end 0 epoch_begin 1 4) validated 3 saved 4 \
                   (2: 5 6) validated 3 epoch_end 1 saved 6 \
                   epoch_begin 2 (1: 7) validated 3 saved 7 train_end",
        ..PLAIN
    },
    Setting {
        name: "only the best validation is saved, here the second",
        configure: |config| saves_by(config, CheckpointPolicy::Best),
        more: WITHIN,
        expected: "train_begin epoch_begin 0 (2: 1 2) validated 3 saved 2 \
                   (2: 3 epoch_end 0 epoch_begin 1 4) validated 3 saved 4 \
                   (2: 5 6) validated 3 epoch_end 1 \
                   epoch_begin 2 (1: 7) validated 3 saved 7 train_end",
        ..PLAIN
    },
    Setting {
        name: "a custom loop",
        has_custom_loop: true,
        more: &[("validation_begin", "validation_end")],
        expected: "train_begin epoch_begin 0 (2: 1 2) (1: 3) validated 0 epoch_end 0 saved 3 \
                   epoch_begin 1 (1: 4) (2: 5 6) validated 0 epoch_end 1 saved 6 \
                   epoch_begin 2 (1: 7) validated 0 saved 7 train_end",
        ..PLAIN
    },
    Setting { name: "two ranks", size: 2, ..PLAIN },
    Setting {
        name: "a runner that extends the length",
        is_prolonged: true,
        expected: "train_begin epoch_begin 0 (2: 1 2) (1: 3) validated 3 epoch_end 0 saved 3 \
                   epoch_begin 1 (1: 4) validated 3 saved 4 (2: 5 6) validated 3 epoch_end 1 \
                   saved 6 epoch_begin 2 (1: 7) validated 3 saved 7 train_end",
        ..PLAIN
    },
    Setting {
        name: "a callback that stops within a workload",
        stops_after: 5,
        expected: "train_begin epoch_begin 0 (2: 1 2) (1: 3) validated 3 epoch_end 0 saved 3 \
                   epoch_begin 1 (1: 4) (2: 5) validated 3 saved 5 train_end",
        ..PLAIN
    },
];

/// Validates every two batches, and saves only by the policy.
fn saves_by(config: &mut TrialConfig, policy: CheckpointPolicy) {
    config.validation_period = Some(Length::new(Unit::Batches, 2));
    config.checkpoint_period = None;
    config.checkpoint_policy = policy;
}

/// Summarizes calls: workloads in parentheses with the requested number of batches, batches by
/// number, and validations with their number of batches.
fn summary(calls: &[String]) -> String {
    let mut words: Vec<String> = vec![];
    let mut num_validated = 0;
    for call in calls {
        let number = |index| call.split(' ').nth(index).unwrap_or_default();
        match name(call) {
            "workload_begin" => words.push(format!("({}:", number(1))),
            "workload_end" => *words.last_mut().unwrap() += ")",
            "batch_end" => words.push(number(1).into()),
            "checkpoint" => words.push(format!("saved {}", number(1))),
            "validation_begin" => num_validated = 0,
            "validation_batch_end" => num_validated += 1,
            "validation_end" => words.push(format!("validated {num_validated}")),
            "batch_begin" | "validation_batch_begin" => {}
            _ => words.push(call.clone()),
        }
    }
    words.join(" ")
}

/// Stops training after a batch.
struct Stops(u64);

impl Callback for Stops {
    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            control.stop_training("enough");
        }
        Ok(())
    }
}

/// Returns a rank's calls, until the end or until a stop after a batch.
fn calls_of(context: &Context, setting: &Setting, preempt_at: Option<u64>) -> Vec<String> {
    let (calls, ranks) = (Calls::default(), context.distributed());
    let preempt_at = preempt_at.filter(|_| ranks.rank() + 1 == ranks.size());
    let preempt_at = preempt_at.map(|batch| (batch, context.stop.clone()));
    let notes = Notes { calls: calls.clone(), preempt_at };
    let fit = Fit::new(counted())
        .batch_size(4 / ranks.size())
        .callbacks(vec![Stops(setting.stops_after).boxed(), notes.boxed()]);
    let falls = Falls { ground: 2.5, heights: Mutex::default() };
    let model = Falling::new(context.device());
    let ended = if setting.has_custom_loop {
        custom_loop(context, model, &falls, fit)
    } else {
        let validation = setting.validates.then(counted);
        let fit = Fit { validation, ..fit };
        context.fit_with(model, falling_optimizers(), falls, fit).map(drop)
    };
    if let Err(error) = ended {
        assert_eq!(exit_code(&*error), ExitCode::Preempted, "{}: {error}", setting.name);
    }
    calls.lock().unwrap().clone()
}

fn custom_loop(context: &Context, model: Falling, falls: &Falls, fit: Fit<usize>) -> Result<()> {
    let mut training = context.training(model, falling_optimizers(), fit)?;
    while let Some(action) = training.next()? {
        match action {
            NextAction::Train(samples) => {
                let output = samples.map(|samples| Falls::learned(&training.model(), samples));
                training.learn(output)?;
            }
            NextAction::Validate => {
                let step = |model: &Falling, samples| falls.validated(model, samples);
                let metrics = context.evaluate(&*training.model(), step, &counted(), 4)?;
                training.validated(&metrics)?;
            }
        }
    }
    training.finish().map(drop)
}

/// Grants four batches, then seven, then stops the trial.
fn prolongs(report: &Report) -> Directive {
    match report.event {
        ReportEvent::Validated { granted_units: Some(BATCHES), .. } => Directive::Stop,
        ReportEvent::Validated { granted_units: Some(FIRST_LENGTH), .. } => {
            Directive::Continue { units: BATCHES }
        }
        _ if report.batches > FIRST_LENGTH => Directive::Continue { units: BATCHES },
        _ => Directive::Continue { units: FIRST_LENGTH },
    }
}

/// Creates the next attempt in `folder` under a runner that has recorded the granted length.
fn under_runner(folder: &Path, door: &TestReportServer) -> Context {
    let token = folder.join("token");
    std::fs::write(&token, "one").unwrap();
    let TrialConfig { attempt, resume_from, .. } = alone(Some(folder), 1).context().unwrap().config;
    let batch = |checkpoint: &CheckpointRef| checkpoint.name[..12].parse::<u64>().unwrap();
    let latest = resume_from.first();
    let is_prolonged = latest.is_some_and(|checkpoint| batch(checkpoint) > FIRST_LENGTH);
    let config = alone(Some(folder), if is_prolonged { BATCHES } else { FIRST_LENGTH }).config();
    let config = TrialConfig {
        attempt,
        resume_from,
        scheduling_unit: 2,
        report_endpoint: ReportEndpoint {
            url: format!("http://{}/", door.address),
            token_file: token.to_string_lossy().into_owned(),
            ca: None,
        },
        ..config.unwrap()
    };
    let context = program::context(config, None).unwrap();
    context.silence();
    context
}

/// Returns the calls of each rank.
fn run(folder: &Path, setting: &Setting, preempt_at: Option<u64>) -> Vec<Vec<String>> {
    if setting.is_prolonged {
        let door = TestReportServer::with_directives(prolongs);
        return vec![calls_of(&under_runner(folder, &door), setting, preempt_at)];
    }
    let configure = |config: &mut TrialConfig| {
        config.scheduling_unit = 2;
        (setting.configure)(config);
    };
    of_ranks_with_config(folder, setting.size, BATCHES, configure, |context| {
        calls_of(context, setting, preempt_at)
    })
}

#[test]
fn hook_order_holds_in_every_setting() {
    let _stream = lock_random_stream();
    for setting in SETTINGS {
        let folder = brief_folder();
        let straight = run(folder.path(), &setting, None);
        for calls in &straight {
            assert_eq!(summary(calls), setting.expected, "{}", setting.name);
            check_legal_with(calls, setting.more);
        }
        let training =
            |calls: &[String]| -> Vec<_> { calls.iter().filter(of_training).cloned().collect() };
        for batch in 1..BATCHES.min(setting.stops_after) {
            let what = format!("{}, stopped after {batch}", setting.name);
            let folder = brief_folder();
            let left = run(folder.path(), &setting, Some(batch));
            let rest = run(folder.path(), &setting, None);
            for (mut calls, rest) in left.into_iter().zip(rest) {
                check_legal_with(&calls, setting.more);
                check_legal_with(&rest, setting.more);
                let num_trained = |calls: &[String]| {
                    calls.iter().filter(|call| name(call) == "batch_end").count()
                };
                let last = num_trained(&training(&calls));
                // A gang receives a signal when it saves, or with the next batch's gradients.
                let is_late = (last as u64).checked_sub(batch).unwrap();
                assert!(is_late <= u64::from(setting.size > 1), "{what}: {calls:#?}");
                assert_eq!(rest[1..3], ["load_state".into(), format!("restore {last}")], "{what}");
                calls.extend(rest);
                assert_eq!(training(&calls), training(&straight[0]), "{what}");
            }
        }
    }
}

#[test]
fn resumed_process_finishes_the_workload() {
    let _stream = lock_random_stream();
    let check = |batch, left: &str, rest: &str| {
        let folder = brief_folder();
        let run = |preempt_at| summary(&run(folder.path(), &PLAIN, preempt_at)[0]);
        let (first, second) = (run(Some(batch)), run(None));
        assert!(first.ends_with(left), "stopped after {batch}: {first}");
        assert!(second.starts_with(rest), "resumed after {batch}: {second}");
    };
    check(2, "epoch_begin 0 (2: 1 2) saved 2 train_end", "train_begin load_state restore 2 (1: 3)");
    let validates =
        "train_begin load_state restore 3 validated 3 epoch_end 0 saved 3 epoch_begin 1";
    check(3, "(1: 3) saved 3 train_end", validates);
    check(5, "(1: 4) (2: 5 saved 5) train_end", "train_begin load_state restore 5 (1: 6) valid");
}
