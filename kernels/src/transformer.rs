//! Fused forward passes of burn's attention and transformer modules.

use burn::nn::activation::Activation as BurnActivation;
use burn::nn::attention::{MhaInput, MultiHeadAttention};
use burn::nn::transformer::{PositionWiseFeedForward, TransformerEncoder, TransformerEncoderLayer};
use burn::nn::{Dropout, Gelu, Linear};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor};

use crate::activation::Activation;
use crate::is_enabled;
use crate::modules::{LayerNormExt, LinearExt};
use crate::tape::Operand;

/// Positions that attention hides. By default, each query sees all keys.
#[derive(Clone, Debug, Default)]
pub struct AttentionMask {
    is_causal: bool,
    padding: Option<Tensor<2, Bool>>,
    positions: Option<Tensor<3, Bool>>,
}

impl AttentionMask {
    /// Hides all keys after the position of the query. The last query sees all keys.
    ///
    /// This is faster than a tensor of `generate_autoregressive_mask`.
    pub fn causal() -> Self {
        Self { is_causal: true, ..Self::default() }
    }

    /// Also hides the keys where `padding` `[batch, keys]` is `true`.
    pub fn with_padding(self, padding: Tensor<2, Bool>) -> Self {
        Self { padding: Some(padding), ..self }
    }

    /// Also hides the keys where `positions` `[batch, queries, keys]` is `true`.
    pub fn with_positions(self, positions: Tensor<3, Bool>) -> Self {
        Self { positions: Some(positions), ..self }
    }

    /// Returns `true` if a query may see no key.
    fn may_hide_all_keys(&self, queries: usize, keys: usize) -> bool {
        let hides_some = self.padding.is_some() || self.positions.is_some();
        hides_some || (self.is_causal && queries > keys)
    }

    /// Returns the mask for attention over several heads, without the causal part.
    fn of_heads(&self, [batch, queries, keys]: [usize; 3]) -> Option<Tensor<4, Bool>> {
        let padding = self.padding.clone().map(|mask| mask.reshape([batch, 1, 1, keys]));
        let positions = self.positions.clone().map(|mask| mask.reshape([batch, 1, queries, keys]));
        match (padding, positions) {
            (Some(padding), Some(positions)) => {
                Some(padding.expand([batch, 1, queries, keys]).bool_or(positions))
            }
            (padding, positions) => padding.or(positions),
        }
    }

    /// Returns the input of burn's module with the same mask.
    fn apply_burn(&self, query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> MhaInput {
        let ([batch, queries, _], keys) = (query.dims(), key.dims()[1]);
        let future = self.is_causal.then(|| {
            let offset = keys as i64 - queries as i64;
            let future = Tensor::<2, Bool>::tril_mask([queries, keys], offset, &query.device());
            future.unsqueeze::<3>().expand([batch, queries, keys])
        });
        let hidden = match (future, self.positions.clone()) {
            (Some(future), Some(positions)) => Some(future.bool_or(positions)),
            (future, positions) => future.or(positions),
        };
        let mut input = MhaInput::new(query, key, value);
        if let Some(padding) = &self.padding {
            input = input.mask_pad(padding.clone());
        }
        match hidden {
            Some(hidden) => input.mask_attn(hidden),
            None => input,
        }
    }
}

/// Fused forward pass of [`MultiHeadAttention`].
pub trait MultiHeadAttentionExt {
    /// Returns the context. burn's module returns the probabilities as well.
    ///
    /// Uses [`attention`](crate::attention()), during training with the module's dropout; see
    /// [`attention_with_dropout`](crate::attention_with_dropout). A module with `quiet_softmax`
    /// is left to burn. A query without visible keys has zeros as the weighted mean of the
    /// values, where burn's module gives the mean of all values.
    ///
    /// # Shapes
    ///
    /// `query` `[batch, queries, d_model]`, `key` and `value` `[batch, keys, d_model]`, result as
    /// `query`.
    fn forward_fused(
        &self,
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        mask: &AttentionMask,
    ) -> Tensor<3>;
}

impl MultiHeadAttentionExt for MultiHeadAttention {
    fn forward_fused(
        &self,
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        mask: &AttentionMask,
    ) -> Tensor<3> {
        let ([_, queries, d_model], [batch, keys, _]) = (query.dims(), key.dims());
        let has_other_shapes = key.dims() != value.dims()
            || key.dims() != [batch, keys, d_model]
            || d_model != self.d_model;
        // burn's attention without gradients has kernels for GPUs that compute in half precision.
        // It has no zeros for a query without visible keys.
        let is_evaluation = Operand::new(&query).is_none()
            && !query.device().is_autodiff()
            && !mask.may_hide_all_keys(queries, keys);
        if self.quiet_softmax || has_other_shapes || is_evaluation || !is_enabled() {
            return self.forward(mask.apply_burn(query, key, value)).context;
        }
        attend(self, [query, key, value], mask, Order::BatchFirst)
    }
}

/// Order of the first two dimensions of `[batch, len, d_model]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    BatchFirst,
    /// Products of GPUs then read and write heads without copies.
    LenFirst,
}

/// Returns the context of query, key and value, in their order.
fn attend(
    module: &MultiHeadAttention,
    [query, key, value]: [Tensor<3>; 3],
    mask: &AttentionMask,
    order: Order,
) -> Tensor<3> {
    let shape = query.dims();
    let heads = |x: Tensor<3>, linear: &Linear| {
        let [first, second, _] = x.dims();
        let x = linear.forward_fused(x, Activation::Identity);
        let x = x.reshape([first, second, module.n_heads, module.d_k]);
        match order {
            Order::BatchFirst => x.swap_dims(1, 2),
            Order::LenFirst => x.permute([1, 2, 0, 3]),
        }
    };
    let query = heads(query, &module.query);
    let (key, value) = (heads(key, &module.key), heads(value, &module.value));
    let [batch, _, queries, _] = query.dims();
    let hidden = mask.of_heads([batch, queries, key.dims()[2]]);
    let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: mask.is_causal };
    let dropout = probability(&module.dropout, &query);
    let context = crate::attention_with_dropout(query, key, value, hidden, options, dropout);
    let context = match order {
        Order::BatchFirst => context.swap_dims(1, 2),
        Order::LenFirst => context.permute([2, 0, 1, 3]),
    };
    module.output.forward_fused(context.reshape(shape), Activation::Identity)
}

/// Returns the probability with which the module drops values of `x`: 0 except in training.
fn probability<const D: usize>(dropout: &Dropout, x: &Tensor<D>) -> f64 {
    if dropout.training.is_enabled() && x.device().is_autodiff() { dropout.prob } else { 0.0 }
}

/// Fused forward pass of [`PositionWiseFeedForward`].
pub trait PositionWiseFeedForwardExt {
    /// Returns both linear layers with activation and dropout between them. Activations other
    /// than ReLU and GELU are computed by burn.
    ///
    /// # Shapes
    ///
    /// `x` and result `[.., d_model]`.
    fn forward_fused<const D: usize>(&self, x: Tensor<D>) -> Tensor<D>;
}

impl PositionWiseFeedForwardExt for PositionWiseFeedForward {
    fn forward_fused<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let x = match &self.activation {
            BurnActivation::Gelu(Gelu { approximate: false }) => {
                self.linear_inner.forward_fused(x, Activation::Gelu)
            }
            BurnActivation::Relu(_) => self.linear_inner.forward_fused(x, Activation::Relu),
            other => other.forward(self.linear_inner.forward_fused(x, Activation::Identity)),
        };
        self.linear_outer.forward_fused(self.dropout.forward(x), Activation::Identity)
    }
}

/// Fused forward pass of [`TransformerEncoderLayer`].
pub trait TransformerEncoderLayerExt {
    /// Returns the layer's output. `epsilon` repeats the value of the configuration
    /// (`layer_norm_eps`, by default `1e-5`). See [`MultiHeadAttentionExt`] for the mask.
    ///
    /// # Shapes
    ///
    /// `x` and result `[batch, len, d_model]`.
    fn forward_fused(&self, x: Tensor<3>, mask: &AttentionMask, epsilon: f64) -> Tensor<3>;
}

impl TransformerEncoderLayerExt for TransformerEncoderLayer {
    fn forward_fused(&self, x: Tensor<3>, mask: &AttentionMask, epsilon: f64) -> Tensor<3> {
        forward_layer(self, x, epsilon, |x| self.mha.forward_fused(x.clone(), x.clone(), x, mask))
    }
}

/// Returns the output of a layer, given its attention.
fn forward_layer(
    layer: &TransformerEncoderLayer,
    x: Tensor<3>,
    epsilon: f64,
    attention: impl Fn(Tensor<3>) -> Tensor<3>,
) -> Tensor<3> {
    let attend = |x: Tensor<3>| layer.dropout.forward(attention(x));
    let feed = |x: Tensor<3>| layer.dropout.forward(layer.pwff.forward_fused(x));
    // burn's names: `norm_2` belongs to the attention, and `norm_1` to the feed-forward part.
    if layer.norm_first {
        let x = x.clone() + attend(layer.norm_2.forward_fused(x, epsilon));
        x.clone() + feed(layer.norm_1.forward_fused(x, epsilon))
    } else {
        let x = layer.norm_1.forward_fused(x.clone() + attend(x), epsilon);
        layer.norm_2.forward_fused(x.clone() + feed(x), epsilon)
    }
}

/// Fused forward pass of [`TransformerEncoder`].
pub trait TransformerEncoderExt {
    /// Returns the output of all layers. See [`TransformerEncoderLayerExt`].
    ///
    /// # Shapes
    ///
    /// `x` and result `[batch, len, d_model]`.
    fn forward_fused(&self, x: Tensor<3>, mask: &AttentionMask, epsilon: f64) -> Tensor<3>;
}

impl TransformerEncoderExt for TransformerEncoder {
    fn forward_fused(&self, x: Tensor<3>, mask: &AttentionMask, epsilon: f64) -> Tensor<3> {
        let Some(x) = len_first(self, &x) else {
            return self.layers.iter().fold(x, |x, layer| layer.forward_fused(x, mask, epsilon));
        };
        let x = self.layers.iter().fold(x, |x, layer| {
            forward_layer(layer, x, epsilon, |x| {
                attend(&layer.mha, [x.clone(), x.clone(), x], mask, Order::LenFirst)
            })
        });
        x.swap_dims(0, 1)
    }
}

/// Returns `x` in [`Order::LenFirst`], if all layers train on a GPU and can use this order.
#[cfg(feature = "cubecl")]
fn len_first(encoder: &TransformerEncoder, x: &Tensor<3>) -> Option<Tensor<3>> {
    let fits = |layer: &TransformerEncoderLayer| {
        !layer.mha.quiet_softmax && layer.mha.d_model == x.dims()[2]
    };
    let fits = x.device().is_autodiff() && encoder.layers.iter().all(fits);
    if fits { crate::gpu::swap_first(x) } else { None }
}

#[cfg(not(feature = "cubecl"))]
fn len_first(_: &TransformerEncoder, _: &Tensor<3>) -> Option<Tensor<3>> {
    None
}

#[cfg(test)]
mod tests {
    use burn::module::{Module, ModuleMapper, Param};
    use burn::nn::activation::ActivationConfig;
    use burn::nn::attention::{MultiHeadAttentionConfig, generate_autoregressive_mask};
    use burn::nn::transformer::{
        PositionWiseFeedForwardConfig, TransformerEncoderConfig, TransformerEncoderInput,
    };
    use burn::tensor::{DType, TensorData};

    use super::*;
    use crate::testing::{assert_close_tensors, device, random};

    const EPSILON: f64 = 1e-5;

    fn booleans<const D: usize>(shape: [usize; D]) -> Tensor<D, Bool> {
        let num = shape.iter().product();
        // Never the first key, so that each query sees a key.
        let len = shape[D - 1];
        let hidden = (0..num).map(|index| index % len > 0 && index % 3 == 1).collect::<Vec<_>>();
        Tensor::from_data(TensorData::new(hidden, shape), &device())
    }

    fn masks([batch, queries, keys]: [usize; 3]) -> Vec<AttentionMask> {
        let (padding, positions) = (booleans([batch, keys]), booleans([batch, queries, keys]));
        vec![
            AttentionMask::default(),
            AttentionMask::causal(),
            AttentionMask::default().with_padding(padding.clone()),
            AttentionMask::default().with_positions(positions.clone()),
            AttentionMask::causal().with_padding(padding).with_positions(positions),
        ]
    }

    #[test]
    fn attention_with_masks_matches_burn() {
        let (batch, queries, keys) = (2, 3, 5);
        for is_quiet in [false, true] {
            let config = MultiHeadAttentionConfig::new(8, 2).with_quiet_softmax(is_quiet);
            let module = config.init(&device());
            let query: Tensor<3> = random([batch, queries, 8], 1).into_tensor(&device());
            let key: Tensor<3> = random([batch, keys, 8], 2).into_tensor(&device());
            let value: Tensor<3> = random([batch, keys, 8], 3).into_tensor(&device());
            for mask in masks([batch, queries, keys]) {
                let ours = module.forward_fused(query.clone(), key.clone(), value.clone(), &mask);
                let input = mask.apply_burn(query.clone(), key.clone(), value.clone());
                let burns = module.forward(input).context;
                assert_close_tensors(&format!("quiet {is_quiet}, {mask:?}"), ours, burns);
            }
        }
    }

    struct ToBf16;

    impl ModuleMapper for ToBf16 {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, tensor, mapper) = param.consume();
            Param::from_mapped_value(id, tensor.cast(DType::BF16), mapper)
        }
    }

    /// Operators in bf16 are not fused.
    #[test]
    fn half_precision_is_near_single_precision() {
        let device = device().autodiff();
        let config = TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
        let module = config.with_norm_first(true).init(&device);
        let half = module.clone().map(&mut ToBf16);
        let x: Tensor<3> = random([2, 5, 8], 1).into_tensor(&device);
        for mask in [AttentionMask::causal(), masks([2, 5, 5]).remove(4)] {
            let exact = module.forward_fused(x.clone(), &mask, EPSILON);
            let ours = half.forward_fused(x.clone().cast(DType::BF16), &mask, EPSILON);
            let ours = ours.cast(DType::F32);
            let error = (ours - exact).abs().max().into_scalar::<f32>();
            // A wrong result differs by about 1.
            assert!(error > 0.0 && error < 0.2, "{error}");
        }
    }

    /// The bias of the output layer remains.
    #[test]
    fn query_without_visible_keys_has_zeros_without_gradients() {
        for device in [device(), device().autodiff()] {
            let module = MultiHeadAttentionConfig::new(8, 2).init(&device).map(&mut ToBf16);
            let [x, memory] = [3, 5].map(|len| {
                let x: Tensor<3> = random([2, len, 8], len as u64).into_tensor(&device);
                x.cast(DType::BF16)
            });
            let padding = TensorData::new(vec![true; 10], [2, 5]);
            let padding = Tensor::<2, Bool>::from_data(padding, &device);
            let mask = AttentionMask::default().with_padding(padding);
            let ours = module.forward_fused(x, memory.clone(), memory, &mask);
            let bias = module.output.bias.as_ref().unwrap().val();
            let expected = bias.reshape([1, 1, 8]).expand([2, 3, 8]);
            let error = (ours - expected).cast(DType::F32).abs().max().into_scalar::<f32>();
            assert_eq!(error, 0.0);
        }
    }

    #[test]
    fn causal_mask_is_that_of_burn() {
        let x: Tensor<3> = random([2, 4, 8], 1).into_tensor(&device());
        let module = MultiHeadAttentionConfig::new(8, 2).init(&device());
        let mask = generate_autoregressive_mask(2, 4, &device());
        let burns = module.forward(MhaInput::self_attn(x.clone()).mask_attn(mask)).context;
        let ours = module.forward_fused(x.clone(), x.clone(), x, &AttentionMask::causal());
        assert_close_tensors("causal", ours, burns);
    }

    #[test]
    fn feed_forward_with_activations_matches_burn() {
        for activation in [
            ActivationConfig::Gelu,
            ActivationConfig::GeluApproximate,
            ActivationConfig::Relu,
            ActivationConfig::Tanh,
        ] {
            let name = format!("{activation:?}");
            let config = PositionWiseFeedForwardConfig::new(6, 9).with_activation(activation);
            let module = config.init(&device());
            let x: Tensor<3> = random([2, 3, 6], 1).into_tensor(&device());
            assert_close_tensors(&name, module.forward_fused(x.clone()), module.forward(x));
        }
    }

    /// Outputs and gradients of an encoder without dropout.
    #[test]
    fn encoder_matches_burn() {
        let device = device().autodiff();
        for norm_first in [false, true] {
            let config = TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0);
            let module = config.with_norm_first(norm_first).init(&device);
            let x: Tensor<3> = random([2, 5, 8], 1).into_tensor(&device);
            let x = x.require_grad();
            let mask = generate_autoregressive_mask(2, 5, &device);
            let input = TransformerEncoderInput::new(x.clone()).mask_attn(mask);
            let burns = module.forward(input);
            let ours = module.forward_fused(x.clone(), &AttentionMask::causal(), EPSILON);
            let weights: Tensor<3> = random([2, 5, 8], 2).into_tensor(&device);
            let gradient = |y: Tensor<3>| {
                x.grad(&(y * weights.clone()).sum().backward()).expect("the input has a gradient")
            };
            let name = format!("norm first: {norm_first}");
            assert_close_tensors(&name, ours.clone().inner(), burns.clone().inner());
            assert_close_tensors(&name, gradient(ours), gradient(burns));
        }
    }

    #[test]
    fn dropout_is_active_only_in_training() {
        let module =
            MultiHeadAttentionConfig::new(8, 2).with_dropout(0.5).init(&device().autodiff());
        let x: Tensor<3> = random([2, 5, 8], 1).into_tensor(&device().autodiff());
        let y = |module: &MultiHeadAttention, x: &Tensor<3>| {
            let mask = AttentionMask::default();
            let y = module.forward_fused(x.clone(), x.clone(), x.clone(), &mask);
            y.into_data().try_to_vec::<f32>().unwrap()
        };
        assert_ne!(y(&module, &x), y(&module, &x));
        let (module, x) = (module.valid(), x.inner());
        assert_eq!(y(&module, &x), y(&module, &x));
    }
}
