//! Settings of trainings, trials and contexts, and the errors for invalid ones.

use super::*;
use crate::{Schedule, TensorBoard};

#[test]
fn invalid_settings_fail_before_the_first_batch() {
    let _stream = lock_random_stream();
    let check = |batch_size, optimizers, expected: &str| {
        assert_eq!(refused(batch_size, optimizers, vec![]), expected);
    };
    let adam = || Optimizers::one(AdamConfig::new().init(), 0.1);
    check(
        101,
        adam(),
        "invalid hyperparameters: global_batch_size is 101, but must be between 1 and 100, the \
         number of training samples",
    );
    check(
        10,
        adam().group("^outptu", SgdConfig::new().build(), 0.1).unwrap(),
        "optimizer group \"^outptu\" matches none of the parameters hidden.weight, hidden.bias, \
         norm.gamma, norm.beta, output.weight, output.bias",
    );
    check(10, adam().clip_norm(-1.0), "clip_norm is -1; it must be more than 0");
    check(10, adam().clip_norm(f64::NAN), "clip_norm is NaN; it must be more than 0");
    let plateau = ReduceOnPlateau::new("val_loss").factor(10.0).boxed();
    assert_eq!(
        refused(10, adam(), vec![plateau]),
        "callback ReduceOnPlateau: factor is 10; it must be more than 0 and less than 1"
    );
    assert_eq!(
        refused(10, adam(), vec![CsvLog::new("a/run 1.csv").boxed()]),
        "callback CsvLog: invalid checkpoint file name \"run 1.csv\": use only letters, digits, \
         `.`, `_` and `-`"
    );
}

#[test]
fn callbacks_that_need_validation_data_name_it() {
    let _stream = lock_random_stream();
    let check = |callback: Box<dyn Callback>, name: &str| {
        let context = alone(None, 1).context().unwrap();
        let callbacks = vec![TensorBoard::new().boxed(), callback];
        let fit = Fit::new(Data::arrays(samples()).unwrap()).callbacks(callbacks);
        let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        let trained = context.fit(Net::new(context.device()), optimizers(), step, fit);
        let expected = format!(
            "callback {name}: it requires validation data; add them with `Fit::validation`, or \
             remove the callback"
        );
        assert_eq!(trained.unwrap_err().to_string(), expected);
    };
    check(EarlyStopping::new("val_loss").boxed(), "EarlyStopping");
    check(ReduceOnPlateau::new("val_loss").boxed(), "ReduceOnPlateau");
}

/// The panic of burn's operators does not name the layer.
#[test]
fn unfused_batch_norm_is_named_in_bf16() {
    use stoker_api::experiment::MixedPrecision;

    let _stream = lock_random_stream();
    let mut context = alone(None, 2).context().unwrap();
    context.config.mixed_precision = MixedPrecision::Bf16;
    let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(10);
    let step = |model: &Net, (x, y): Pair| {
        let x = model.norm.forward(model.hidden.forward(x));
        StepOutput::classification(model.output.forward(x), y)
    };
    let trained = context.fit(Net::new(context.device()), optimizers(), step, fit);
    let error = trained.unwrap_err().to_string();
    let expected = "call `BatchNormExt::forward_fused` instead of `BatchNorm::forward`; see docs";
    assert!(error.contains(expected), "{error}");
}

/// burn would drop the state of the checkpoint without an error.
#[test]
fn resume_with_other_optimizers_is_refused() {
    use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
    use burn::lr_scheduler::noam::NoamLrSchedulerConfig;
    use burn::optim::momentum::MomentumConfig;

    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let train = |units, optimizers| {
        let context = alone(Some(folder.path()), units).context().unwrap();
        let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(10);
        let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        context.fit(Net::new(context.device()), optimizers, step, fit)
    };
    let schedule = |is_linear| -> Schedule {
        match is_linear {
            true => LinearLrSchedulerConfig::new(0.1, 0.05, 9).init().unwrap().into(),
            false => NoamLrSchedulerConfig::new(0.1).init().unwrap().into(),
        }
    };
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let with = |is_linear, group: &str| {
        let all = Optimizers::one(momentum().init(), schedule(is_linear));
        all.group(group, AdamConfig::new().build(), 0.1).unwrap()
    };
    train(2, with(true, "^output")).unwrap();
    let check = |optimizers, expected: &str| {
        let error = train(4, optimizers).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.ends_with("`Fit::continue_id` to take only its weights"), "{error}");
    };
    let adam = Optimizers::one(AdamConfig::new().init(), schedule(true));
    let adam = adam.group("^output", AdamConfig::new().build(), 0.1).unwrap();
    check(adam, "it has the state of another optimizer (hidden.weight: momentum.velocity); use");
    check(with(true, "^norm"), "it has the optimizer groups [\"^output\"], not [\"^norm\"]; use");
    check(with(false, "^output"), "the state of another learning rate scheduler (schedule-0.bpk);");
    train(4, with(true, "^output")).unwrap();
}

/// The number of epochs is ignored if the length is set elsewhere.
#[test]
fn zero_epochs_are_refused() {
    let _stream = lock_random_stream();
    let train = |length| {
        let context = Standalone { length, ..alone(None, 1) }.context().unwrap();
        let fit = Fit::new(Data::arrays(samples()).unwrap()).batch_size(50).epochs(0);
        let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
        let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit);
        fitted.map(|_| context.io().batches()).map_err(|error| error.to_string())
    };
    let error = "epochs is 0, but must be at least 1; change `Fit::epochs`".to_owned();
    assert_eq!(train(None), Err(error));
    assert_eq!(train(Some(Length::new(Unit::Batches, 1))), Ok(1));
}

#[test]
fn hyperparameter_errors_name_the_field() {
    // Creating a context seeds the stream.
    let _stream = lock_random_stream();
    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only serde accesses it")]
    struct Hparams {
        optimizer: Inner,
    }
    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only serde accesses it")]
    struct Inner {
        learning_rate: f64,
    }
    let check = |hyperparameters: Value, expected: &str| {
        let context = Standalone { hyperparameters, ..Standalone::default() }.context().unwrap();
        let error = context.hparams::<Hparams>().unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters);
        assert_eq!(error.to_string(), format!("invalid hyperparameters: {expected}"));
    };
    check(
        json!({"optimizer": {"learning_rate": "x"}}),
        "optimizer.learning_rate: invalid type: string \"x\", expected f64",
    );
    check(json!({}), "missing field `optimizer`");
}

#[test]
fn trial_requires_global_batch_size() {
    let _stream = lock_random_stream();
    let trial = |hyperparameters| {
        let standalone = Standalone { hyperparameters, ..alone(None, 2) };
        let context = standalone.context().unwrap();
        let fitted = run_trial::<Tiny>(&context).map_err(|error| error.to_string())?;
        Ok::<_, String>(fitted.history.len())
    };
    assert_eq!(trial(json!({"global_batch_size": 50})), Ok(1));
    let check = |hyperparameters, expected: &str| {
        assert_eq!(trial(hyperparameters), Err(format!("invalid hyperparameters: {expected}")));
    };
    check(
        json!({}),
        "global_batch_size is missing: set this hyperparameter to the number of samples of one \
         batch over all ranks",
    );
    check(
        json!({"global_batch_size": 0}),
        "global_batch_size is 0, but must be an integer of at least 1",
    );
}

#[test]
fn context_returns_hyperparameters_and_experiment_config() {
    let _stream = lock_random_stream();
    let hyperparameters = json!({"global_batch_size": 50, "net": {"width": 8, "name": "a"}});
    let mut context = Standalone { hyperparameters, ..alone(None, 1) }.context().unwrap();
    context.config.spec = json!({"searcher": {"metric": "validation_loss"}});
    assert_eq!(context.hparam_as::<usize>("net.width").unwrap(), 8);
    let refused = |hparam: Result<usize>| {
        let error = hparam.unwrap_err();
        assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters);
        error.to_string()
    };
    let error = refused(context.hparam_as("net.depth"));
    assert_eq!(error, "invalid hyperparameters: net.depth is missing");
    let error = refused(context.hparam_as("net.name"));
    assert!(error.starts_with("invalid hyperparameters: net.name: invalid type"), "{error}");
    assert_eq!((context.batch_size().unwrap(), context.global_batch_size().unwrap()), (50, 50));
    assert_eq!(context.experiment_config()["searcher"]["metric"], "validation_loss");
}

#[test]
fn batch_size_per_rank_rounds_down() {
    let _stream = lock_random_stream();
    let ranks = crate::ThreadRank::group(3);
    let sizes: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let hyperparameters = json!({"global_batch_size": 50});
            let alone = Standalone { hyperparameters, ..alone(None, 1) }.context().unwrap();
            let Context { config, io, stop, .. } = alone;
            let io = Arc::into_inner(io).unwrap().into_inner().unwrap();
            let ranks = crate::Distributed::from_collective(Box::new(rank));
            let context = Context::new(config, io, stop, Device::flex().autodiff(), ranks);
            (context.batch_size().unwrap(), context.global_batch_size().unwrap())
        })
        .collect();
    assert_eq!(sizes, [(16, 48); 3]);
}
