//! Gradients of single parameters, and visits to all trained parameters of a model.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::Result;
use crate::precision::to_single;
use crate::record::{tensor_read_error, with_host_values};

/// Elements that are summed at once.
const SUM_ELEMENTS: usize = 1 << 20;

/// Trained parameter with a tensor of any rank.
pub(super) trait TrainedParameter {
    fn id(&self) -> ParamId;
    fn num_elements(&self) -> usize;
    /// Returns the type of the parameter, and so of its gradient.
    fn dtype(&self) -> DType;
    fn device(&self) -> Device;
    /// Moves the gradient, times `scale`, into `sum`. Returns whether there was one.
    fn add(&mut self, from: &mut GradientsParams, sum: &mut GradientsParams, scale: f64) -> bool;
    /// Moves the gradient, times `factor`, into `scaled`.
    ///
    /// # Shapes
    ///
    /// - factor: `[1]`
    fn scale(
        &mut self,
        from: &mut GradientsParams,
        scaled: &mut GradientsParams,
        factor: &Tensor<1>,
    );
    /// Takes the values of the gradient, or zeros if there is none. Copies them only if the
    /// gradient is not on the host, is shared or has another type.
    fn take_data(&mut self, from: &mut GradientsParams, dtype: DType) -> Result<TensorData>;
    /// Takes the gradient, or zeros if there is none, as a flat tensor of `dtype`.
    fn take_tensor(&mut self, from: &mut GradientsParams, dtype: DType) -> Tensor<1>;
    /// Sets the gradient from a flat tensor.
    fn put_tensor(&mut self, flat: Tensor<1>, sum: &mut GradientsParams);
    /// Sets the gradient from `data`.
    fn put(&mut self, data: TensorData, sum: &mut GradientsParams);
    /// Returns the gradient's values.
    fn data(&mut self, from: &GradientsParams) -> Result<Option<TensorData>>;
    /// Returns partial sums of the gradient's squares, in order, which stay on its device.
    fn squares(&mut self, from: &GradientsParams) -> Vec<Tensor<1>>;
    /// Returns the sum of the gradient's squares, which stays on its device.
    fn sum_of_squares(&mut self, from: &GradientsParams) -> Option<Tensor<1>>;
}

impl<const D: usize> TrainedParameter for &Param<Tensor<D>> {
    fn id(&self) -> ParamId {
        self.id
    }

    fn num_elements(&self) -> usize {
        self.lazy_shape().num_elements()
    }

    fn dtype(&self) -> DType {
        self.val().dtype()
    }

    fn device(&self) -> Device {
        self.lazy_device()
    }

    fn add(&mut self, from: &mut GradientsParams, sum: &mut GradientsParams, scale: f64) -> bool {
        let Some(gradient) = from.remove::<D>(self.id) else { return false };
        let gradient = if scale == 1.0 { gradient } else { gradient * scale };
        let gradient = match sum.remove::<D>(self.id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        sum.register::<D>(self.id, gradient);
        true
    }

    fn scale(
        &mut self,
        from: &mut GradientsParams,
        scaled: &mut GradientsParams,
        factor: &Tensor<1>,
    ) {
        if let Some(gradient) = from.remove::<D>(self.id) {
            let factor = factor.clone().cast(gradient.dtype()).reshape([1; D]);
            scaled.register::<D>(self.id, gradient * factor);
        }
    }

    fn take_data(&mut self, from: &mut GradientsParams, dtype: DType) -> Result<TensorData> {
        let Some(gradient) = from.remove::<D>(self.id) else {
            return Ok(TensorData::full_dtype(self.lazy_shape(), 0.0, dtype));
        };
        let data = gradient.try_into_data().map_err(tensor_read_error)?;
        data.try_cast(dtype).map_err(tensor_read_error)
    }

    fn take_tensor(&mut self, from: &mut GradientsParams, dtype: DType) -> Tensor<1> {
        let num = self.num_elements();
        match from.remove::<D>(self.id) {
            Some(gradient) => gradient.reshape([num]).cast(dtype),
            None => Tensor::zeros([num], (&self.lazy_device().without_autodiff(), dtype)),
        }
    }

    fn put_tensor(&mut self, flat: Tensor<1>, sum: &mut GradientsParams) {
        sum.register::<D>(self.id, flat.reshape(self.lazy_shape()).cast(self.val().dtype()));
    }

    fn put(&mut self, data: TensorData, sum: &mut GradientsParams) {
        // Gradients are on the device without autodiff.
        let device = self.lazy_device().without_autodiff();
        let dtype = self.val().dtype();
        sum.register::<D>(self.id, Tensor::from_data(data, (&device, dtype)));
    }

    fn data(&mut self, from: &GradientsParams) -> Result<Option<TensorData>> {
        let gradient = from.get::<D>(self.id);
        gradient.map(|gradient| gradient.try_into_data().map_err(tensor_read_error)).transpose()
    }

    fn squares(&mut self, from: &GradientsParams) -> Vec<Tensor<1>> {
        let square = |gradient: Tensor<D>| {
            // Squares overflow in half precision.
            let gradient = to_single(gradient);
            partial_sums(gradient.clone() * gradient)
        };
        from.get::<D>(self.id).map_or_else(Vec::new, square)
    }

    fn sum_of_squares(&mut self, from: &GradientsParams) -> Option<Tensor<1>> {
        from.get::<D>(self.id).map(|gradient| (gradient.clone() * gradient).sum())
    }
}

/// Returns the sums of chunks, because burn's CPU backend sums tensors of 4 Mi elements or more in
/// an order that depends on its threads. Added in order, they are bit-identical in every run.
/// `stoker_kernels::sum_in_order` exists for the same reason, but returns one tensor; these parts
/// are added on the host in f64.
fn partial_sums<const D: usize>(tensor: Tensor<D>) -> Vec<Tensor<1>> {
    let num_elements = tensor.shape().num_elements();
    let flat: Tensor<1> = tensor.reshape([num_elements]);
    let chunk = |start| {
        let end = num_elements.min(start + SUM_ELEMENTS);
        flat.clone().slice(start..end).sum()
    };
    (0..num_elements).step_by(SUM_ELEMENTS).map(chunk).collect()
}

/// Returns the total of partial sums, first over each parameter and then over all. Reads them at
/// once, as each read waits for the device; only a change of the element type needs another read.
pub(super) fn total(of_parameters: &[Vec<Tensor<1>>]) -> Result<f64> {
    let mut sums: Vec<f64> = vec![];
    let all: Vec<&Tensor<1>> = of_parameters.iter().flatten().collect();
    for same in all.chunk_by(|one, next| one.dtype() == next.dtype()) {
        let same = same.iter().map(|sum| (*sum).clone()).collect();
        with_host_values(Tensor::cat(same, 0), |read| sums.extend_from_slice(read))?;
    }
    let (mut total, mut rest) = (0.0, sums.as_slice());
    for of_parameter in of_parameters {
        let (of_parameter, others) = rest.split_at(of_parameter.len());
        total += of_parameter.iter().sum::<f64>();
        rest = others;
    }
    Ok(total)
}

/// Visitor of trained parameters, called with each parameter's index.
pub(super) type ParameterVisitor<'a> =
    dyn FnMut(usize, &mut dyn TrainedParameter) -> Result<()> + 'a;

/// Visits the trained parameters, not the buffers, in the order of the model's fields.
pub(super) fn for_each_parameter<M: Module>(
    model: &M,
    each: &mut dyn FnMut(usize, &mut dyn TrainedParameter),
) {
    let mut visit = |index: usize, param: &mut dyn TrainedParameter| {
        each(index, param);
        Ok(())
    };
    let done = try_for_each_parameter(model, &mut visit);
    debug_assert!(done.is_ok(), "a visit without errors: {done:?}");
}

/// Same as [`for_each_parameter`], but stops at the first error.
pub(super) fn try_for_each_parameter<M: Module>(
    model: &M,
    each: &mut ParameterVisitor,
) -> Result<()> {
    struct Visit<'a, 'b> {
        each: &'a mut ParameterVisitor<'b>,
        next: usize,
        done: Result<()>,
    }
    impl ModuleVisitor for Visit<'_, '_> {
        fn visit_float<const D: usize>(&mut self, mut param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                if self.done.is_ok() {
                    self.done = (self.each)(self.next, &mut param);
                }
                self.next += 1;
            }
        }
    }
    let mut visit = Visit { each, next: 0, done: Ok(()) };
    model.visit(&mut visit);
    visit.done
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Summed at once, in any order, the total would be rounded: single precision has no odd
    /// numbers beyond 2^24.
    #[test]
    fn large_sums_are_not_rounded() {
        let mut values = vec![0.0_f32; 8 * SUM_ELEMENTS_IN_TEST];
        values[0] = 16_777_216.0;
        (1..8).for_each(|piece| values[piece * SUM_ELEMENTS_IN_TEST] = 1.0);
        let data = TensorData::new(values, [8, SUM_ELEMENTS_IN_TEST]);
        let tensor = Tensor::<2>::from_data(data, &Device::default());
        assert_eq!(total(&[partial_sums(tensor)]).unwrap(), 16_777_223.0);
    }

    const SUM_ELEMENTS_IN_TEST: usize = 1 << 20;
}
