//! Starts a training: checks, initial state, and restore of the checkpoint.

use burn::module::Module;
use stoker_api::experiment::Unit;

use super::directives::StopState;
use super::exchange::MetricNames;
use super::fit::{Fit, Step};
use super::gradient_check::GradientCheck;
use super::late_metrics::LateMetrics;
use super::model_slot::ModelSlot;
use super::run::Run;
use super::state::RunState;
use super::timetable::Timetable;
use super::{CallbackError, call_hook, unique_names};
use crate::callback::Control;
use crate::collective::{Distributed, all_gather_cbor};
use crate::context::Context;
use crate::data::{Data, LoaderPlan};
use crate::optim::{AllReduceState, GradientSum, Optimizers};
use crate::{InvalidInput, Result, record};

impl<'a, M: Module + 'static, B: Send + 'static> Run<'a, M, B> {
    /// Checks what can be checked before the first batch, and restores the checkpoint.
    pub(super) fn start(
        context: &'a Context,
        model: M,
        optimizers: Optimizers,
        step: &'a dyn Step<M, B>,
        fit: Fit<B>,
    ) -> Result<Self> {
        begin_loop(context)?;
        let plan = context.loader_plan(fit.batch_size, true);
        fit.train.check(&plan)?;
        if fit.batch_size == 0 {
            return Err("batch_size is 0, but must be at least 1; change `Fit::batch_size`".into());
        }
        fit.validation.as_ref().map_or(Ok(()), |data| data.check_validation(&plan))?;
        let model = optimizers.initialize_weights(context, model);
        record::check_clones(&model)?;
        optimizers.check(&record::trained_paths(&model))?;
        let warning = batch_size_warning(context, &plan).filter(|_| !fit.train.has_own_batches());
        if let Some(text) = warning {
            print_warning(context, &text);
        }
        let mut run = Self::new(context, model, optimizers, step, fit, &plan)?;
        run.update_control();
        let ranks = context.distributed();
        call_hook(&mut run.callbacks, &mut run.control, ranks, |callback, control| {
            callback.on_train_begin(control)
        })?;
        run.start_workers_early();
        run.restore()?;
        run.start_workers();
        #[cfg(feature = "learner")]
        run.optimizers.set_model(&*run.model);
        if run.saved.is_some() {
            // The checkpoint already contains learning rates and kept weights.
            (run.control.scale, run.control.keeps_weights) = (None, false);
        }
        run.apply_control()?;
        run.control.stop = run.state.pending_stop.take();
        Ok(run)
    }

    /// Creates the state before the first batch. Fails if ranks have different data, or if the
    /// program's own length is 0.
    fn new(
        context: &'a Context,
        model: M,
        optimizers: Optimizers,
        step: &'a dyn Step<M, B>,
        fit: Fit<B>,
        plan: &LoaderPlan,
    ) -> Result<Self> {
        let config = &context.config;
        let Fit { train, validation, batch_size, epochs, initial_epoch, callbacks, continue_id } =
            fit;
        let timetable = Timetable::new(config, train.steps(plan), plan.global_batch as u64);
        let has_runner = context.io().has_runner();
        let own_epochs = epochs.filter(|_| !has_runner && config.units == 0);
        if own_epochs == Some(0) {
            return Err("epochs is 0, but must be at least 1; change `Fit::epochs`".into());
        }
        let granted_units = own_epochs.unwrap_or(config.units.max(1));
        let granted = timetable.batches(config.unit, granted_units);
        let aggregation = match config.aggregation_frequency {
            0 | 1 => optimizers.aggregation(),
            of_experiment => of_experiment,
        };
        let (samples, global_batch) = (train.samples(), train.global_batch(plan));
        let validated = validation.as_ref().map(Data::samples);
        check_same_data(context.distributed(), (samples, global_batch, validated))?;
        context.opened_sets.check(context.distributed())?;
        let ranks = context.distributed().collective();
        let late_metrics = LateMetrics::agree(&callbacks, ranks)?;
        let batches = if has_runner { 0 } else { timetable.epoch_start(initial_epoch) };
        let order = Some(train.read_order(config.seed));
        let state =
            RunState { batches, global_batch, samples, order, continue_id, ..RunState::default() };
        Ok(Self {
            context,
            model: ModelSlot::new(model),
            optimizers,
            step,
            train,
            early_loader: None,
            validation,
            batch_size,
            callbacks,
            control: Control::default(),
            timetable,
            state,
            gradients: GradientSum::default(),
            all_reduce: AllReduceState::default(),
            metric_names: MetricNames::default(),
            late_metrics,
            granted_units,
            granted,
            saved: None,
            best_weights: None,
            stop_state: StopState::default(),
            aggregation: u64::from(aggregation),
            gradient_check: GradientCheck::default(),
            is_first: true,
            rates: None,
            has_custom_loop: false,
            workload: None,
        })
    }
}

/// Fails if a callback requires validation data and there is none.
pub(super) fn check_validation_data<B>(fit: &Fit<B>) -> Result<()> {
    let position = fit.callbacks.iter().position(|callback| callback.needs_validation());
    match position.filter(|_| fit.validation.is_none()) {
        Some(index) => {
            let name = unique_names(&fit.callbacks).swap_remove(index);
            let source = "it requires validation data; add them with `Fit::validation`, or remove \
                          the callback"
                .into();
            Err(CallbackError { name, source }.into())
        }
        None => Ok(()),
    }
}

/// Prints a warning if a callback requires validations, but the runner requests them only at the
/// end of each length.
pub(super) fn warn_of_rare_validations<B>(context: &Context, fit: &Fit<B>) {
    if let Some(text) = validation_warning(context, fit) {
        print_warning(context, &text);
    }
}

fn print_warning(context: &Context, text: &str) {
    if context.distributed().rank() == 0 {
        eprintln!("stoker: {text}");
    }
}

fn validation_warning<B>(context: &Context, fit: &Fit<B>) -> Option<String> {
    let period = context.config.validation_period.and_then(|length| length.get());
    let has_period = period.is_some_and(|(_, units)| units > 0);
    if has_period || !context.io().has_runner() {
        return None;
    }
    let index = fit.callbacks.iter().position(|callback| callback.needs_validation())?;
    let name = unique_names(&fit.callbacks).swap_remove(index);
    Some(format!(
        "callback {name} receives validations only at the end of each length that the search \
         grants; set spec.minValidationPeriod"
    ))
}

/// Returns a warning if the batch size of a script contradicts the hyperparameter of the trial.
fn batch_size_warning(context: &Context, plan: &LoaderPlan) -> Option<String> {
    let size = context.hparam("global_batch_size").filter(|_| context.io().has_runner())?;
    let (ranks, trained) = (plan.world_size, plan.global_batch);
    let requested = size.as_u64().and_then(|size| usize::try_from(size).ok());
    let is_requested = requested.is_some_and(|size| size / ranks * ranks == trained);
    (!is_requested).then(|| {
        format!(
            "the hyperparameter global_batch_size is {size}, but the program trains batches of \
             {trained} over all ranks; set `Fit::batch_size(context.batch_size()?)`"
        )
    })
}

/// Marks this process as training. Fails in an inference job, with a length in the program's own
/// count, and after a training that saved or restored a checkpoint.
fn begin_loop(context: &Context) -> Result<()> {
    if context.config.inference.is_some() {
        let text = "this process belongs to an inference job, but its program trains; implement \
                    `Inference` and call `infer`";
        return Err(InvalidInput(text.into()).into());
    }
    if context.config.unit == Unit::Units {
        let units = context.config.units;
        let text = format!(
            "searcher.maxLength.units: {units}: `Trial`, `fit` and `training` count records, \
             batches and epochs; set searcher.maxLength.epochs, .batches or .records, or count \
             units in a custom loop by `Context::session`"
        );
        return Err(text.into());
    }
    let mut io = context.io();
    if io.has_loop && (io.last_saved().is_some() || io.restored.is_some()) {
        let text = "this process has already trained and saved checkpoints: a second training \
                    could not be resumed; use a separate trial or program, or save no checkpoints";
        return Err(text.into());
    }
    io.has_loop = true;
    Ok(())
}

/// Fails if ranks read data of different sizes. Compares only the number of samples and the batch
/// size.
pub(super) fn check_same_data(
    ranks: &Distributed,
    local: (usize, usize, Option<usize>),
) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let all = all_gather_cbor(ranks.collective(), "data", local)?;
    let Some(rank) = all.iter().position(|sizes| *sizes != all[0]) else { return Ok(()) };
    let describe = |(samples, global, validated): (usize, usize, Option<usize>)| {
        let validated = validated.map_or("no".to_owned(), |samples| samples.to_string());
        format!(
            "{samples} training samples in global batches of {global} and {validated} validation \
             samples"
        )
    };
    let (other, lead) = (describe(all[rank]), describe(all[0]));
    Err(format!(
        "rank {rank} has {other}, but rank 0 has {lead}; read the same data in the same order on \
         every rank, for example by sorting file names"
    )
    .into())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};
    use serde_json::json;
    use stoker_api::contract::ExitCode;
    use stoker_api::experiment::Length;

    use super::*;
    use crate::callback::Callback;
    use crate::error::exit_code;
    use crate::reporter::tests::TestReportServer;
    use crate::train::program;
    use crate::train::tests::config_under_runner;
    use crate::{EarlyStopping, Standalone};

    /// Returns the context of a trial with a runner and changes of its configuration.
    fn under_runner(changes: &serde_json::Value) -> Context {
        let folder = tempfile::tempdir().unwrap();
        let server = TestReportServer::scripted(vec![]);
        let config = config_under_runner(&server, "val_loss", folder.path());
        let mut config = serde_json::to_value(config).unwrap();
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        program::context(serde_json::from_value(config).unwrap(), None).unwrap()
    }

    #[test]
    fn contradicting_batch_size_of_script_is_reported() {
        let check = |context: &Context, batch_size: usize, expected: Option<&str>| {
            let mut plan = context.loader_plan(batch_size, true);
            // As with two ranks.
            (plan.world_size, plan.global_batch) = (2, 2 * batch_size);
            let warning = batch_size_warning(context, &plan);
            match expected {
                Some(words) => assert!(warning.as_ref().unwrap().contains(words), "{warning:?}"),
                None => assert_eq!(warning, None),
            }
        };
        let searched = json!({"hyperparameters": {"global_batch_size": 65}});
        let context = under_runner(&searched);
        check(&context, 32, None);
        let words = "global_batch_size is 65, but the program trains batches of 128 over";
        check(&context, 64, Some(words));
        check(&under_runner(&json!({})), 64, None);
        let hyperparameters = searched["hyperparameters"].clone();
        let standalone = Standalone { hyperparameters, quiet: true, ..Standalone::default() };
        check(&standalone.context().unwrap(), 64, None);
    }

    #[test]
    fn callbacks_without_validation_period_are_reported() {
        let data = || Data::arrays(Tensor::<1>::zeros([4], &Device::flex())).unwrap();
        let fit = || Fit::new(data()).callbacks(vec![EarlyStopping::new("val_loss").boxed()]);
        let warning = validation_warning(&under_runner(&json!({})), &fit()).unwrap();
        assert!(warning.starts_with("callback EarlyStopping receives validations"), "{warning}");
        assert!(warning.ends_with("; set spec.minValidationPeriod"), "{warning}");
        let period = json!({"validationPeriod": {"batches": 5}});
        assert_eq!(validation_warning(&under_runner(&period), &fit()), None);
        assert_eq!(validation_warning(&under_runner(&json!({})), &Fit::new(data())), None);
        let standalone = Standalone { quiet: true, ..Standalone::default() };
        assert_eq!(validation_warning(&standalone.context().unwrap(), &fit()), None);
    }

    #[test]
    fn training_loops_refuse_units() {
        let length = Some(Length::new(Unit::Units, 9));
        let standalone = Standalone { length, quiet: true, ..Standalone::default() };
        let error = begin_loop(&standalone.context().unwrap()).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("searcher.maxLength.units: 9: `Trial`, `fit` and"), "{text}");
        assert!(text.contains("set searcher.maxLength.epochs"), "{text}");
        assert_eq!(exit_code(&*error), ExitCode::UserError);
    }
}
