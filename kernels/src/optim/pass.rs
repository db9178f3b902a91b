//! One pass over a parameter, its gradient and its state.

use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::tensor::{Bytes, DType, FloatDType, Tensor};

use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::sum::sum_in_order;
use crate::switch::is_enabled;

/// Returns `true` if [`Array`] supports all these tensors.
pub(super) fn are_supported<const D: usize>(tensors: &[&Tensor<D>]) -> bool {
    let is_supported = |tensor: &&Tensor<D>| {
        tensor.dtype() == DType::F32 && (*tensor).clone().try_into_primitive::<Flex>().is_ok()
    };
    let has_shape = |tensor: &&Tensor<D>| tensor.dims() == tensors[0].dims();
    is_enabled() && tensors.iter().all(is_supported) && tensors.iter().all(has_shape)
}

/// Values of an `f32` tensor on Flex in row-major order. Changes are in place if the tensor is not
/// shared.
pub(super) struct Array(FlexTensor);

impl Array {
    /// # Panics
    ///
    /// The tensor is not on Flex.
    pub(super) fn new<const D: usize>(tensor: Tensor<D>) -> Self {
        let tensor = tensor.try_into_primitive::<Flex>().expect("the tensor is on Flex");
        // A part of a larger buffer would keep all of it in memory.
        let is_whole = tensor.bytes().len() == tensor.layout().num_elements() * size_of::<f32>();
        let is_plain = is_whole && tensor.is_contiguous();
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

/// Clipping of one parameter's gradient, as burn does it: a limit of each value, then a factor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clip {
    limit: f32,
    factor: f32,
}

impl Clip {
    /// Computes the factor of a norm with burn's operators, because sums depend on their order.
    pub(super) fn new<const D: usize>(
        config: Option<&GradientClippingConfig>,
        gradient: &Tensor<D>,
    ) -> Self {
        // Both values leave the gradient as it is.
        let nothing = Self { limit: f32::INFINITY, factor: 1.0 };
        match config {
            None => nothing,
            Some(GradientClippingConfig::Value(limit)) => Self { limit: *limit, ..nothing },
            Some(GradientClippingConfig::Norm(limit)) => {
                let norm = sum_in_order(gradient.clone().square()).sqrt();
                let factor = *limit / norm.add_scalar(FloatDType::F32.finfo().min_positive);
                Self { factor: factor.clamp_max(1.0).into_scalar(), ..nothing }
            }
        }
    }

    #[inline(always)]
    fn apply(self, gradient: f32) -> f32 {
        let limited = if gradient > self.limit { self.limit } else { gradient };
        let limited = if gradient < -self.limit { -self.limit } else { limited };
        limited * self.factor
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

/// Defines a function that replaces the values of some arrays at each index by
/// `function(values, weight)`. The first array has the gradients, and gets the new weights: it is
/// hardly ever shared, while the tensor of a parameter is.
macro_rules! update {
    ($name:ident, $loop:ident, $num:literal, $gradient:ident $($array:ident)*) => {
        pub(super) fn $name(
            arrays: [&mut Array; $num],
            weights: &Array,
            clip: Clip,
            function: impl Fn([f32; $num], f32) -> [f32; $num] + Sync,
        ) {
            let weights = weights.values();
            let size = chunk_rows(weights.len());
            let mut chunks = arrays.map(|array| array.values_mut().chunks_mut(size));
            let parts = weights.chunks(size).map(|weights| {
                (chunks.each_mut().map(|chunks| chunks.next().unwrap_or_default()), weights)
            });
            let parts: Vec<([&mut [f32]; $num], &[f32])> = parts.collect();
            map_chunks(weights.len(), parts, |([$gradient, $($array),*], weights)| {
                vectorize(
                    #[inline(always)]
                    || $loop($gradient, $($array,)* weights, clip, &function),
                );
            });
        }

        /// Arguments instead of an array tell the compiler that the slices do not overlap.
        /// Functions must own their values (`move`), which otherwise might overlap the slices.
        #[inline(always)]
        fn $loop(
            $gradient: &mut [f32],
            $($array: &mut [f32],)*
            weights: &[f32],
            clip: Clip,
            function: &impl Fn([f32; $num], f32) -> [f32; $num],
        ) {
            let num = weights.len();
            let $gradient = &mut $gradient[..num];
            $(let $array = &mut $array[..num];)*
            for index in 0..num {
                let gradient = clip.apply($gradient[index]);
                [$gradient[index], $($array[index]),*] =
                    function([gradient, $($array[index]),*], weights[index]);
            }
        }
    };
}

update!(update_one, loop_one, 1, gradient);
update!(update_two, loop_two, 2, gradient second);
update!(update_three, loop_three, 3, gradient second third);
