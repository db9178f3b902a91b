//! Stops of trainings that cannot store the checkpoint.

use std::path::PathBuf;

use stoker_api::contract::Directive;

use super::data_kinds::Tiny;
use super::early_ends::config_under_runner;
use super::*;
use crate::reporter::tests::TestReportServer;
use crate::trial_io::TrialIo;
use crate::{CheckpointFiles, Distributed, Error, ThreadRank};

/// Trains one rank until it is stopped. With `is_signal`, a signal stops it after a batch.
fn rank(context: &Context, is_signal: bool) -> Result<()> {
    let stop_at = if is_signal { 3 } else { u64::MAX };
    let data = || Data::arrays(samples());
    let fit = Fit::new(data()?)
        .validation(data()?)
        .batch_size(10)
        .callbacks(vec![StopAt(stop_at, context.stop.clone()).boxed()]);
    let step = |model: &Tiny, (x, y): Pair| StepOutput::classification(model.output.forward(x), y);
    let adam = Optimizers::one(AdamConfig::new().init(), 0.01);
    context.fit(Tiny::new(context.device()), adam, step, fit).map(drop)
}

/// Returns the errors of two ranks that are stopped by a signal or by this directive.
fn errors_without_checkpoint(is_signal: bool, directive: Directive) -> Vec<Error> {
    let folder = brief_folder();
    let trial = folder.path().join("trial");
    std::fs::create_dir(&trial).unwrap();
    // The kernel refuses new directories there.
    std::os::unix::fs::symlink("/sys", trial.join("checkpoints")).unwrap();
    let server = TestReportServer::with_directives(move |_| directive);
    let context = |rank: ThreadRank| {
        let mut config = config_under_runner(&server, "val_loss", folder.path());
        (config.units, config.scheduling_unit) = (1_000_000, 1);
        let ranks = Distributed::from_collective(Box::new(rank));
        let io = TrialIo::open(&mut config, None, ranks.rank() == 0).unwrap();
        let stop = StopSignal::default();
        let context = Context::new(config, io, stop, Device::flex().autodiff(), ranks);
        context.silence();
        context
    };
    let contexts: Vec<Context> = ThreadRank::group(2).into_iter().map(context).collect();
    std::thread::scope(|scope| {
        let start = |context| scope.spawn(move || rank(&context, is_signal));
        let ranks: Vec<_> = contexts.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap_err()).collect()
    })
}

#[test]
fn other_ranks_wait_until_rank_0_has_stored() {
    let _stream = lock_random_stream();
    for directive in [Directive::Preempt, Directive::Stop] {
        let errors = errors_without_checkpoint(false, directive);
        let codes: Vec<_> = errors.iter().map(|error| exit_code(&**error)).collect();
        assert_eq!(codes, [ExitCode::Infrastructure, ExitCode::PeerFailed], "{errors:?}");
        let text = errors[1].to_string();
        assert!(text.starts_with("rank 0: checkpoint "), "{text}");
    }
}

#[test]
fn other_ranks_do_not_wait_after_a_signal() {
    let _stream = lock_random_stream();
    let errors = errors_without_checkpoint(true, Directive::Continue { units: 1_000_000 });
    let codes: Vec<_> = errors.iter().map(|error| exit_code(&**error)).collect();
    assert_eq!(codes, [ExitCode::Infrastructure, ExitCode::Preempted], "{errors:?}");
}

/// Removes a file at the second save.
struct RemovesFile(PathBuf, u32);

impl Callback for RemovesFile {
    fn on_checkpoint(&mut self, _: &mut CheckpointFiles, _: &mut Control) -> Result<()> {
        self.1 += 1;
        if self.1 == 2 {
            std::fs::remove_file(&self.0)?;
        }
        Ok(())
    }
}

/// The save of the latest state is in progress when the stop arrives.
#[test]
fn stop_repeats_a_failed_save_of_its_batch() {
    let _stream = lock_random_stream();
    let folder = brief_folder();
    let checkpoints = folder.path().join("trial/checkpoints");
    std::fs::create_dir(folder.path().join("trial")).unwrap();
    std::fs::write(&checkpoints, "not a directory").unwrap();
    let checkpoint_period = Some(Length::new(Unit::Batches, 7));
    let context = Standalone { checkpoint_period, ..alone(Some(folder.path()), 20) };
    let context = context.context().unwrap();
    let stop = StopAt(7, context.stop.clone()).boxed();
    let callbacks = vec![stop, RemovesFile(checkpoints.clone(), 0).boxed()];
    let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(10).callbacks(callbacks);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let error = context.fit(Net::new(context.device()), optimizers(), step, fit).unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
    assert!(checkpoints.join("000000000007-0/manifest.json").exists());
}
