//! Metrics that a device may still compute.

use burn::tensor::{Tensor, Transaction};

use super::{Metrics, Number};
#[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
use crate::{device::gpu_tensor::QueuedCopy, error::raise};

/// Metrics of a step. Reading them waits until the device has computed them.
#[derive(Debug, Default)]
pub(crate) struct UnreadMetrics {
    names: Vec<String>,
    /// Sum and count of each metric.
    numbers: Vec<Number>,
    /// Copy of the numbers that are on the device, if it is queued.
    #[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
    copy: Option<QueuedCopy>,
}

impl From<Metrics> for UnreadMetrics {
    fn from(metrics: Metrics) -> Self {
        let number = |(name, (sum, count)): (String, (f64, f64))| (name, sum.into(), count.into());
        metrics.0.into_iter().map(number).collect()
    }
}

impl FromIterator<(String, Number, Number)> for UnreadMetrics {
    fn from_iter<I: IntoIterator<Item = (String, Number, Number)>>(metrics: I) -> Self {
        let mut unread = Self::default();
        for (name, sum, count) in metrics {
            unread.names.push(name);
            unread.numbers.extend([sum, count]);
        }
        unread
    }
}

impl UnreadMetrics {
    /// Takes the metrics out of the graph of the backward pass. Otherwise, unread metrics would
    /// keep the graph in memory.
    pub(super) fn new(metrics: Vec<(String, Number, Number)>) -> Self {
        let plain = |(name, sum, count): (String, Number, Number)| {
            (name, sum.without_autodiff(), count.without_autodiff())
        };
        metrics.into_iter().map(plain).collect()
    }

    /// Queues a copy to the host if the numbers are on a GPU. A later read then waits for the work
    /// that is queued so far, but not for the work that follows.
    #[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
    pub(crate) fn queue_copy(&mut self) {
        self.copy = QueuedCopy::new(&on_device(&self.numbers));
    }

    /// Reads all metrics, with one transfer if all are on one device.
    ///
    /// # Panics
    ///
    /// Panics if a metric has several elements, or if the device fails. A failed copy from a GPU
    /// raises its error instead.
    pub(crate) fn read(self) -> Metrics {
        let tensors = on_device(&self.numbers);
        #[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
        let copied = self.copy.map(|copy| copy.wait().unwrap_or_else(|error| raise(error)));
        #[cfg(not(any(feature = "cuda", feature = "cubecl-cpu")))]
        let copied = None;
        let mut values = copied.unwrap_or_else(|| read_all(tensors)).into_iter();
        let value = |number| match number {
            Number::Host(value) => value,
            Number::Device(_) => values.next().expect("a value of each tensor"),
        };
        let values: Vec<f64> = self.numbers.into_iter().map(value).collect();
        let pairs = values.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        Metrics(self.names.into_iter().zip(pairs).collect())
    }
}

fn on_device(numbers: &[Number]) -> Vec<Tensor<1>> {
    let of_number = |number: &Number| match number {
        Number::Host(_) => None,
        Number::Device(tensor) => Some(tensor.clone()),
    };
    numbers.iter().filter_map(of_number).collect()
}

fn read_all(tensors: Vec<Tensor<1>>) -> Vec<f64> {
    let is_on_one_device = tensors.windows(2).all(|pair| pair[0].device() == pair[1].device());
    if !is_on_one_device || tensors.iter().any(|tensor| tensor.dims() != [1]) {
        return tensors.into_iter().map(Tensor::into_scalar).collect();
    }
    let all = tensors.into_iter().fold(Transaction::default(), Transaction::register).execute();
    all.iter().flat_map(|data| data.iter::<f64>()).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::device::host;

    #[test]
    fn metrics_keep_names_and_values() {
        let device = host().autodiff();
        let of = |value: f32, dtype| {
            Number::from(Tensor::<1>::from_floats([value], &device).require_grad().cast(dtype))
        };
        let metrics = UnreadMetrics::new(vec![
            ("b".into(), of(1.5, DType::F32), 3.0.into()),
            ("a".into(), 7.0.into(), of(2.0, DType::BF16)),
            ("c".into(), of(f32::NAN, DType::F32), of(-0.0, DType::F32)),
        ]);
        let Number::Device(plain) = &metrics.numbers[0] else { panic!("{metrics:?}") };
        assert!(!plain.device().is_autodiff());
        let metrics = UnreadMetrics::from(metrics.read()).read();
        assert_eq!(metrics.sum_and_count("a"), Some((7.0, 2.0)));
        assert_eq!(metrics.sum_and_count("b"), Some((1.5, 3.0)));
        let (sum, count) = metrics.sum_and_count("c").unwrap();
        assert!(sum.is_nan() && count == 0.0 && count.is_sign_negative());
    }

    #[test]
    #[should_panic(expected = "actual: 2")]
    fn metrics_with_several_elements_are_refused() {
        let values = Tensor::<1>::from_floats([1.0, 2.0], &host());
        let sum = values.clone().sum();
        let metrics = [("a", sum), ("b", values)];
        let metrics = metrics.map(|(name, value)| (name.into(), value.into(), 1.0.into()));
        let _ = UnreadMetrics::new(metrics.into()).read();
    }

    #[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
    #[test]
    fn queued_metrics_keep_their_order_on_cubecl() {
        let Some(device) = crate::device::gpu_tensor::tests::gpu() else { return };
        let of = |value: f32, dtype| {
            Number::from(Tensor::<1>::from_floats([value], &device).cast(dtype))
        };
        let mut metrics = UnreadMetrics::new(vec![
            ("b".into(), of(1.5, DType::F32), 3.0.into()),
            ("a".into(), 7.0.into(), of(2.0, DType::BF16)),
            ("c".into(), of(-0.5, DType::F32), of(4.0, DType::F32)),
        ]);
        metrics.queue_copy();
        assert!(metrics.copy.is_some());
        let metrics = metrics.read();
        let pairs = ["b", "a", "c"].map(|name| metrics.sum_and_count(name).unwrap());
        assert_eq!(pairs, [(1.5, 3.0), (7.0, 2.0), (-0.5, 4.0)]);
    }
}
