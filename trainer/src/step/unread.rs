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
    /// Takes the metrics out of the graph of the backward pass. Otherwise, unread metrics would
    /// keep the graph in memory.
    pub(super) fn new(metrics: Vec<(String, Number, Number)>) -> Self {
        let plain = |(name, sum, count): (String, Number, Number)| {
            (name, sum.without_autodiff(), count.without_autodiff())
        };
        Self(metrics.into_iter().map(plain).collect())
    }

    /// Reads all metrics, with one transfer if all are on one device.
    ///
    /// # Panics
    ///
    /// Panics if a metric has several elements, or if the device fails.
    pub(crate) fn read(self) -> Metrics {
        let (mut names, mut numbers) = (vec![], vec![]);
        for (name, sum, count) in self.0 {
            names.push(name);
            numbers.extend([sum, count]);
        }
        let values = read_all(numbers);
        let pairs = values.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        Metrics(names.into_iter().zip(pairs).collect())
    }
}

fn read_all(numbers: Vec<Number>) -> Vec<f64> {
    let of_number = |number: &Number| match number {
        Number::Host(_) => None,
        Number::Device(tensor) => Some(tensor.clone()),
    };
    let tensors: Vec<Tensor<1>> = numbers.iter().filter_map(of_number).collect();
    let is_on_one_device = tensors.windows(2).all(|pair| pair[0].device() == pair[1].device());
    if !is_on_one_device || tensors.iter().any(|tensor| tensor.dims() != [1]) {
        return numbers.into_iter().map(Number::read).collect();
    }
    let all = tensors.into_iter().fold(Transaction::default(), Transaction::register).execute();
    let mut values = all.iter().flat_map(|data| data.iter::<f64>());
    let value = |number| match number {
        Number::Host(value) => value,
        Number::Device(_) => values.next().expect("a transaction returns all of its tensors"),
    };
    numbers.into_iter().map(value).collect()
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
        let Number::Device(plain) = &metrics.0[0].1 else { panic!("{metrics:?}") };
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
}
