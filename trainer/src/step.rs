//! Result of one batch: a loss to learn from, and metrics.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLoss;
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};
use stoker_kernels::{cross_entropy_of_samples, sum_in_order};

use crate::Result;
use crate::collective::{Collective, all_gather_cbor};
use crate::precision::to_single;

mod unread;

pub(crate) use unread::UnreadMetrics;

/// A number on the host or on the device.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "lives for one step")]
pub enum Number {
    /// Value on the host.
    Host(f64),
    /// One element on the device, read when the value is needed.
    Device(Tensor<1>),
}

impl From<usize> for Number {
    fn from(value: usize) -> Self {
        Self::Host(value as f64)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Host(value)
    }
}

impl From<Tensor<1>> for Number {
    fn from(value: Tensor<1>) -> Self {
        Self::Device(value)
    }
}

impl Number {
    fn read(self) -> f64 {
        match self {
            Self::Host(value) => value,
            Self::Device(tensor) => tensor.into_scalar::<f64>(),
        }
    }

    /// Returns the number outside the graph of the backward pass.
    fn without_autodiff(self) -> Self {
        match self {
            Self::Device(tensor) if tensor.device().is_autodiff() => Self::Device(tensor.inner()),
            other => other,
        }
    }
}

/// Loss and metrics of a step, as sums and counts. Ranks and batches of any size add up exactly and
/// are divided once.
///
/// A loss that is NaN does not end training: it appears as `NaN` in the metrics, and a callback may
/// stop.
#[derive(Debug)]
#[must_use]
pub struct StepOutput {
    gradient_source: GradientSource,
    is_mean: bool,
    count: Number,
    metrics: Vec<(String, Number, Number)>,
}

/// Source of a step's gradients.
#[derive(Debug)]
#[cfg_attr(feature = "learner", expect(clippy::large_enum_variant, reason = "lives for one step"))]
enum GradientSource {
    Loss(Tensor<1>),
    /// The backward pass has already run; `None` if there is nothing to learn.
    #[cfg(feature = "learner")]
    Gradients(Option<GradientsParams>),
}

impl StepOutput {
    /// Gradients of a mean loss over `samples` samples, with metrics, when the backward pass has
    /// already run.
    #[cfg(feature = "learner")]
    pub(crate) fn from_gradients(
        gradients: Option<GradientsParams>,
        samples: usize,
        metrics: &Metrics,
    ) -> Self {
        let number = |(name, (sum, count)): (&String, &(f64, f64))| {
            (name.clone(), Number::Host(*sum), Number::Host(*count))
        };
        Self {
            gradient_source: GradientSource::Gradients(gradients),
            is_mean: true,
            count: samples.into(),
            metrics: metrics.0.iter().map(number).collect(),
        }
    }

    /// Loss summed over `count` samples. If samples have weights, `count` is the sum of the
    /// weights.
    ///
    /// # Shapes
    ///
    /// - loss: `[1]`
    pub fn sum(loss: Tensor<1>, count: impl Into<Number>) -> Self {
        let (loss, count) = (to_single(loss), count.into());
        let metrics = vec![("loss".into(), loss.clone().into(), count.clone())];
        Self { gradient_source: GradientSource::Loss(loss), is_mean: false, count, metrics }
    }

    /// Mean loss over `samples` samples, as most losses in burn return it.
    ///
    /// # Shapes
    ///
    /// - loss: `[1]`
    pub fn mean(loss: Tensor<1>, samples: usize) -> Self {
        let loss = to_single(loss);
        let sum = loss.clone() * samples as f64;
        let metrics = vec![("loss".into(), sum.into(), samples.into())];
        Self {
            gradient_source: GradientSource::Loss(loss),
            is_mean: true,
            count: samples.into(),
            metrics,
        }
    }

    /// Renames the metric `loss`. Use this when a batch is learned from more than once.
    pub fn loss_as(mut self, name: &str) -> Self {
        let losses = self.metrics.iter_mut().filter(|(metric, ..)| metric == "loss");
        losses.for_each(|(metric, ..)| *metric = name.into());
        self
    }

    /// Adds a metric whose value is `sum / count` over all batches and ranks.
    pub fn metric(mut self, name: &str, sum: impl Into<Number>, count: impl Into<Number>) -> Self {
        self.metrics.push((name.into(), sum.into(), count.into()));
        self
    }

    /// Cross-entropy loss, and the metric `accuracy`.
    ///
    /// # Shapes
    ///
    /// - logits: `[samples, classes]`
    /// - labels: `[samples]`
    pub fn classification(logits: Tensor<2>, labels: Tensor<1, Int>) -> Self {
        let (logits, samples) = (to_single(logits), labels.dims()[0]);
        let losses = cross_entropy(logits.clone(), labels.clone());
        let best: Tensor<1, Int> = logits.argmax(1).squeeze_dim(1);
        let num_correct = sum_in_order(to_single(best.equal(labels).float()));
        Self::sum(sum_in_order(losses), samples).metric("accuracy", num_correct, samples)
    }

    /// Cross-entropy loss with sample weights, and the metric `accuracy` without weights.
    ///
    /// As in Keras, the loss is the sum of the weighted losses divided by the number of samples.
    /// For the weighted mean, pass the sum of the weights to [`sum`](Self::sum) as its count.
    ///
    /// # Shapes
    ///
    /// - logits: `[samples, classes]`
    /// - labels, weights: `[samples]`
    ///
    /// # Panics
    ///
    /// If the number of weights is not the number of labels.
    pub fn weighted_classification(
        logits: Tensor<2>,
        labels: Tensor<1, Int>,
        weights: Tensor<1>,
    ) -> Self {
        let (logits, samples) = (to_single(logits), labels.dims()[0]);
        assert_weights(&weights, samples);
        let losses = cross_entropy(logits.clone(), labels.clone()) * to_single(weights);
        let best: Tensor<1, Int> = logits.argmax(1).squeeze_dim(1);
        let num_correct = sum_in_order(to_single(best.equal(labels).float()));
        Self::sum(sum_in_order(losses), samples).metric("accuracy", num_correct, samples)
    }

    /// Squared error over all elements with sample weights, and the metric `mean_absolute_error`
    /// without weights.
    ///
    /// # Shapes
    ///
    /// - outputs, targets: `[samples, outputs]`
    /// - weights: `[samples]`
    ///
    /// # Panics
    ///
    /// If the shapes differ.
    pub fn weighted_regression(outputs: Tensor<2>, targets: Tensor<2>, weights: Tensor<1>) -> Self {
        assert_same_shape(&outputs, &targets);
        assert_weights(&weights, targets.dims()[0]);
        let num_elements = targets.shape().num_elements();
        let error = to_single(outputs) - to_single(targets);
        let absolute = sum_in_order(error.clone().abs());
        let squares = error.clone() * error * to_single(weights).unsqueeze_dim(1);
        Self::sum(sum_in_order(squares), num_elements).metric(
            "mean_absolute_error",
            absolute,
            num_elements,
        )
    }

    /// Squared error over all elements, and the metric `mean_absolute_error`.
    ///
    /// # Shapes
    ///
    /// - outputs, targets: the same shape, of any rank
    ///
    /// # Panics
    ///
    /// If the shapes differ.
    pub fn regression<const D: usize>(outputs: Tensor<D>, targets: Tensor<D>) -> Self {
        assert_same_shape(&outputs, &targets);
        let num_elements = targets.shape().num_elements();
        let error = to_single(outputs) - to_single(targets);
        let absolute = sum_in_order(error.clone().abs());
        Self::sum(sum_in_order(error.clone() * error), num_elements).metric(
            "mean_absolute_error",
            absolute,
            num_elements,
        )
    }

    /// Runs the backward pass. If this batch is `whole`, that is, all that the step learns from,
    /// the gradients are of the mean loss and need no division afterwards. Otherwise, they are of
    /// the sum over samples.
    pub(crate) fn backward<M: Module>(self, model: &M, whole: bool) -> Backward {
        let metrics = UnreadMetrics::new(self.metrics);
        let mut count = self.count.read();
        let is_whole = whole && count > 0.0;
        let factor = match (is_whole, self.is_mean) {
            (true, false) => 1.0 / count,
            (false, true) => count,
            _ => 1.0,
        };
        if is_whole {
            count = 1.0;
        }
        let (gradients, scale) = match self.gradient_source {
            GradientSource::Loss(loss) => {
                // A factor of the loss costs no pass over the gradients.
                let loss = if factor == 1.0 { loss } else { loss * factor };
                (GradientsParams::from_grads(loss.backward(), model), 1.0)
            }
            #[cfg(feature = "learner")]
            GradientSource::Gradients(gradients) => (gradients.unwrap_or_default(), factor),
        };
        Backward { gradients, scale, count, metrics }
    }

    /// Discards the loss and returns the metrics.
    pub fn into_metrics(self) -> Metrics {
        UnreadMetrics::new(self.metrics).read()
    }
}

/// Panics if the shapes differ. Otherwise, the difference would be broadcast to a larger shape, and
/// the loss would be too large.
fn assert_same_shape<const D: usize>(outputs: &Tensor<D>, targets: &Tensor<D>) {
    let (of_outputs, of_targets) = (outputs.dims(), targets.dims());
    assert!(
        of_outputs == of_targets,
        "the outputs have the shape {of_outputs:?}, but the targets have {of_targets:?}; give both \
         the same shape"
    );
}

/// Panics unless each sample has a weight. A single weight would be broadcast.
fn assert_weights(weights: &Tensor<1>, samples: usize) {
    let [len] = weights.dims();
    assert!(
        len == samples,
        "the weights have the shape [{len}], but the targets have {samples} samples; give one \
         weight for each sample"
    );
}

/// Returns the cross-entropy of each sample.
fn cross_entropy(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    let loss = CrossEntropyLoss { pad_tokens: None, weights: None, smoothing: None, logits: true };
    cross_entropy_of_samples(&loss, logits, labels)
}

/// Result of the backward pass.
pub(crate) struct Backward {
    pub(crate) gradients: GradientsParams,
    /// Factor of the gradients that is still to be applied.
    pub(crate) scale: f64,
    pub(crate) count: f64,
    pub(crate) metrics: UnreadMetrics,
}

/// Sums and counts by metric name, in `f64`.
///
/// Serialized as bits, because a sum may be NaN or infinite, which JSON cannot represent.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(from = "BTreeMap<String, [u64; 2]>", into = "BTreeMap<String, [u64; 2]>")]
pub struct Metrics(BTreeMap<String, (f64, f64)>);

impl From<BTreeMap<String, [u64; 2]>> for Metrics {
    fn from(bits: BTreeMap<String, [u64; 2]>) -> Self {
        let of = |[sum, count]: [u64; 2]| (f64::from_bits(sum), f64::from_bits(count));
        Self(bits.into_iter().map(|(name, pair)| (name, of(pair))).collect())
    }
}

impl From<Metrics> for BTreeMap<String, [u64; 2]> {
    fn from(metrics: Metrics) -> Self {
        let bits = |(sum, count): (f64, f64)| [sum.to_bits(), count.to_bits()];
        metrics.0.into_iter().map(|(name, pair)| (name, bits(pair))).collect()
    }
}

impl Metrics {
    /// Adds the sums and counts of another batch or rank.
    pub fn add(&mut self, other: &Self) {
        for (name, (sum, count)) in &other.0 {
            let entry = self.0.entry(name.clone()).or_default();
            *entry = (entry.0 + sum, entry.1 + count);
        }
    }

    /// All-reduces the sums, in rank order. A rank without samples contributes no names.
    pub(crate) fn all_reduce(self, ranks: &dyn Collective) -> Result<Self> {
        let mut of_ranks = all_gather_cbor(ranks, "metrics", self)?.into_iter();
        let mut sum_of_ranks = of_ranks.next().unwrap_or_default();
        of_ranks.for_each(|metrics| sum_of_ranks.add(&metrics));
        Ok(sum_of_ranks)
    }

    /// Adds `sum` and `count` to a metric.
    pub fn add_one(&mut self, name: &str, sum: f64, count: f64) {
        let entry = self.0.entry(name.to_owned()).or_default();
        *entry = (entry.0 + sum, entry.1 + count);
    }

    /// Sets a metric to `mean` over `count`.
    #[cfg(feature = "learner")]
    pub(crate) fn set(&mut self, name: &str, mean: f64, count: f64) {
        self.0.insert(name.to_owned(), (mean * count, count));
    }

    /// Sets the sum and the count of a metric.
    pub(crate) fn insert(&mut self, name: &str, sum: f64, count: f64) {
        self.0.insert(name.to_owned(), (sum, count));
    }

    /// Returns the names of all metrics, in order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Returns the sum and the count of a metric.
    pub(crate) fn sum_and_count(&self, name: &str) -> Option<(f64, f64)> {
        self.0.get(name).copied()
    }

    /// Returns whether there are no metrics.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the mean of a metric.
    pub fn mean(&self, name: &str) -> Option<f64> {
        self.0.get(name).map(|(sum, count)| sum / count)
    }

    /// Returns the means by name, with `prefix` before each name.
    pub fn means(&self, prefix: &str) -> BTreeMap<String, f64> {
        let mean =
            |(name, (sum, count)): (&String, &(f64, f64))| (format!("{prefix}{name}"), sum / count);
        self.0.iter().map(mean).collect()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn weighted_regression_weights_the_loss_only() {
        let device = Device::flex();
        let outputs = Tensor::<2>::from_data([[1.0, 2.0, 3.0], [4.0, 0.0, -2.0]], &device);
        let weights = Tensor::<1>::from_data([1.0, 0.5], &device);
        let targets = outputs.zeros_like();
        let metrics = StepOutput::weighted_regression(outputs, targets, weights).into_metrics();
        assert_eq!(metrics.sum_and_count("loss"), Some((24.0, 6.0)));
        assert_eq!(metrics.sum_and_count("mean_absolute_error"), Some((12.0, 6.0)));
    }

    /// Broadcast to 2 × 3 elements, the loss would be the sum over 6 elements, divided by 2.
    #[test]
    fn shapes_that_would_be_broadcast_are_refused() {
        let zeros = |shape: [usize; 2]| Tensor::<2>::zeros(shape, &Device::flex());
        let message = |call: &dyn Fn() -> StepOutput| {
            let call = std::panic::AssertUnwindSafe(call);
            let panic = std::panic::catch_unwind(|| call().into_metrics()).unwrap_err();
            panic.downcast_ref::<String>().unwrap().clone()
        };
        let expected = "the outputs have the shape [2, 3], but the targets have [2, 1]; give both \
                        the same shape";
        let (outputs, targets) = (zeros([2, 3]), zeros([2, 1]));
        let plain = || StepOutput::regression(outputs.clone(), targets.clone());
        assert_eq!(message(&plain), expected);
        let weights = |num| Tensor::<1>::ones([num], &Device::flex());
        let weighted =
            || StepOutput::weighted_regression(outputs.clone(), targets.clone(), weights(2));
        assert_eq!(message(&weighted), expected);
        let weighted =
            || StepOutput::weighted_regression(outputs.clone(), outputs.clone(), weights(1));
        assert!(message(&weighted).starts_with("the weights have the shape [1], but"));
        let labels = Tensor::<1, Int>::from_data([0, 1], &Device::flex());
        let classes =
            || StepOutput::weighted_classification(outputs.clone(), labels.clone(), weights(1));
        assert!(message(&classes).starts_with("the weights have the shape [1], but"));
    }

    /// burn's sum of as many elements adds parts in the order in which threads finish.
    #[test]
    fn loss_of_many_elements_is_added_in_order() {
        const COLUMNS: usize = 1 << 20;
        let mut outputs = vec![0.0_f32; 5 * COLUMNS];
        outputs.iter_mut().step_by(COLUMNS).for_each(|first| *first = 1.0);
        outputs[0] = 4096.0;
        let shape = [5, COLUMNS];
        let outputs = Tensor::from_data(TensorData::new(outputs, shape), &Device::flex());
        let metrics =
            StepOutput::regression::<2>(outputs.clone(), outputs.zeros_like()).into_metrics();
        // Each 1 is lost beside the square of 4096, unless several are added before.
        assert_eq!(metrics.sum_and_count("loss"), Some((16_777_216.0, (5 * COLUMNS) as f64)));
    }
}
