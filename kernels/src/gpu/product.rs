//! Matrix products on burn's backend for GPUs.

use burn::tensor::Tensor;
#[cfg(not(feature = "cuda"))]
use burn_cubecl::tensor::CubeTensor;

use super::operation::queue;
use super::tape::{Plain, has_kernels, is_on_nvidia, plain, tensor};

#[cfg(feature = "cuda")]
mod prepared;
#[cfg(feature = "cuda")]
use prepared::{product, product_and_sums};

/// Order of matrices in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Row-major.
    Contiguous,
    /// `[rows, batch, heads, columns]` for matrices `[batch, heads, rows, columns]`.
    RowsFirst,
}

/// Matrices of a product, or their transposes.
///
/// Transposing and flattening here instead of by burn's operators queues fewer operations, which
/// takes as long as computing them.
#[derive(Clone, Debug)]
pub(super) struct Factor<const D: usize> {
    tensor: Tensor<D>,
    is_transposed: bool,
}

impl<const D: usize> From<Tensor<D>> for Factor<D> {
    fn from(tensor: Tensor<D>) -> Self {
        Self { tensor, is_transposed: false }
    }
}

impl<const D: usize> Factor<D> {
    /// Returns the transposes of the matrices.
    pub(super) fn transposed(tensor: Tensor<D>) -> Self {
        Self { tensor, is_transposed: true }
    }

    /// Returns the number of rows and columns.
    fn size(&self) -> [usize; 2] {
        let shape = self.tensor.dims();
        match self.is_transposed {
            false => [shape[D - 2], shape[D - 1]],
            true => [shape[D - 1], shape[D - 2]],
        }
    }

    /// Returns the matrices by burn's operators.
    fn into_tensor(self) -> Tensor<D> {
        if self.is_transposed { self.tensor.transpose() } else { self.tensor }
    }
}

/// How the inputs of a product become matrices.
#[derive(Clone, Debug)]
// Reason: only products by cuBLAS read all fields.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
struct Form {
    /// For each factor, whether all dimensions except the last one are rows.
    is_flat: [bool; 2],
    /// Applies after flattening.
    is_transposed: [bool; 2],
    scale: f32,
    order: Order,
    /// Shape of the output.
    shape: Vec<usize>,
}

/// Returns `scale * a * b` for each matrix, with cuBLAS if possible.
///
/// # Shapes
///
/// `a` `[.., m, k]`, `b` `[.., k, n]`, result `[.., m, n]`. No size is 0.
pub(super) fn multiply<const D: usize>(
    a: impl Into<Factor<D>>,
    b: impl Into<Factor<D>>,
    scale: f64,
) -> Tensor<D> {
    multiply_to(a.into(), b.into(), scale, Order::Contiguous)
}

/// Returns `scale * a * b` for the matrices of each head. See [`multiply`]. With cuBLAS, rows are
/// the first dimension in memory.
///
/// # Shapes
///
/// `a` `[batch, heads, m, k]`, `b` `[batch, heads, k, n]`, result `[batch, heads, m, n]`. No size
/// is 0.
pub(super) fn multiply_heads(
    a: impl Into<Factor<4>>,
    b: impl Into<Factor<4>>,
    scale: f64,
) -> Tensor<4> {
    multiply_to(a.into(), b.into(), scale, Order::RowsFirst)
}

/// Returns `x * weight + bias` for each row. See [`multiply`].
///
/// # Shapes
///
/// `x` `[.., k]`, `weight` `[k, n]`, `bias` `[n]`, result `[.., n]`. No size is 0.
pub(super) fn multiply_rows<const D: usize>(
    x: Tensor<D>,
    weight: impl Into<Factor<2>>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let weight = weight.into();
    let mut shape = x.dims();
    let num_rows: usize = shape[..D - 1].iter().product();
    let num_inputs = shape[D - 1];
    [_, shape[D - 1]] = weight.size();
    if !is_supported(&x) {
        let product = x.reshape([num_rows, num_inputs]).matmul(weight.into_tensor());
        let output = match bias {
            Some(bias) => product + bias.unsqueeze(),
            None => product,
        };
        return output.reshape(shape);
    }
    let form = Form {
        is_flat: [true, false],
        is_transposed: [false, weight.is_transposed],
        scale: 1.0,
        order: Order::Contiguous,
        shape: shape.to_vec(),
    };
    let inputs = [plain(x), plain(weight.tensor)].into_iter().chain(bias.map(plain)).collect();
    tensor(queue_product(inputs, form))
}

/// Returns the product of the transpose of `x` with `y`, both as matrices of rows. See
/// [`multiply`].
///
/// # Shapes
///
/// `x` `[.., m]`, `y` `[.., n]`, with equal other dimensions, result `[m, n]`. No size is 0.
pub(super) fn multiply_columns<const D: usize>(x: Tensor<D>, y: Tensor<D>) -> Tensor<2> {
    if !is_supported(&x) {
        return matrix(x).transpose().matmul(matrix(y));
    }
    let form = of_columns(&x, &y);
    tensor(queue_product(vec![plain(x), plain(y)], form))
}

/// Returns the product of [`multiply_columns`], and the sum of each column of `y`.
///
/// # Shapes
///
/// `x` `[.., m]`, `y` `[.., n]`, with equal other dimensions, results `[m, n]` and `[n]`. No size
/// is 0.
pub(super) fn multiply_columns_and_sum<const D: usize>(
    x: Tensor<D>,
    y: Tensor<D>,
) -> (Tensor<2>, Tensor<1>) {
    if !is_supported(&x) || !has_kernels(&y) {
        let (x, y) = (matrix(x), matrix(y));
        let product = multiply(Factor::transposed(x), y.clone(), 1.0);
        return (product, y.sum_dim(0).squeeze_dim::<1>(0));
    }
    let form = of_columns(&x, &y);
    let dtype = x.dtype();
    let outputs = [(form.shape.clone(), dtype), (vec![form.shape[1]], dtype)];
    let inputs = vec![plain(x), plain(y)];
    let [product, sums] =
        queue("product_and_sums", inputs, outputs, move |inputs| product_and_sums(inputs, &form));
    (tensor(product), tensor(sums))
}

/// Returns the form of [`multiply_columns`].
fn of_columns<const D: usize>(x: &Tensor<D>, y: &Tensor<D>) -> Form {
    Form {
        is_flat: [true, true],
        is_transposed: [true, false],
        scale: 1.0,
        order: Order::Contiguous,
        shape: vec![x.dims()[D - 1], y.dims()[D - 1]],
    }
}

/// Returns all dimensions except the last one as rows, by burn's operators.
pub(super) fn matrix<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let shape = x.dims();
    x.reshape([shape[..D - 1].iter().product(), shape[D - 1]])
}

fn multiply_to<const D: usize>(a: Factor<D>, b: Factor<D>, scale: f64, order: Order) -> Tensor<D> {
    if !is_supported(&a.tensor) {
        let product = a.into_tensor().matmul(b.into_tensor());
        return if scale == 1.0 { product } else { product * scale };
    }
    let mut shape = a.tensor.dims().to_vec();
    let ([rows, _], [_, columns]) = (a.size(), b.size());
    shape[D - 2..].copy_from_slice(&[rows, columns]);
    let form = Form {
        is_flat: [false; 2],
        is_transposed: [a.is_transposed, b.is_transposed],
        scale: scale as f32,
        order,
        shape,
    };
    tensor(queue_product(vec![plain(a.tensor), plain(b.tensor)], form))
}

fn queue_product(inputs: Vec<Plain>, form: Form) -> Plain {
    let output = (form.shape.clone(), inputs[0].dtype);
    let [output] = queue("product", inputs, [output], move |inputs| [product(inputs, &form)]);
    output
}

/// Returns whether cuBLAS is installed, and the tensor is on an NVIDIA GPU.
fn is_supported<const D: usize>(tensor: &Tensor<D>) -> bool {
    #[cfg(feature = "cuda")]
    let is_installed = super::cublas::is_installed();
    #[cfg(not(feature = "cuda"))]
    let is_installed = false;
    is_installed && is_on_nvidia(tensor)
}

/// Matrices in row-major order, or their transposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Whether a column is contiguous, instead of a row.
    pub(super) is_transposed: bool,
    /// Distance of rows, or of columns if transposed, in elements.
    pub(super) leading: usize,
    /// Number of matrices.
    pub(super) batch: usize,
    /// Distance of matrices, in elements.
    pub(super) distance: usize,
}

impl Layout {
    /// Returns `None` if the strides describe no such matrices.
    fn new(shape: &[usize], strides: &[usize]) -> Option<Self> {
        let ([outer @ .., rows, columns], [.., row, column]) = (shape, strides) else {
            return None;
        };
        let (rows, columns) = (*rows, *columns);
        // The stride of a dimension of size 1 has no meaning.
        let row = if rows == 1 { columns } else { *row };
        let column = if columns == 1 { rows } else { *column };
        let (is_transposed, leading) = match () {
            () if (column == 1 || columns == 1) && row >= columns => (false, row),
            () if (row == 1 || rows == 1) && column >= rows => (true, column),
            () => return None,
        };
        let mut outer = outer.iter().zip(strides).rev().filter(|(size, _)| **size != 1);
        let (mut batch, mut distance) = (1, 0);
        if let Some((size, stride)) = outer.next() {
            (batch, distance) = (*size, *stride);
        }
        for (size, stride) in outer {
            if *stride != distance * batch {
                return None;
            }
            batch *= size;
        }
        Some(Self { rows, columns, is_transposed, leading, batch, distance })
    }
}

#[cfg(not(feature = "cuda"))]
fn product(_: Vec<CubeTensor>, _: &Form) -> CubeTensor {
    unreachable!("no other backend is supported")
}

#[cfg(not(feature = "cuda"))]
fn product_and_sums(_: Vec<CubeTensor>, _: &Form) -> [CubeTensor; 2] {
    unreachable!("no other backend is supported")
}

#[cfg(test)]
#[cfg(any(feature = "cuda", feature = "cubecl-cpu"))]
mod forms;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_give_layouts() {
        let check =
            |shape: &[usize], strides: &[usize], expected: Option<[usize; 3]>, is_transposed| {
                let layout = Layout::new(shape, strides);
                let parts = layout.map(|layout| [layout.leading, layout.batch, layout.distance]);
                assert_eq!(parts, expected, "{shape:?} {strides:?}");
                if let Some(layout) = layout {
                    assert_eq!(layout.is_transposed, is_transposed, "{shape:?} {strides:?}");
                    let [.., rows, columns] = *shape else { panic!("two dimensions") };
                    assert_eq!([layout.rows, layout.columns], [rows, columns]);
                }
            };
        check(&[3, 5], &[5, 1], Some([5, 1, 0]), false);
        // Padded rows, a transpose, and parts of both.
        check(&[3, 5], &[8, 1], Some([8, 1, 0]), false);
        check(&[3, 5], &[1, 3], Some([3, 1, 0]), true);
        check(&[3, 5], &[1, 8], Some([8, 1, 0]), true);
        check(&[3, 5], &[10, 2], None, false);
        // A repeated row or column.
        check(&[3, 5], &[0, 1], None, false);
        check(&[3, 5], &[1, 0], None, false);
        // Strides of sizes of 1 have no meaning.
        check(&[1, 5], &[99, 1], Some([5, 1, 0]), false);
        check(&[5, 1], &[1, 99], Some([1, 1, 0]), false);
        check(&[5, 1], &[7, 99], Some([7, 1, 0]), false);
        check(&[1, 5], &[99, 7], Some([7, 1, 0]), true);
        check(&[1, 1], &[0, 0], Some([1, 1, 0]), false);
        // Batches.
        check(&[4, 3, 5], &[15, 5, 1], Some([5, 4, 15]), false);
        check(&[4, 3, 5], &[0, 5, 1], Some([5, 4, 0]), false);
        check(&[2, 4, 3, 5], &[60, 15, 5, 1], Some([5, 8, 15]), false);
        check(&[2, 1, 3, 5], &[60, 7, 5, 1], Some([5, 2, 60]), false);
        check(&[2, 4, 3, 5], &[99, 15, 5, 1], None, false);
        // Heads as views.
        check(&[2, 4, 3, 5], &[60, 5, 20, 1], None, false);
        check(&[1, 4, 3, 5], &[60, 5, 20, 1], Some([20, 4, 5]), false);
        check(&[5], &[1], None, false);
    }
}
