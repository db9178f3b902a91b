//! What one batch gives: a loss to learn from, and metrics.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::collective::{Collective, exchange};
use crate::precision::single;

/// A number on the host or on the device.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "lives for one step")]
pub enum Number {
    /// Known already.
    Host(f64),
    /// One element, read later.
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
}

/// A step's loss and metrics, as sums and counts: ranks and batches of any size add up exactly, and
/// are divided once.
///
/// A loss that is not a number ends nothing by itself: it shows as `NaN` in the metrics, and a
/// callback may stop.
#[derive(Debug)]
#[must_use]
pub struct StepOutput {
    learned: Learned,
    is_mean: bool,
    count: Number,
    metrics: Vec<(String, Number, Number)>,
}

/// What a step learns from.
#[derive(Debug)]
#[cfg_attr(feature = "learner", expect(clippy::large_enum_variant, reason = "lives for one step"))]
enum Learned {
    Loss(Tensor<1>),
    /// The backward pass was run already; `None`: there is nothing to learn.
    #[cfg(feature = "learner")]
    Gradients(Option<GradientsParams>),
}

impl StepOutput {
    /// Gradients of a mean loss over `samples` samples, where the backward pass was run already, and
    /// metrics.
    #[cfg(feature = "learner")]
    pub(crate) fn given(
        gradients: Option<GradientsParams>,
        samples: usize,
        metrics: &Metrics,
    ) -> Self {
        let number = |(name, (sum, count)): (&String, &(f64, f64))| {
            (name.clone(), Number::Host(*sum), Number::Host(*count))
        };
        Self {
            learned: Learned::Gradients(gradients),
            is_mean: true,
            count: samples.into(),
            metrics: metrics.0.iter().map(number).collect(),
        }
    }

    /// The loss summed over `count` samples, or over their weights, whose sum is `count`.
    ///
    /// # Shapes
    ///
    /// - loss: `[1]`
    pub fn sum(loss: Tensor<1>, count: impl Into<Number>) -> Self {
        let (loss, count) = (single(loss), count.into());
        let metrics = vec![("loss".into(), loss.clone().into(), count.clone())];
        Self { learned: Learned::Loss(loss), is_mean: false, count, metrics }
    }

    /// The mean loss over `samples` samples, as most losses of burn give it.
    ///
    /// # Shapes
    ///
    /// - loss: `[1]`
    pub fn mean(loss: Tensor<1>, samples: usize) -> Self {
        let loss = single(loss);
        let sum = loss.clone() * samples as f64;
        let metrics = vec![("loss".into(), sum.into(), samples.into())];
        Self { learned: Learned::Loss(loss), is_mean: true, count: samples.into(), metrics }
    }

    /// Calls the loss another name among the metrics than `loss`: for a batch that is learned from more
    /// than once.
    pub fn loss_as(mut self, name: &str) -> Self {
        self.metrics.iter_mut().filter(|it| it.0 == "loss").for_each(|it| it.0 = name.into());
        self
    }

    /// Adds a metric whose value is `sum / count` over everything seen.
    pub fn metric(mut self, name: &str, sum: impl Into<Number>, count: impl Into<Number>) -> Self {
        self.metrics.push((name.into(), sum.into(), count.into()));
        self
    }

    /// Cross entropy, and `accuracy`.
    ///
    /// # Shapes
    ///
    /// - logits: `[samples, classes]`
    /// - labels: `[samples]`
    pub fn classification(logits: Tensor<2>, labels: Tensor<1, Int>) -> Self {
        let (logits, samples) = (single(logits), labels.dims()[0]);
        let chosen = log_softmax(logits.clone(), 1).gather(1, labels.clone().unsqueeze_dim(1));
        let best: Tensor<1, Int> = logits.argmax(1).squeeze_dim(1);
        let num_correct = single(best.equal(labels).float()).sum();
        Self::sum(chosen.sum().neg(), samples).metric("accuracy", num_correct, samples)
    }

    /// Cross entropy of samples that count as their weights say, and `accuracy`, of which each counts as
    /// one. As in Keras, the loss is the sum of weighted losses by the number of samples; for the mean by
    /// weight, give [`sum`](Self::sum) the sum of the weights as its count.
    ///
    /// # Shapes
    ///
    /// - logits: `[samples, classes]`
    /// - labels, weights: `[samples]`
    pub fn weighted_classification(
        logits: Tensor<2>,
        labels: Tensor<1, Int>,
        weights: Tensor<1>,
    ) -> Self {
        let (logits, samples) = (single(logits), labels.dims()[0]);
        let chosen = log_softmax(logits.clone(), 1).gather(1, labels.clone().unsqueeze_dim(1));
        let losses = chosen.squeeze_dim::<1>(1).neg() * single(weights);
        let best: Tensor<1, Int> = logits.argmax(1).squeeze_dim(1);
        let num_correct = single(best.equal(labels).float()).sum();
        Self::sum(losses.sum(), samples).metric("accuracy", num_correct, samples)
    }

    /// Squared error of samples that count as their weights say, over all elements; and
    /// `mean_absolute_error`, to which each counts as one.
    ///
    /// # Shapes
    ///
    /// - outputs, targets: `[samples, outputs]`
    /// - weights: `[samples]`
    pub fn weighted_regression(outputs: Tensor<2>, targets: Tensor<2>, weights: Tensor<1>) -> Self {
        let num_elements = targets.shape().num_elements();
        let error = single(outputs) - single(targets);
        let absolute = error.clone().abs().sum();
        let squares = error.clone() * error * single(weights).unsqueeze_dim(1);
        Self::sum(squares.sum(), num_elements).metric("mean_absolute_error", absolute, num_elements)
    }

    /// Squared error, and `mean_absolute_error`, over all elements.
    ///
    /// # Shapes
    ///
    /// - outputs, targets: equal, any
    pub fn regression<const D: usize>(outputs: Tensor<D>, targets: Tensor<D>) -> Self {
        let num_elements = targets.shape().num_elements();
        let error = single(outputs) - single(targets);
        let absolute = error.clone().abs().sum();
        Self::sum((error.clone() * error).sum(), num_elements).metric(
            "mean_absolute_error",
            absolute,
            num_elements,
        )
    }

    /// Runs the backward pass; of the mean loss where this batch is `whole`, all that a step learns
    /// from: then no gradient has to be divided afterwards.
    pub(crate) fn backward<M: Module>(self, model: &M, whole: bool) -> Backward {
        let mut count = self.count.read();
        let mut scale = if self.is_mean { count } else { 1.0 };
        let is_whole = whole && count > 0.0;
        let factor = if is_whole && !self.is_mean { 1.0 / count } else { 1.0 };
        if is_whole {
            (scale, count) = (1.0, 1.0);
        }
        let gradients = match self.learned {
            Learned::Loss(loss) if factor == 1.0 => {
                GradientsParams::from_grads(loss.backward(), model)
            }
            Learned::Loss(loss) => GradientsParams::from_grads((loss * factor).backward(), model),
            #[cfg(feature = "learner")]
            Learned::Gradients(gradients) => gradients.unwrap_or_default(),
        };
        Backward { gradients, scale, count, metrics: Metrics::read(self.metrics) }
    }

    /// The metrics alone.
    pub fn into_metrics(self) -> Metrics {
        Metrics::read(self.metrics)
    }
}

/// What the backward pass gave.
pub(crate) struct Backward {
    pub(crate) gradients: GradientsParams,
    /// Gradients times this are those of the sum over samples.
    pub(crate) scale: f64,
    pub(crate) count: f64,
    pub(crate) metrics: Metrics,
}

/// Sums and counts by name, in `f64`.
///
/// A sum is not always a number, which JSON cannot say: it is kept as its bits.
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
    fn read(metrics: Vec<(String, Number, Number)>) -> Self {
        let read =
            |(name, sum, count): (String, Number, Number)| (name, (sum.read(), count.read()));
        Self(metrics.into_iter().map(read).collect())
    }

    /// Adds what another batch or rank saw.
    pub fn add(&mut self, other: &Self) {
        for (name, (sum, count)) in &other.0 {
            let entry = self.0.entry(name.clone()).or_default();
            *entry = (entry.0 + sum, entry.1 + count);
        }
    }

    /// The sums over all ranks; one that had no sample has no names.
    pub(crate) fn all_reduce(self, ranks: &dyn Collective) -> Result<Self> {
        Ok(Self::total(exchange(ranks, "metrics", self)?))
    }

    /// The sums of what ranks saw, in their order.
    pub(crate) fn total(of_ranks: Vec<Self>) -> Self {
        let mut of_ranks = of_ranks.into_iter();
        let mut total = of_ranks.next().unwrap_or_default();
        of_ranks.for_each(|it| total.add(&it));
        total
    }

    /// Adds `sum` over `count` to a metric.
    pub fn add_one(&mut self, name: &str, sum: f64, count: f64) {
        let entry = self.0.entry(name.to_owned()).or_default();
        *entry = (entry.0 + sum, entry.1 + count);
    }

    /// Makes the mean of a metric `mean` over `count`.
    #[cfg(feature = "learner")]
    pub(crate) fn set(&mut self, name: &str, mean: f64, count: f64) {
        self.0.insert(name.to_owned(), (mean * count, count));
    }

    /// The sum and the count of a metric.
    #[cfg(feature = "learner")]
    pub(crate) fn sum_and_count(&self, name: &str) -> Option<(f64, f64)> {
        self.0.get(name).copied()
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The mean of a metric.
    pub fn mean(&self, name: &str) -> Option<f64> {
        self.0.get(name).map(|(sum, count)| sum / count)
    }

    /// The means by name, each name with `prefix` before it.
    pub fn means(&self, prefix: &str) -> BTreeMap<String, f64> {
        let mean =
            |(name, (sum, count)): (&String, &(f64, f64))| (format!("{prefix}{name}"), sum / count);
        self.0.iter().map(mean).collect()
    }
}
