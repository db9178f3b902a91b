//! Fused forward passes of burn's modules, which keep their parameters and records.

use burn::module::RunningState;
use burn::nn::conv::Conv2d;
use burn::nn::loss::CrossEntropyLoss;
use burn::nn::pool::{AvgPool2d, MaxPool2d};
use burn::nn::{BatchNorm, Embedding, LayerNorm, Linear, PaddingConfig2d};
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{Int, Tensor};

use crate::activation::Activation;
use crate::batch_norm::{normalize, normalize_train};
use crate::statistics::{is_half, record_use, to_single};

/// Fused forward pass of [`Linear`].
pub trait LinearExt {
    /// Returns `activation(x * weight + bias)`. See [`linear`](crate::linear()).
    fn forward_fused<const D: usize>(&self, x: Tensor<D>, activation: Activation) -> Tensor<D>;
}

impl LinearExt for Linear {
    fn forward_fused<const D: usize>(&self, x: Tensor<D>, activation: Activation) -> Tensor<D> {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        crate::linear(x, self.weight.val(), bias, activation)
    }
}

/// Fused forward pass of [`LayerNorm`].
pub trait LayerNormExt {
    /// Returns the layer normalization of `x`. See [`layer_norm`](crate::layer_norm()).
    ///
    /// burn keeps the module's epsilon private, so `epsilon` repeats the value of its
    /// configuration, by default `1e-5`.
    fn forward_fused<const D: usize>(&self, x: Tensor<D>, epsilon: f64) -> Tensor<D>;
}

impl LayerNormExt for LayerNorm {
    fn forward_fused<const D: usize>(&self, x: Tensor<D>, epsilon: f64) -> Tensor<D> {
        let beta = self.beta.as_ref().map(|beta| beta.val());
        crate::layer_norm(x, self.gamma.val(), beta, epsilon)
    }
}

/// Fused forward pass of [`BatchNorm`].
pub trait BatchNormExt {
    /// Returns the batch normalization of `x`, and updates the running statistics in training.
    ///
    /// As in burn's module, training needs a device with autodiff and a module that is not
    /// frozen. See [`batch_norm`](crate::batch_norm()) and
    /// [`batch_norm_train`](crate::batch_norm_train).
    ///
    /// An input in half precision is normalized in `f32`. Running statistics in `f32` then stay in
    /// `f32`, as with PyTorch's autocast; burn's own `forward` does not support this mixture.
    fn forward_fused<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward_activated(x, Activation::Identity)
    }

    /// Returns `activation` of [`forward_fused`](Self::forward_fused), and updates the same
    /// statistics. In single precision, a ReLU needs no further pass over the values. GELU, and
    /// both in half precision, are another operator.
    fn forward_activated<const D: usize>(&self, x: Tensor<D>, activation: Activation) -> Tensor<D>;
}

impl BatchNormExt for BatchNorm {
    fn forward_activated<const D: usize>(&self, x: Tensor<D>, activation: Activation) -> Tensor<D> {
        let (gamma, beta, device) = (self.gamma.val(), self.beta.val(), x.device());
        let has_channels = D >= 2 && x.dims()[1] == gamma.dims()[0];
        if !has_channels {
            // Reports the error.
            return activation.apply_burn(self.forward(x));
        }
        if is_half(x.dtype()) {
            record_use(&self.running_mean);
        }
        if !(device.is_autodiff() && self.training.is_enabled()) {
            let mean = self.running_mean.value().to_device(&device);
            let variance = self.running_var.value().to_device(&device);
            return normalize(x, [gamma, beta], [mean, variance], self.epsilon, activation);
        }
        let result = normalize_train(x, [gamma, beta], self.epsilon, activation);
        let update = |running: &RunningState<Tensor<1>>, of_batch: Tensor<1>| {
            let old = running.value_sync().to_device(&device);
            let dtype = old.dtype();
            let new = to_single(old).mul_scalar(1.0 - self.momentum)
                + of_batch.detach().mul_scalar(self.momentum);
            running.update(new.cast(dtype).detach());
        };
        update(&self.running_mean, result.mean);
        update(&self.running_var, result.variance);
        result.output
    }
}

/// Fused forward pass of [`Embedding`].
pub trait EmbeddingExt {
    /// Returns the vector of each index. See [`embedding`](crate::embedding()).
    ///
    /// # Shapes
    ///
    /// `indices` `[batch, len]`, result `[batch, len, d_model]`.
    fn forward_fused(&self, indices: Tensor<2, Int>) -> Tensor<3>;
}

impl EmbeddingExt for Embedding {
    fn forward_fused(&self, indices: Tensor<2, Int>) -> Tensor<3> {
        crate::embedding(self.weight.val(), indices)
    }
}

/// Fused forward pass of [`Conv2d`].
pub trait Conv2dExt {
    /// Returns `activation` of the convolution of `x`. See [`conv2d`](crate::conv2d()).
    fn forward_fused(&self, x: Tensor<4>, activation: Activation) -> Tensor<4>;

    /// Returns the same as `pool.forward_fused(self.forward_fused(x, activation))`, often in less
    /// time and memory. See [`conv2d_max_pool2d`](crate::conv2d_max_pool2d()).
    fn forward_pooled(&self, x: Tensor<4>, activation: Activation, pool: &MaxPool2d) -> Tensor<4>;
}

impl Conv2dExt for Conv2d {
    fn forward_fused(&self, x: Tensor<4>, activation: Activation) -> Tensor<4> {
        let (bias, options) = (self.bias.as_ref().map(|bias| bias.val()), conv_options(self, &x));
        crate::conv2d(x, self.weight.val(), bias, options, activation)
    }

    fn forward_pooled(&self, x: Tensor<4>, activation: Activation, pool: &MaxPool2d) -> Tensor<4> {
        if matches!(pool.padding, PaddingConfig2d::Same) {
            // The padding depends on the size of the convolution's output.
            return pool.forward_fused(self.forward_fused(x, activation));
        }
        let (bias, options) = (self.bias.as_ref().map(|bias| bias.val()), conv_options(self, &x));
        let pool = max_pool_options(pool, x.dims());
        crate::conv2d_max_pool2d(x, self.weight.val(), bias, options, activation, pool)
    }
}

fn conv_options(conv: &Conv2d, x: &Tensor<4>) -> ConvOptions<2> {
    let padding = padding_pairs(&conv.padding, x.dims(), conv.kernel_size, conv.stride);
    ConvOptions::new_with_padding(conv.stride, padding, conv.dilation, conv.groups)
}

/// Fused forward pass of [`MaxPool2d`].
pub trait MaxPool2dExt {
    /// Returns the maxima of the windows of `x`. See [`max_pool2d`](crate::max_pool2d()).
    fn forward_fused(&self, x: Tensor<4>) -> Tensor<4>;
}

impl MaxPool2dExt for MaxPool2d {
    fn forward_fused(&self, x: Tensor<4>) -> Tensor<4> {
        let options = max_pool_options(self, x.dims());
        crate::max_pool2d(x, options)
    }
}

fn max_pool_options(pool: &MaxPool2d, shape: [usize; 4]) -> MaxPoolOptions<2> {
    let padding = padding_pairs(&pool.padding, shape, pool.kernel_size, pool.stride);
    MaxPoolOptions::new(pool.kernel_size)
        .with_stride(pool.stride)
        .with_padding_pairs(padding)
        .with_dilation(pool.dilation)
        .with_ceil_mode(pool.ceil_mode)
}

/// Fused forward pass of [`AvgPool2d`].
pub trait AvgPool2dExt {
    /// Returns the means of the windows of `x`. See [`avg_pool2d`](crate::avg_pool2d()).
    fn forward_fused(&self, x: Tensor<4>) -> Tensor<4>;
}

impl AvgPool2dExt for AvgPool2d {
    fn forward_fused(&self, x: Tensor<4>) -> Tensor<4> {
        let padding = padding_pairs(&self.padding, x.dims(), self.kernel_size, self.stride);
        let options = AvgPoolOptions::new(self.kernel_size)
            .with_stride(self.stride)
            .with_padding_pairs(padding)
            .with_count_include_pad(self.count_include_pad)
            .with_ceil_mode(self.ceil_mode);
        crate::avg_pool2d(x, options)
    }
}

/// Fused forward pass of [`CrossEntropyLoss`].
pub trait CrossEntropyLossExt {
    /// Returns the mean cross-entropy. See [`cross_entropy`](crate::cross_entropy()).
    fn forward_fused(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1>;

    /// Returns the mean cross-entropy of samples with weights. See
    /// [`weighted_cross_entropy`](crate::weighted_cross_entropy).
    fn forward_weighted(
        &self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
        sample_weights: Tensor<1>,
    ) -> Tensor<1>;
}

impl CrossEntropyLossExt for CrossEntropyLoss {
    fn forward_fused(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        crate::cross_entropy(self, logits, targets)
    }

    fn forward_weighted(
        &self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
        sample_weights: Tensor<1>,
    ) -> Tensor<1> {
        crate::weighted_cross_entropy(self, logits, targets, sample_weights)
    }
}

/// Returns the padding before and after each axis. burn keeps its own function private.
fn padding_pairs(
    padding: &PaddingConfig2d,
    [.., height, width]: [usize; 4],
    kernel: [usize; 2],
    stride: [usize; 2],
) -> [(usize, usize); 2] {
    match padding {
        PaddingConfig2d::Valid => [(0, 0); 2],
        PaddingConfig2d::Same => {
            let same = |len: usize, kernel: usize, stride: usize| {
                let num_windows = len.div_ceil(stride);
                let span = num_windows.saturating_sub(1) * stride + kernel;
                let total = if len == 0 { 0 } else { span.saturating_sub(len) };
                (total / 2, total - total / 2)
            };
            [same(height, kernel[0], stride[0]), same(width, kernel[1], stride[1])]
        }
        PaddingConfig2d::Explicit(top, left, bottom, right) => [(*top, *bottom), (*left, *right)],
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::nn::conv::Conv2dConfig;
    use burn::nn::pool::{AvgPool2dConfig, MaxPool2dConfig};
    use burn::nn::{BatchNormConfig, EmbeddingConfig, LayerNormConfig, LinearConfig};
    use burn::tensor::{DType, Distribution, TensorData};

    use super::*;
    use crate::testing::{assert_close_tensors as assert_close, device, random};

    const PADDINGS: [PaddingConfig2d; 3] =
        [PaddingConfig2d::Valid, PaddingConfig2d::Same, PaddingConfig2d::Explicit(1, 0, 1, 1)];

    #[test]
    fn windows_of_modules_match_burn() {
        let x = Tensor::<4>::random([2, 4, 7, 6], Distribution::Default, &device());
        for padding in PADDINGS {
            for stride in [[1, 1], [2, 3], [3, 2]] {
                let name = format!("{padding:?}, {stride:?}");
                let conv = Conv2dConfig::new([4, 6], [3, 2]).with_stride(stride).with_groups(2);
                let conv = conv.with_padding(padding.clone()).init(&device());
                assert_close(
                    &name,
                    conv.forward_fused(x.clone(), Activation::Identity),
                    conv.forward(x.clone()),
                );
                let pool = MaxPool2dConfig::new([3, 2]).with_strides(stride);
                let pool = pool.with_padding(padding.clone()).init();
                assert_close(&name, pool.forward_fused(x.clone()), pool.forward(x.clone()));
                let pairs = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]);
                let pairs = pairs.with_padding(padding.clone()).init();
                assert_close(
                    &name,
                    conv.forward_pooled(x.clone(), Activation::Identity, &pairs),
                    pairs.forward(conv.forward(x.clone())),
                );
                let pool = AvgPool2dConfig::new([3, 2]).with_strides(stride);
                let pool = pool.with_padding(padding.clone()).init();
                assert_close(&name, pool.forward_fused(x.clone()), pool.forward(x.clone()));
            }
        }
    }

    #[test]
    fn linear_and_layer_norm_match_burn() {
        let x = Tensor::<3>::random([2, 3, 8], Distribution::Default, &device());
        let linear = LinearConfig::new(8, 5).init(&device());
        let ours = linear.forward_fused(x.clone(), Activation::Identity);
        assert_close("linear", ours, linear.forward(x.clone()));
        let norm = LayerNormConfig::new(8).with_epsilon(0.1).init(&device());
        assert_close("norm", norm.forward_fused(x.clone(), 0.1), norm.forward(x));
    }

    #[test]
    fn cross_entropy_matches_burn() {
        let loss = CrossEntropyLoss::new(None, &device());
        let logits = Tensor::<2>::random([3, 4], Distribution::Default, &device());
        let targets = Tensor::<1, Int>::from_data([0_i64, 3, 1], &device());
        let ours = loss.forward_fused(logits.clone(), targets.clone());
        assert_close("loss", ours, loss.forward(logits, targets));
    }

    /// Values of the running mean and variance.
    fn statistics(norm: &BatchNorm) -> [Vec<f32>; 2] {
        [&norm.running_mean, &norm.running_var]
            .map(|state| state.value_sync().into_data().try_to_vec().unwrap())
    }

    #[test]
    fn running_statistics_match_burn() {
        let device = device().autodiff();
        let config = BatchNormConfig::new(3).with_momentum(0.3).with_epsilon(1e-3);
        let (ours, burns) = (config.init(&device), config.init(&device));
        for seed in 0..4 {
            let x: Tensor<4> = random([5, 3, 2, 7], seed).into_tensor(&device);
            let x = x * (seed as f32 + 0.5) + 1.0;
            assert_close("training", ours.forward_fused(x.clone()), burns.forward(x));
        }
        for (ours, burns) in
            statistics(&ours).iter().flatten().zip(statistics(&burns).iter().flatten())
        {
            assert!((ours - burns).abs() < 1e-6, "{ours} instead of {burns}");
        }
        let x: Tensor<3> = random([2, 3, 5], 9).into_tensor(&device.without_autodiff());
        let (ours, burns) = (ours.valid(), burns.valid());
        let before = statistics(&ours);
        assert_close("evaluation", ours.forward_fused(x.clone()), burns.forward(x));
        assert_eq!(statistics(&ours), before);
    }

    #[test]
    fn frozen_batch_norm_keeps_its_statistics() {
        let device = device().autodiff();
        let norm = BatchNormConfig::new(3).init(&device).freeze();
        let x: Tensor<2> = random([5, 3], 1).into_tensor(&device);
        let before = statistics(&norm);
        assert_close("frozen", norm.forward_fused(x.clone()), norm.forward(x));
        assert_eq!(statistics(&norm), before);
    }

    /// State of a batch normalization.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum State {
        Training,
        Frozen,
        Evaluation,
    }

    /// Returns output, gradient of the input and running statistics, for bitwise comparison.
    fn bits_of(
        state: State,
        dtype: DType,
        batch: usize,
        forward: impl Fn(&BatchNorm, Tensor<3>) -> Tensor<3>,
    ) -> Vec<Vec<Option<u32>>> {
        let plain = device();
        let autodiff = plain.clone().autodiff();
        let norm = BatchNormConfig::new(3).init(&autodiff);
        let (norm, device) = match state {
            State::Training => (norm, autodiff),
            State::Frozen => (norm.freeze(), autodiff),
            State::Evaluation => (norm.valid(), plain),
        };
        let mut x: Tensor<3> = random([batch, 3, 50], 1).into_tensor(&device);
        if batch > 0 {
            // One channel has infinities. Its mean is NaN.
            x = x * Tensor::from_data([[[1.0], [1.0], [f32::INFINITY]]], &device);
        }
        if device.is_autodiff() {
            x = x.require_grad();
        }
        let y = forward(&norm, x.clone().cast(dtype));
        assert_eq!(y.dtype(), dtype);
        let values = |tensor: Tensor<3>| tensor.cast(DType::F32).into_data().try_to_vec().unwrap();
        let mut all = vec![values(y.clone())];
        if device.is_autodiff() && batch > 0 {
            let weights: Tensor<3> = random([batch, 3, 50], 2).into_tensor(&device);
            let gradients = (y.cast(DType::F32) * weights).sum().backward();
            all.push(x.grad(&gradients).unwrap().into_data().try_to_vec().unwrap());
        }
        all.extend(statistics(&norm));
        // Processors do not define which NaN is the result of an operation.
        let bits = |value: f32| if value.is_nan() { None } else { Some(value.to_bits()) };
        all.into_iter().map(|values| values.into_iter().map(bits).collect()).collect()
    }

    #[test]
    fn activated_batch_norm_is_bit_identical_to_two_operators() {
        for state in [State::Training, State::Frozen, State::Evaluation] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for (activation, batch) in
                    [(Activation::Relu, 4), (Activation::Gelu, 4), (Activation::Relu, 0)]
                {
                    let ours = bits_of(state, dtype, batch, |norm: &BatchNorm, x| {
                        norm.forward_activated(x, activation)
                    });
                    let expected = bits_of(state, dtype, batch, |norm: &BatchNorm, x| {
                        activation.apply_burn(norm.forward_fused(x))
                    });
                    assert_eq!(ours, expected, "{state:?}, {dtype:?}, {activation:?}, {batch}");
                }
            }
        }
    }

    #[test]
    fn embedding_matches_burn() {
        let embedding = EmbeddingConfig::new(5, 3).init(&device());
        let indices = TensorData::new(vec![4_i64, 0, 0, 2, 4, 1], [2, 3]);
        let indices = Tensor::<2, Int>::from_data(indices, &device());
        let ours = embedding.forward_fused(indices.clone());
        assert_close("embedding", ours, embedding.forward(indices));
    }
}
