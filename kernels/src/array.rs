//! Values of Flex tensors as slices.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};

use crate::machine::Matrix;

/// Contiguous `f32` tensor in row-major order.
#[derive(Clone, Debug)]
pub(crate) struct Array(FlexTensor);

impl Array {
    /// Copies the values unless they are contiguous. The tensor has type `f32`.
    pub(crate) fn new(tensor: FlexTensor) -> Self {
        Self(if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() })
    }

    /// Takes values in row-major order.
    pub(crate) fn from_vec(values: Vec<f32>, shape: &[usize]) -> Self {
        debug_assert_eq!(values.len(), shape.iter().product::<usize>());
        let layout = Layout::contiguous(Shape::from(shape.to_vec()));
        Self(FlexTensor::new(Bytes::from_elems(values), layout, DType::F32))
    }

    /// Returns the values in row-major order.
    pub(crate) fn values(&self) -> &[f32] {
        let (start, num) = (self.0.layout().start_offset(), self.0.layout().num_elements());
        if num == 0 { &[] } else { &self.0.storage::<f32>()[start..start + num] }
    }

    /// Returns the size of each dimension.
    pub(crate) fn shape(&self) -> Vec<usize> {
        self.0.layout().shape().to_vec()
    }
}

impl From<Array> for FlexTensor {
    fn from(array: Array) -> Self {
        array.0
    }
}

/// `f32` tensor of at least two dimensions, whose strides are not negative.
#[derive(Clone, Debug)]
pub(crate) struct Strided {
    tensor: FlexTensor,
    strides: Vec<usize>,
}

impl Strided {
    /// Copies the values if a stride is negative. The tensor has type `f32`.
    pub(crate) fn new(tensor: FlexTensor) -> Self {
        let has_negative = tensor.layout().strides().iter().any(|stride| *stride < 0);
        let tensor = if has_negative { tensor.to_contiguous() } else { tensor };
        let strides = tensor.layout().strides().iter().map(|stride| stride.unsigned_abs());
        Self { strides: strides.collect(), tensor }
    }

    /// Returns the matrix of the last two dimensions at index `leading` of the other dimensions.
    ///
    /// # Panics
    ///
    /// `leading` does not have one index per leading dimension.
    pub(crate) fn matrix(&self, leading: &[usize]) -> Matrix<'_> {
        let shape = self.tensor.layout().shape();
        let [rows, columns] = [shape[leading.len()], shape[leading.len() + 1]];
        let (outer, inner) = self.strides.split_at(leading.len());
        assert_eq!(inner.len(), 2, "a matrix has two dimensions");
        if self.tensor.layout().num_elements() == 0 {
            return Matrix::row_major(&[], rows, columns);
        }
        let offset: usize = leading.iter().zip(outer).map(|(index, stride)| index * stride).sum();
        let values = &self.tensor.storage::<f32>()[self.tensor.layout().start_offset() + offset..];
        Matrix::with_strides(values, [rows, columns], [inner[0], inner[1]])
    }
}
