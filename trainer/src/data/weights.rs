//! Sample weights.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};

use super::Data;

impl<X: Send + 'static> Data<(X, Tensor<1, Int>)> {
    /// Adds a weight for each sample according to its class: `weights[c]` for label `c`. A step
    /// then receives `(x, labels, weights)`, for example for
    /// [`weighted_classification`](crate::StepOutput::weighted_classification).
    ///
    /// # Shapes
    ///
    /// - labels: `[samples]`, each in `0..weights.len()`; any other label is an error of its batch
    /// - added weights: `[samples]`
    pub fn class_weights(self, weights: &[f32]) -> Data<(X, Tensor<1, Int>, Tensor<1>)> {
        let weights: Arc<[f32]> = weights.into();
        self.map(move |(x, labels)| {
            let classes = labels.to_data().convert::<i64>();
            let mut of_samples = Vec::with_capacity(labels.dims()[0]);
            for class in classes.iter::<i64>() {
                let weight = usize::try_from(class).ok().and_then(|class| weights.get(class));
                of_samples.push(*weight.ok_or_else(|| {
                    format!("class_weights has {} weights, but a label is {class}", weights.len())
                })?);
            }
            let of_samples = Tensor::from_floats(of_samples.as_slice(), &labels.device());
            Ok((x, labels, of_samples))
        })
    }
}
