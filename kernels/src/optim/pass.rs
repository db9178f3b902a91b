//! One pass over a parameter, its gradient and its state.

use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::tensor::{Bytes, DType, FloatDType, Tensor};

use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::switch::is_enabled;

/// Returns `true` if [`Array`] supports all these tensors.
pub(super) fn are_supported<const D: usize>(tensors: &[&Tensor<D>]) -> bool {
    let is_supported = |tensor: &&Tensor<D>| {
        tensor.dtype() == DType::F32 && (*tensor).clone().try_into_primitive::<Flex>().is_ok()
    };
    let has_shape = |tensor: &&Tensor<D>| tensor.dims() == tensors[0].dims();
    is_enabled() && tensors.iter().all(is_supported) && tensors.iter().all(has_shape)
}

/// Values of an `f32` tensor on Flex in row-major order, updated in place if the tensor is not
/// shared.
pub(super) struct Array(FlexTensor);

impl Array {
    /// # Panics
    ///
    /// The tensor is not on Flex.
    pub(super) fn new<const D: usize>(tensor: Tensor<D>) -> Self {
        let tensor = tensor.try_into_primitive::<Flex>().expect("the tensor is on Flex");
        let is_plain = tensor.is_contiguous() && tensor.layout().start_offset() == 0;
        Self(if is_plain { tensor } else { tensor.to_contiguous() })
    }

    /// Returns an array with the same values that no other tensor shares.
    pub(super) fn copied(&self) -> Self {
        let layout = Layout::contiguous(self.0.layout().shape().clone());
        Self(FlexTensor::new(Bytes::from_elems(self.values().to_vec()), layout, DType::F32))
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.0.storage::<f32>()[..self.0.layout().num_elements()]
    }

    fn values_mut(&mut self) -> &mut [f32] {
        let num = self.0.layout().num_elements();
        &mut self.0.storage_mut::<f32>()[..num]
    }

    pub(super) fn into_tensor<const D: usize>(self) -> Tensor<D> {
        Tensor::from_primitive::<Flex>(self.0)
    }
}

/// Clipping of one parameter's gradient, as burn does it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Clip {
    Nothing,
    /// Limits each value.
    Value(f32),
    /// Multiplies all values.
    Factor(f32),
}

impl Clip {
    /// Computes the factor of a norm with burn's operators: its sums depend on their order.
    pub(super) fn new<const D: usize>(
        config: Option<&GradientClippingConfig>,
        gradient: &Tensor<D>,
    ) -> Self {
        match config {
            None => Self::Nothing,
            Some(GradientClippingConfig::Value(limit)) => Self::Value(*limit),
            Some(GradientClippingConfig::Norm(limit)) => {
                let norm = gradient.clone().square().sum().sqrt();
                let factor = *limit / norm.add_scalar(FloatDType::F32.finfo().min_positive);
                Self::Factor(factor.clamp_max(1.0).into_scalar())
            }
        }
    }

    #[inline(always)]
    fn apply(self, gradient: f32) -> f32 {
        match self {
            Self::Nothing => gradient,
            Self::Value(limit) if gradient > limit => limit,
            Self::Value(limit) if gradient < -limit => -limit,
            Self::Value(_) => gradient,
            Self::Factor(factor) => gradient * factor,
        }
    }
}

/// Returns the gradient clipped by burn's operators.
pub(super) fn clip<const D: usize>(
    config: Option<&GradientClippingConfig>,
    gradient: Tensor<D>,
) -> Tensor<D> {
    let clipping: Option<GradientClipping> = config.map(GradientClippingConfig::init);
    match clipping {
        Some(clipping) => clipping.clip_gradient(gradient),
        None => gradient,
    }
}

/// Returns the gradient with weight decay.
#[inline(always)]
pub(super) fn decayed(penalty: Option<f32>, weight: f32, gradient: f32) -> f32 {
    match penalty {
        Some(penalty) => weight * penalty + gradient,
        None => gradient,
    }
}

/// Number of values that a pass keeps in registers or the nearest cache.
const BLOCK: usize = 64;

/// Replaces the values of `arrays` at each index by `function(values, gradient)`.
pub(super) fn update<const N: usize>(
    arrays: [&mut Array; N],
    gradient: &Array,
    clip: Clip,
    function: impl Fn([f32; N], f32) -> [f32; N] + Sync,
) {
    let gradient = gradient.values();
    let size = chunk_rows(gradient.len());
    let mut chunks = arrays.map(|array| array.values_mut().chunks_mut(size));
    let parts = gradient.chunks(size).map(|gradient| {
        (chunks.each_mut().map(|chunks| chunks.next().unwrap_or_default()), gradient)
    });
    let parts: Vec<([&mut [f32]; N], &[f32])> = parts.collect();
    map_chunks(gradient.len(), parts, |(mut arrays, gradient)| {
        vectorize(
            #[inline(always)]
            || {
                for (index, gradient) in gradient.chunks(BLOCK).enumerate() {
                    let start = index * BLOCK;
                    update_block(&mut arrays, start, gradient, clip, &function);
                }
            },
        );
    });
}

/// Updates the values from `start` on. Copies let the compiler use vectors: it does not know that
/// the arrays do not overlap.
#[inline(always)]
fn update_block<const N: usize>(
    arrays: &mut [&mut [f32]; N],
    start: usize,
    gradient: &[f32],
    clip: Clip,
    function: &impl Fn([f32; N], f32) -> [f32; N],
) {
    let num = gradient.len();
    let (mut values, mut gradients) = ([[0.0; BLOCK]; N], [0.0; BLOCK]);
    gradients[..num].copy_from_slice(gradient);
    for (values, array) in values.iter_mut().zip(arrays.iter()) {
        values[..num].copy_from_slice(&array[start..start + num]);
    }
    for gradient in &mut gradients {
        *gradient = clip.apply(*gradient);
    }
    for index in 0..BLOCK {
        let updated = function(values.map(|values| values[index]), gradients[index]);
        for (values, updated) in values.iter_mut().zip(updated) {
            values[index] = updated;
        }
    }
    for (values, array) in values.iter().zip(arrays.iter_mut()) {
        array[start..start + num].copy_from_slice(&values[..num]);
    }
}
