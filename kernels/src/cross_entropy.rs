//! Cross-entropy of logits and target classes.

use std::sync::Arc;

use burn::nn::loss::CrossEntropyLoss;
use burn::tensor::{Bool, FloatDType, Int, Tensor, activation};

use crate::array::Array;
use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::sum::sum_in_order;
use crate::tape::{ArrayGradient, Gradient, Operand, integers, record};
use crate::vector::{exp_nonpositive, max, sum_of};

/// Returns the mean cross-entropy, with the options of `loss`.
///
/// Class weights, label smoothing and padding classes are fused, also together. The mean is
/// weighted by the weights of the targets, as in PyTorch. Probabilities instead of logits, and
/// weights with a gradient, are not fused. An empty batch gives NaN.
///
/// # Shapes
///
/// `logits` `[batch, classes]`, `targets` `[batch]`, result `[1]`.
pub fn cross_entropy(
    loss: &CrossEntropyLoss,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    fused(loss, &logits, &targets, Reduction::Mean).unwrap_or_else(|| loss.forward(logits, targets))
}

/// Returns the cross-entropy of each sample, with the options of `loss`.
///
/// Class weights multiply the losses. Samples of a padding class have loss 0. The same options
/// are fused as in [`cross_entropy`](cross_entropy()).
///
/// # Shapes
///
/// `logits` `[batch, classes]`, `targets` and result `[batch]`.
pub fn cross_entropy_of_samples(
    loss: &CrossEntropyLoss,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    fused(loss, &logits, &targets, Reduction::None)
        .unwrap_or_else(|| composed(loss, logits, targets))
}

/// Returns the mean cross-entropy, weighted by `sample_weights`.
///
/// This is `sum(s * l) / sum(s * w)` with the weights `s` of the samples, the weights `w` of
/// their targets, and the losses `l` of [`cross_entropy_of_samples`]. Samples of a padding class
/// do not count. The weights of samples may have a gradient.
///
/// # Shapes
///
/// `logits` `[batch, classes]`, `targets` and `sample_weights` `[batch]`, result `[1]`.
///
/// # Panics
///
/// The shapes of `targets` and `sample_weights` differ.
pub fn weighted_cross_entropy(
    loss: &CrossEntropyLoss,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    sample_weights: Tensor<1>,
) -> Tensor<1> {
    let ([weights], [samples]) = (sample_weights.dims(), targets.dims());
    assert!(
        weights == samples,
        "the weights have the shape [{weights}], but the targets have {samples} samples; give one \
         weight for each sample"
    );
    let mut normalizer = sample_weights.clone();
    if let Some(weights) = &loss.weights {
        normalizer = normalizer * weights.clone().gather(0, targets.clone());
    }
    if let Some(is_padding) = is_padding(loss, &targets) {
        normalizer = normalizer.mask_fill(is_padding, 0.0);
    }
    let losses = cross_entropy_of_samples(loss, logits, targets);
    sum_in_order(losses * sample_weights) / sum_in_order(normalizer)
}

/// Cross-entropy of each sample from burn's operators, whose loss returns only the mean.
fn composed(loss: &CrossEntropyLoss, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let log_probabilities = match loss.logits {
        true => activation::log_softmax(logits, 1),
        // The same limit as in burn's loss.
        false => {
            let info = logits.dtype().finfo().unwrap_or(FloatDType::F32.finfo());
            logits.clamp_min(info.min_positive.sqrt()).log()
        }
    };
    let [_, classes] = log_probabilities.dims();
    let weighted = match &loss.weights {
        Some(weights) => log_probabilities * weights.clone().unsqueeze(),
        None => log_probabilities,
    };
    let smoothing = f64::from(loss.smoothing.unwrap_or(0.0));
    let on_target = weighted.clone().gather(1, targets.clone().unsqueeze_dim(1));
    let mut losses = on_target.squeeze_dim::<1>(1) * (smoothing - 1.0);
    if smoothing > 0.0 {
        losses = losses - weighted.sum_dim(1).squeeze_dim::<1>(1) * (smoothing / classes as f64);
    }
    match is_padding(loss, &targets) {
        Some(is_padding) => losses.mask_fill(is_padding, 0.0),
        None => losses,
    }
}

/// Returns the samples whose target is a padding class. `None` without such classes.
fn is_padding(loss: &CrossEntropyLoss, targets: &Tensor<1, Int>) -> Option<Tensor<1, Bool>> {
    let classes = loss.pad_tokens.iter().flatten();
    let masks = classes.map(|class| targets.clone().equal_scalar(*class as i64));
    masks.reduce(Tensor::bool_or)
}

/// Form of the result.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reduction {
    /// One loss per sample.
    None,
    Mean,
}

fn fused(
    loss: &CrossEntropyLoss,
    logits: &Tensor<2>,
    targets: &Tensor<1, Int>,
    reduction: Reduction,
) -> Option<Tensor<1>> {
    let [batch, classes] = logits.dims();
    if !loss.logits || classes == 0 || targets.dims() != [batch] {
        return None;
    }
    let weights = match &loss.weights {
        Some(weights) => {
            let weights = Operand::new(weights)?;
            let has_gradient = weights.is_tracked() || weights.array().values().len() != classes;
            if has_gradient {
                return None;
            }
            Some(weights.array().values().to_vec())
        }
        None => None,
    };
    let is_class = |target: &usize| *target < classes;
    let targets = integers(targets)?.into_iter().map(usize::try_from);
    let targets: Vec<usize> = targets.collect::<Result<_, _>>().ok()?;
    if !targets.iter().all(is_class) {
        return None;
    }
    let logits = Operand::new(logits)?;
    let padding = loss.pad_tokens.clone().unwrap_or_default();
    let is_padding = targets.iter().map(|target| padding.contains(target)).collect();
    let smoothing = loss.smoothing.unwrap_or(0.0);
    let rows = Rows { targets, is_padding, weights, smoothing, classes };
    let (losses, probabilities) = rows.forward(logits.array().values());
    let normalizer = (reduction == Reduction::Mean).then(|| rows.normalizer());
    let output = match normalizer {
        Some(normalizer) => vec![(losses.iter().sum::<f64>() / normalizer) as f32],
        None => losses.into_iter().map(|loss| loss as f32).collect(),
    };
    let shape = [output.len()];
    let gradient = || -> Arc<dyn Gradient> {
        Arc::new(CrossEntropyGradient { rows, probabilities, normalizer })
    };
    Some(record([logits], Array::from_vec(output, &shape), gradient))
}

/// Targets of a batch, and the options of the loss.
struct Rows {
    targets: Vec<usize>,
    /// Rows that do not count.
    is_padding: Vec<bool>,
    weights: Option<Vec<f32>>,
    /// Part of each target that is spread evenly over all classes.
    smoothing: f32,
    classes: usize,
}

impl Rows {
    fn weight(&self, class: usize) -> f32 {
        self.weights.as_ref().map_or(1.0, |weights| weights[class])
    }

    /// Sum of the weights of all targets.
    fn normalizer(&self) -> f64 {
        let rows = self.targets.iter().zip(&self.is_padding);
        rows.filter(|(_, is_padding)| !**is_padding)
            .map(|(target, _)| f64::from(self.weight(*target)))
            .sum()
    }

    /// Returns the losses of all rows, and the probabilities of all classes.
    fn forward(&self, logits: &[f32]) -> (Vec<f64>, Vec<f32>) {
        let mut probabilities = logits.to_vec();
        let size = chunk_rows(self.targets.len());
        let parts = probabilities.chunks_mut(size * self.classes).enumerate().collect();
        let losses = map_chunks(logits.len(), parts, |(chunk, rows): (usize, &mut [f32])| {
            let rows = rows.chunks_exact_mut(self.classes).zip(chunk * size..);
            let loss = |(row, index): (&mut [f32], usize)| {
                let loss = self.row_loss(index, row);
                if self.is_padding[index] { 0.0 } else { loss }
            };
            rows.map(loss).collect::<Vec<f64>>()
        });
        (losses.concat(), probabilities)
    }

    /// Returns the loss of a row, and replaces its logits by probabilities.
    ///
    /// `loss = -(1 - s) * w[t] * ln p[t] - s / classes * sum(w * ln p)` with smoothing `s`.
    fn row_loss(&self, index: usize, row: &mut [f32]) -> f64 {
        let target = self.targets[index];
        vectorize(
            #[inline(always)]
            || {
                let maximum = max(row);
                let sum = sum_of(row, |value| exp_nonpositive(value - maximum));
                let logarithm = libm::logf(sum);
                let log_probability = |value: f32| value - maximum - logarithm;
                let on_target = self.weight(target) * log_probability(row[target]);
                let mut loss = f64::from((1.0 - self.smoothing) * on_target);
                if self.smoothing > 0.0 {
                    let all = match &self.weights {
                        None => sum_of(row, log_probability),
                        Some(weights) => {
                            let terms = row.iter().zip(weights);
                            terms.map(|(value, weight)| weight * log_probability(*value)).sum()
                        }
                    };
                    loss += f64::from(self.smoothing / self.classes as f32 * all);
                }
                let reciprocal = 1.0 / sum;
                for value in row.iter_mut() {
                    *value = exp_nonpositive(*value - maximum) * reciprocal;
                }
                -loss
            },
        )
    }

    /// Replaces the probabilities of a row by the gradient of its loss, times `factor`.
    ///
    /// With the smoothed target `q` and `m = sum(q * w)`: `dx = m * p - q * w`.
    fn row_gradient(&self, index: usize, row: &mut [f32], factor: f32) {
        if self.is_padding[index] {
            return row.fill(0.0);
        }
        let target = self.targets[index];
        let spread = self.smoothing / self.classes as f32;
        let on_target = (1.0 - self.smoothing) * self.weight(target);
        let all = match &self.weights {
            None => self.classes as f32,
            Some(weights) => weights.iter().sum(),
        };
        let mass = (on_target + spread * all) * factor;
        for (class, value) in row.iter_mut().enumerate() {
            *value = mass * *value - spread * self.weight(class) * factor;
        }
        row[target] -= on_target * factor;
    }
}

struct CrossEntropyGradient {
    rows: Rows,
    probabilities: Vec<f32>,
    /// Divisor of the mean. `None` if each row has an output.
    normalizer: Option<f64>,
}

impl CrossEntropyGradient {
    /// Returns the factor of the gradient of a row's loss.
    fn factor(&self, row: usize, output: &[f32]) -> f32 {
        match self.normalizer {
            Some(normalizer) => (f64::from(output[0]) / normalizer) as f32,
            None => output[row],
        }
    }
}

impl ArrayGradient for CrossEntropyGradient {
    fn gradients(&self, output: &Array, _: &[bool]) -> Vec<Option<Array>> {
        let mut gradient = self.probabilities.clone();
        let (num, classes) = (gradient.len(), self.rows.classes);
        let size = chunk_rows(self.rows.targets.len());
        let parts = gradient.chunks_mut(size * classes).enumerate().collect();
        map_chunks(num, parts, |(chunk, rows): (usize, &mut [f32])| {
            for (row, index) in rows.chunks_exact_mut(classes).zip(chunk * size..) {
                self.rows.row_gradient(index, row, self.factor(index, output.values()));
            }
        });
        vec![Some(Array::from_vec(gradient, &[self.rows.targets.len(), classes]))]
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::loss::CrossEntropyLossConfig;

    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, device, run,
    };

    fn configs(classes: usize) -> Vec<CrossEntropyLossConfig> {
        let weights: Vec<f32> = (0..classes).map(|class| 0.5 + class as f32).collect();
        let plain = CrossEntropyLossConfig::new;
        vec![
            plain(),
            plain().with_weights(Some(weights.clone())),
            plain().with_smoothing(Some(0.1)),
            plain().with_pad_tokens(Some(vec![1])),
            plain().with_weights(Some(weights.clone())).with_smoothing(Some(0.3)),
            plain()
                .with_weights(Some(weights))
                .with_smoothing(Some(0.2))
                .with_pad_tokens(Some(vec![0, 2])),
        ]
    }

    fn targets(batch: usize, classes: usize) -> Vec<i64> {
        (0..batch).map(|row| (row * 7 % classes) as i64).collect()
    }

    fn target_tensor(batch: usize, classes: usize) -> Tensor<1, Int> {
        let data = burn::tensor::TensorData::new(targets(batch, classes), [batch]);
        Tensor::from_data(data, &device())
    }

    fn ours(
        batch: usize,
        classes: usize,
        config: &CrossEntropyLossConfig,
    ) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        let loss = config.init(&device());
        move |inputs: &[Tensor<1>]| {
            let logits = inputs[0].clone().reshape([batch, classes]);
            fused(&loss, &logits, &target_tensor(batch, classes), Reduction::Mean).unwrap()
        }
    }

    #[test]
    fn matches_burn_for_options() {
        for [batch, classes] in [[1, 3], [5, 4], [17, 10], [40, 33]] {
            for config in configs(classes) {
                let loss = config.init(&device());
                let burns = |inputs: &[Tensor<1>]| {
                    let logits = inputs[0].clone().reshape([batch, classes]);
                    loss.forward(logits, target_tensor(batch, classes))
                };
                if config.pad_tokens.is_some() && batch == 1 {
                    continue;
                }
                let name = format!("{batch} x {classes}, {config}");
                let case = Case::new(&[batch * classes]);
                assert_matches_burn(&name, &case, &ours(batch, classes, &config), &burns);
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for config in configs(4) {
            let reference = |inputs: &[Vec<f64>]| {
                let weight = |class: usize| match &config.weights {
                    Some(weights) => f64::from(weights[class]),
                    None => 1.0,
                };
                let smoothing = f64::from(config.smoothing.unwrap_or(0.0));
                let (mut loss, mut normalizer) = (0.0, 0.0);
                for (row, target) in inputs[0].chunks(4).zip(targets(5, 4)) {
                    let target = target as usize;
                    if config.pad_tokens.iter().flatten().any(|token| *token == target) {
                        continue;
                    }
                    let logarithm = row.iter().map(|x| x.exp()).sum::<f64>().ln();
                    for (class, x) in row.iter().enumerate() {
                        let on_target = if class == target { 1.0 - smoothing } else { 0.0 };
                        loss -= (on_target + smoothing / 4.0) * weight(class) * (x - logarithm);
                    }
                    normalizer += weight(target);
                }
                vec![loss / normalizer]
            };
            let case = Case::new(&[20]);
            assert_gradients(&config.to_string(), &case, &ours(5, 4, &config), &reference);
        }
    }

    #[test]
    fn threads_do_not_change_bits() {
        for config in configs(65) {
            let case = Case::new(&[1001 * 65]);
            assert_same_on_threads(&case, &ours(1001, 65, &config));
            let loss = config.init(&device());
            assert_same_on_threads(&case, &|inputs: &[Tensor<1>]| {
                let logits = inputs[0].clone().reshape([1001, 65]);
                fused(&loss, &logits, &target_tensor(1001, 65), Reduction::None).unwrap()
            });
        }
    }

    #[test]
    fn losses_of_samples_match_operators_of_burn() {
        for [batch, classes] in [[1, 3], [5, 4], [17, 10], [0, 3]] {
            for config in configs(classes) {
                let loss = config.init(&device());
                let logits = |inputs: &[Tensor<1>]| inputs[0].clone().reshape([batch, classes]);
                let targets = || target_tensor(batch, classes);
                let ours = |inputs: &[Tensor<1>]| {
                    fused(&loss, &logits(inputs), &targets(), Reduction::None).unwrap()
                };
                let burns = |inputs: &[Tensor<1>]| composed(&loss, logits(inputs), targets());
                let name = format!("{batch} x {classes}, {config}");
                let case = Case::new(&[batch * classes]);
                assert_matches_burn(&name, &case, &ours, &burns);
            }
        }
    }

    /// A sample of weight 2 counts as two samples, and one of weight 0 not at all.
    #[test]
    fn sample_weights_count_samples() {
        let (batch, classes) = (6, 4);
        let weights = [2.0, 0.0, 1.0, 1.0, 0.0, 2.0];
        let repeated: [i64; 6] = [0, 0, 2, 3, 5, 5];
        for config in configs(classes) {
            let loss = config.init(&device());
            let logits = |inputs: &[Tensor<1>]| inputs[0].clone().reshape([batch, classes]);
            let ours = |inputs: &[Tensor<1>]| {
                let weights = Tensor::<1>::from_floats(weights, &inputs[0].device());
                let targets = target_tensor(batch, classes);
                weighted_cross_entropy(&loss, logits(inputs), targets, weights)
            };
            let burns = |inputs: &[Tensor<1>]| {
                let rows = Tensor::<1, Int>::from_data(repeated, &inputs[0].device());
                let targets = target_tensor(batch, classes).select(0, rows.clone());
                loss.forward(logits(inputs).select(0, rows), targets)
            };
            let case = Case::new(&[batch * classes]);
            assert_matches_burn(&config.to_string(), &case, &ours, &burns);
        }
    }

    #[test]
    fn sample_weights_have_a_gradient() {
        let loss = CrossEntropyLossConfig::new().init(&device());
        let ours = |inputs: &[Tensor<1>]| {
            let (logits, weights) = (inputs[0].clone().reshape([3, 4]), inputs[1].clone());
            weighted_cross_entropy(&loss, logits, target_tensor(3, 4), weights + 2.0)
        };
        let reference = |inputs: &[Vec<f64>]| {
            let rows = inputs[0].chunks(4).zip(targets(3, 4)).zip(&inputs[1]);
            let terms = rows.map(|((row, target), weight)| {
                let logarithm = row.iter().map(|x| x.exp()).sum::<f64>().ln();
                ((weight + 2.0) * (logarithm - row[target as usize]), weight + 2.0)
            });
            let (losses, weights): (Vec<f64>, Vec<f64>) = terms.unzip();
            vec![losses.iter().sum::<f64>() / weights.iter().sum::<f64>()]
        };
        assert_gradients("weights", &Case::new(&[12, 3]), &ours, &reference);
    }

    /// A broadcast weight would count once in the divisor.
    #[test]
    #[should_panic(expected = "the weights have the shape [1], but the targets have 4 samples")]
    fn weight_for_all_samples_is_refused() {
        let loss = CrossEntropyLossConfig::new().init(&device());
        let (logits, weight) = (Tensor::zeros([4, 3], &device()), Tensor::ones([1], &device()));
        let _ = weighted_cross_entropy(&loss, logits, target_tensor(4, 3), weight);
    }

    /// The mean of burn's loss and of the composed losses agree, also for probabilities.
    #[test]
    fn composed_losses_match_loss_of_burn() {
        for config in configs(4) {
            for has_logits in [true, false] {
                let loss = config.clone().with_logits(has_logits).init(&device());
                let input = |inputs: &[Tensor<1>]| match has_logits {
                    true => inputs[0].clone().reshape([5, 4]),
                    false => activation::softmax(inputs[0].clone().reshape([5, 4]), 1),
                };
                let ours = |inputs: &[Tensor<1>]| {
                    let weights = Tensor::<1>::ones([5], &inputs[0].device());
                    weighted_cross_entropy(&loss, input(inputs), target_tensor(5, 4), weights)
                };
                let burns = |inputs: &[Tensor<1>]| loss.forward(input(inputs), target_tensor(5, 4));
                let name = format!("{config}, logits {has_logits}");
                assert_matches_burn(&name, &Case::new(&[20]), &ours, &burns);
            }
        }
    }

    #[test]
    fn zero_probabilities_have_the_loss_of_burn() {
        let loss = CrossEntropyLossConfig::new().with_logits(false).init(&device());
        for dtype in [FloatDType::F16, FloatDType::F32, FloatDType::F64] {
            let probabilities = Tensor::<2>::from_floats([[1.0, 0.0]], &device()).cast(dtype);
            let targets = Tensor::<1, Int>::from_data([1_i64], &device());
            let ours = cross_entropy_of_samples(&loss, probabilities.clone(), targets.clone());
            let burns = loss.forward(probabilities, targets);
            let [ours, burns]: [f32; 2] =
                [ours, burns].map(|loss| loss.cast(FloatDType::F32).into_scalar());
            assert!(ours.is_finite() && ours == burns, "{dtype:?}: {ours} instead of {burns}");
        }
    }

    #[test]
    fn infinite_logits_as_in_pytorch() {
        let check = |x: [f32; 3], expected: f32| {
            let case = Case::from_values(vec![x.to_vec()]);
            let loss = run(&case, &ours(1, 3, &CrossEntropyLossConfig::new())).output[0];
            assert!(loss == expected || (loss.is_nan() && expected.is_nan()), "{x:?}: {loss}");
        };
        let infinity = f32::INFINITY;
        check([0.0, -infinity, -infinity], 0.0);
        check([-infinity, 0.0, -infinity], infinity);
        check([infinity, 0.0, 0.0], f32::NAN);
        check([f32::NAN, 0.0, 0.0], f32::NAN);
    }

    #[test]
    fn empty_batch_gives_nan() {
        let outcome = run(&Case::new(&[0]), &ours(0, 3, &CrossEntropyLossConfig::new()));
        assert!(outcome.output[0].is_nan());
    }

    #[test]
    fn probabilities_and_unknown_classes_are_left_to_burn() {
        let logits = Tensor::<2>::ones([2, 3], &device());
        let is_fused = |config: CrossEntropyLossConfig, targets: [i64; 2]| {
            let targets = Tensor::<1, Int>::from_data(targets, &device());
            fused(&config.init(&device()), &logits, &targets, Reduction::Mean).is_some()
        };
        assert!(is_fused(CrossEntropyLossConfig::new(), [0, 2]));
        assert!(!is_fused(CrossEntropyLossConfig::new(), [0, 3]));
        assert!(!is_fused(CrossEntropyLossConfig::new(), [-1, 2]));
        assert!(!is_fused(CrossEntropyLossConfig::new().with_logits(false), [0, 2]));
    }
}
