//! Iris species by four sizes: 120 flowers for training and 30 for validation.

pub(crate) mod predict;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Tanh};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::Deserialize;
use stoker_trainer::datasets::csv::{Options, Table};
use stoker_trainer::{
    Callback, Context, Data, InvalidHyperparameters, Optimizers, Permutation, Result, StepOutput,
    TensorBoard, Trial,
};

use crate::data_config::DataConfig;

/// Sizes `[samples, 4]` and species `[samples]`.
type Batch = (Tensor<2>, Tensor<1, Int>);

/// Number of sizes of a flower.
const FEATURES: usize = 4;
/// Number of species.
const CLASSES: usize = 3;
/// Number of flowers for training; the others are for validation.
const TRAINING: usize = 120;
/// Seed of the split. It differs from the trial's seed so that all trials use the same split.
const SPLIT_SEED: u64 = 1;

/// Hyperparameters. The library reads `global_batch_size`.
#[derive(Debug, Deserialize)]
struct Hparams {
    learning_rate: f64,
    hidden: usize,
}

/// The trial.
#[derive(Debug)]
pub(crate) struct Iris {
    hparams: Hparams,
    table: Table,
}

impl Trial for Iris {
    type Model = Mlp;
    type Batch = Batch;

    fn new(context: &Context) -> Result<Self> {
        let hparams: Hparams = context.hparams()?;
        if hparams.hidden == 0 {
            return Err(InvalidHyperparameters("hidden is 0, but must be at least 1".into()).into());
        }
        let path = DataConfig::new(context, "iris")?.file(&["iris.csv.gz", "iris.csv"])?;
        let table = Options::new().label("species").read(&path)?;
        let (features, classes) = (table.names.len(), table.classes.len());
        if table.rows <= TRAINING || (features, classes) != (FEATURES, CLASSES) {
            return Err(format!(
                "{}: expected more than {TRAINING} rows with {FEATURES} features and {CLASSES} \
                 species, found {} rows with {features} features and {classes} species",
                path.display(),
                table.rows
            )
            .into());
        }
        Ok(Self { hparams, table })
    }

    fn build_model(&self, device: &Device) -> Result<Mlp> {
        Ok(Mlp {
            hidden: LinearConfig::new(FEATURES, self.hparams.hidden).init(device),
            output: LinearConfig::new(self.hparams.hidden, CLASSES).init(device),
        })
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamConfig::new().init(), self.hparams.learning_rate))
    }

    fn build_training_data(&self) -> Result<Data<Batch>> {
        Data::arrays(self.arrays(&self.split().0))
    }

    fn build_validation_data(&self) -> Result<Data<Batch>> {
        Data::arrays(self.arrays(&self.split().1))
    }

    fn step(&self, model: &Mlp, (sizes, species): Batch) -> StepOutput {
        StepOutput::classification(model.forward(sizes), species)
    }

    fn callbacks(&self) -> Vec<Box<dyn Callback>> {
        vec![TensorBoard::new().histogram_period(10).boxed()]
    }
}

impl Iris {
    /// Returns the rows for training and for validation. They are shuffled with a fixed seed,
    /// because the file is sorted by species.
    fn split(&self) -> (Vec<usize>, Vec<usize>) {
        let rows = self.table.rows as u64;
        let order = Permutation::new(rows, SPLIT_SEED);
        let mut training: Vec<usize> = (0..rows).map(|row| order.at(row) as usize).collect();
        let validation = training.split_off(TRAINING);
        (training, validation)
    }

    /// Returns the mean and standard deviation of each feature in the training data.
    fn scales(&self) -> Vec<(f32, f32)> {
        let training = self.split().0;
        let value = |row: usize, feature: usize| self.table.features[row * FEATURES + feature];
        let of = |feature| scale(training.iter().map(|row| value(*row, feature)));
        (0..FEATURES).map(of).collect()
    }

    /// Returns the sizes, normalized by [`scales`](Self::scales), and the species of the rows.
    fn arrays(&self, rows: &[usize]) -> (Tensor<2>, Tensor<1, Int>) {
        let device = stoker_trainer::host();
        let value = |row: usize, feature: usize| self.table.features[row * FEATURES + feature];
        let scales = self.scales();
        let mut sizes = Vec::with_capacity(rows.len() * FEATURES);
        for row in rows {
            for (feature, (mean, deviation)) in scales.iter().enumerate() {
                sizes.push((value(*row, feature) - mean) / deviation);
            }
        }
        let species: Vec<i64> = rows.iter().map(|row| self.table.labels[*row] as i64).collect();
        (
            Tensor::from_data(TensorData::new(sizes, [rows.len(), FEATURES]), &device),
            Tensor::from_data(TensorData::new(species, [rows.len()]), &device),
        )
    }
}

/// Returns the mean and standard deviation.
fn scale(values: impl Iterator<Item = f32> + Clone) -> (f32, f32) {
    let count = values.clone().count() as f32;
    let mean = values.clone().sum::<f32>() / count;
    let variance = values.map(|value| (value - mean).powi(2)).sum::<f32>() / count;
    (mean, variance.sqrt().max(f32::EPSILON))
}

/// One hidden layer.
#[derive(Debug, Module)]
pub(crate) struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    /// # Shapes
    ///
    /// - sizes: `[samples, 4]`
    /// - result: `[samples, 3]`, logits
    fn forward(&self, sizes: Tensor<2>) -> Tensor<2> {
        self.output.forward(Tanh.forward(self.hidden.forward(sizes)))
    }
}

#[cfg(test)]
mod tests {
    use super::Iris;
    use crate::data_config::test_of;

    #[test]
    fn model_learns_and_resumes_after_a_stop() {
        let test = test_of(include_str!("const.yaml")).batches(30);
        let tested = test.run::<Iris>().unwrap();
        assert!(tested.validation["val_accuracy"] > 0.7, "{:?}", tested.validation);
        test.batches(3).resumes::<Iris>().unwrap();
    }

    #[test]
    fn hidden_layer_without_units_is_refused() {
        let test = test_of(include_str!("const.yaml")).hyperparameter("hidden", 0);
        let error = test.run::<Iris>().unwrap_err().to_string();
        assert!(error.ends_with("hidden is 0, but must be at least 1"), "{error}");
    }
}
