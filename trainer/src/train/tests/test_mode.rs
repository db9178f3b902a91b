//! Test mode names the stage that fails.

use burn::module::{ModuleMapper, Param};

use super::*;

/// A trial with one stage that fails or panics.
struct Broken(String);

impl Broken {
    fn at(&self, part: &str) -> Result<()> {
        match self.0.split_once(' ') {
            Some(("panic", stage)) if stage == part => panic!("expected"),
            Some((_, stage)) if stage == part => Err("expected".into()),
            _ => Ok(()),
        }
    }
}

impl Trial for Broken {
    type Model = Net;
    type Batch = Pair;

    fn new(context: &Context) -> Result<Self> {
        let trial = Self(context.hparam_as("fails")?);
        trial.at("creating the trial")?;
        Ok(trial)
    }

    fn build_model(&self, device: &Device) -> Result<Net> {
        self.at("build_model")?;
        Ok(Net::new(device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        self.at("build_optimizers")?;
        Ok(optimizers())
    }

    fn build_training_data(&self) -> Result<Data<Pair>> {
        self.at("build_training_data")?;
        Data::arrays(samples())
    }

    fn build_validation_data(&self) -> Result<Data<Pair>> {
        self.at("build_validation_data")?;
        Data::arrays(samples())
    }

    fn step(&self, model: &Net, (x, y): Pair) -> StepOutput {
        self.at("the first batch").unwrap();
        StepOutput::classification(model.forward(x), y)
    }

    fn validation_step(&self, model: &Net, (x, y): Pair) -> StepOutput {
        self.at("validation").unwrap();
        StepOutput::classification(model.forward(x), y)
    }

    fn callbacks(&self) -> Vec<Box<dyn Callback>> {
        vec![Keeps(self.0.clone()).boxed()]
    }
}

/// Fails when saving or restoring its state.
struct Keeps(String);

impl Callback for Keeps {
    fn state(&self) -> Result<Value> {
        Broken(self.0.clone()).at("the checkpoint").map(|()| json!(1))
    }

    fn load_state(&mut self, _: Value) -> Result<()> {
        Broken(self.0.clone()).at("the restore")
    }
}

#[test]
fn test_mode_names_the_failing_stage() {
    let _stream = lock_random_stream();
    let tried = |fails: &str| {
        let folder = tempfile::tempdir().unwrap();
        let hyperparameters = json!({"global_batch_size": 50, "fails": fails});
        let alone = Standalone { hyperparameters, ..alone(Some(folder.path()), 1) };
        let mut context = alone.context().unwrap();
        context.is_test = true;
        run_trial::<Broken>(&context).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(tried("none"), Ok(()));
    for part in [
        "creating the trial",
        "build_model",
        "build_optimizers",
        "build_training_data",
        "build_validation_data",
        "the first batch",
        "validation",
        "the checkpoint",
        "the restore",
    ] {
        for how in ["panic", "error"] {
            let error = tried(&format!("{how} {part}")).unwrap_err();
            assert!(error.starts_with(&format!("test: {part} failed: ")), "{error}");
            assert!(error.contains("expected"), "{error}");
        }
    }
}

#[test]
fn test_mode_detects_a_changed_model() {
    /// Adds one to all parameters.
    struct AddsOne;
    impl ModuleMapper for AddsOne {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor + 1.0)
        }
    }
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let mut context = alone(Some(folder.path()), 1).context().unwrap();
    context.is_test = true;
    let data = Data::arrays(samples()).unwrap();
    let step = FnStep(|model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y));
    let fit = Fit::new(data).batch_size(50);
    let model = Net::new(context.device());
    let mut run = Run::start(&context, model, optimizers(), &step, fit).unwrap();
    run.save().unwrap();
    run.io().report_saved(true).unwrap();
    run.test_restore().unwrap();
    run.model.replace(|model| Ok(model.map(&mut AddsOne))).unwrap();
    let error = run.test_restore().unwrap_err().to_string();
    assert!(error.contains("restored a different model than was saved"), "{error}");
}
