//! Batch inference of iris species with a trained model, started by `stoker job run`.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use stoker_trainer::{Context, Inference, Result, Trial};

use super::{CLASSES, FEATURES, Iris, Mlp};

/// A flower with its sizes in centimeters.
#[derive(Debug, Deserialize)]
pub(crate) struct Flower {
    /// ID of the flower, copied to the output.
    id: Option<String>,
    sepal_length: f32,
    sepal_width: f32,
    petal_length: f32,
    petal_width: f32,
}

/// The predicted species of a flower.
#[derive(Debug, Serialize)]
pub(crate) struct Prediction {
    id: Option<String>,
    species: String,
    probability: f32,
}

/// The model, and the data that normalizes its inputs.
#[derive(Debug)]
pub(crate) struct Predict {
    iris: Iris,
    model: Mlp,
    device: Device,
}

impl Flower {
    fn sizes(&self) -> [f32; FEATURES] {
        [self.sepal_length, self.sepal_width, self.petal_length, self.petal_width]
    }
}

impl Inference for Predict {
    type Input = Flower;
    type Output = Prediction;

    fn new(context: &Context) -> Result<Self> {
        // The job does not set hyperparameters, so those of the checkpoint's trial apply.
        let iris = Iris::new(context)?;
        let device = context.device().clone().without_autodiff();
        let fresh = iris.build_model(&device)?;
        let model = context.load_checkpoint_model(fresh, context.checkpoint()?)?;
        Ok(Self { iris, model, device })
    }

    fn check(&self, flower: &Flower) -> Result<()> {
        match flower.sizes().iter().find(|size| !size.is_finite() || **size < 0.0) {
            Some(size) => {
                Err(format!("a size is {size}, but must be finite and at least 0").into())
            }
            None => Ok(()),
        }
    }

    fn batch(&mut self, flowers: Vec<Flower>) -> Result<Vec<Prediction>> {
        let scales = self.iris.scales();
        let normalized = |flower: &Flower| {
            let sizes = flower.sizes().into_iter().zip(&scales);
            sizes.map(|(size, (mean, deviation))| (size - mean) / deviation).collect::<Vec<_>>()
        };
        let sizes: Vec<f32> = flowers.iter().flat_map(normalized).collect();
        let data = TensorData::new(sizes, [flowers.len(), FEATURES]);
        let logits = self.model.forward(Tensor::from_data(data, &self.device));
        let probabilities: Vec<f32> = softmax(logits, 1).into_data().try_to_vec()?;
        let classes = &self.iris.table.classes;
        let predict = |(flower, row): (Flower, &[f32])| {
            let best = (0..CLASSES).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0);
            Prediction { id: flower.id, species: classes[best].clone(), probability: row[best] }
        };
        Ok(flowers.into_iter().zip(probabilities.chunks(CLASSES)).map(predict).collect())
    }
}
