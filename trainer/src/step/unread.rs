//! Metrics that a device may still compute.

use burn::tensor::{Tensor, Transaction};

use super::{Metrics, Number};

/// Metrics of a step. Reading them waits until the device has computed them.
#[derive(Debug, Default)]
pub(crate) struct UnreadMetrics(Vec<(String, Number, Number)>);

impl From<Metrics> for UnreadMetrics {
    fn from(metrics: Metrics) -> Self {
        let number = |(name, (sum, count)): (String, (f64, f64))| (name, sum.into(), count.into());
        Self(metrics.0.into_iter().map(number).collect())
    }
}

impl UnreadMetrics {
    /// Takes the metrics out of the graph of the backward pass, which they would keep in memory.
    pub(super) fn new(mut metrics: Vec<(String, Number, Number)>) -> Self {
        for number in metrics.iter_mut().flat_map(|(_, sum, count)| [sum, count]) {
            number.detach();
        }
        Self(metrics)
    }

    /// Reads all metrics, with one transfer if all are on one device.
    pub(crate) fn read(self) -> Metrics {
        let numbers = || self.0.iter().flat_map(|(_, sum, count)| [sum, count]);
        let tensors: Vec<_> = numbers().filter_map(Number::tensor).collect();
        let mut values = read_all(tensors).into_iter();
        let mut read = |number: &Number| match number {
            Number::Host(value) => *value,
            Number::Device(_) => values.next().unwrap_or(f64::NAN),
        };
        let read = |(name, sum, count): &(String, Number, Number)| {
            (name.clone(), (read(sum), read(count)))
        };
        Metrics(self.0.iter().map(read).collect())
    }
}

/// Returns the only element of each tensor.
fn read_all(tensors: Vec<&Tensor<1>>) -> Vec<f64> {
    let is_on_one_device = tensors.windows(2).all(|pair| pair[0].device() == pair[1].device());
    if !is_on_one_device || tensors.iter().any(|tensor| tensor.dims() != [1]) {
        return tensors.into_iter().map(|tensor| tensor.clone().into_scalar()).collect();
    }
    let register = |all: Transaction, tensor: &Tensor<1>| all.register(tensor.clone());
    let all = tensors.into_iter().fold(Transaction::default(), register).execute();
    all.iter().map(|data| data.iter::<f64>().next().unwrap_or(f64::NAN)).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::device::host;

    #[test]
    fn numbers_keep_their_places() {
        let device = host().autodiff();
        let of = |value: f32, dtype| {
            Number::from(Tensor::<1>::from_floats([value], &device).require_grad().cast(dtype))
        };
        let metrics = UnreadMetrics::new(vec![
            ("b".into(), of(1.5, DType::F32), 3.0.into()),
            ("a".into(), 7.0.into(), of(2.0, DType::BF16)),
            ("c".into(), of(f32::NAN, DType::F32), of(-0.0, DType::F32)),
        ]);
        let plain = Number::tensor(&metrics.0[0].1).unwrap();
        assert!(!plain.device().is_autodiff());
        let metrics = UnreadMetrics::from(metrics.read()).read();
        assert_eq!(metrics.sum_and_count("a"), Some((7.0, 2.0)));
        assert_eq!(metrics.sum_and_count("b"), Some((1.5, 3.0)));
        let (sum, count) = metrics.sum_and_count("c").unwrap();
        assert!(sum.is_nan() && count == 0.0 && count.is_sign_negative());
    }
}
