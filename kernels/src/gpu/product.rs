//! Matrix products on burn's backend for GPUs.

use burn::tensor::Tensor;
#[cfg(not(feature = "cuda"))]
use burn_cubecl::tensor::CubeTensor;

use super::operation::queue;
use super::tape::{has_kernels, is_on_nvidia, plain, tensor};

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

/// Returns `scale * a * b` for each matrix, with cuBLAS if possible.
///
/// # Shapes
///
/// `a` `[.., m, k]`, `b` `[.., k, n]`, result `[.., m, n]`. No size is 0.
pub(super) fn multiply<const D: usize>(a: Tensor<D>, b: Tensor<D>, scale: f64) -> Tensor<D> {
    multiply_to(a, b, None, scale, Order::Contiguous)
}

/// Returns `a * b + bias`. See [`multiply`].
///
/// # Shapes
///
/// `a` `[m, k]`, `b` `[k, n]`, `bias` `[n]`, result `[m, n]`. No size is 0.
pub(super) fn multiply_add(a: Tensor<2>, b: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    multiply_to(a, b, bias, 1.0, Order::Contiguous)
}

/// Returns `scale * a * b` for the matrices of each head. See [`multiply`]. With cuBLAS, rows are
/// the first dimension in memory.
///
/// # Shapes
///
/// `a` `[batch, heads, m, k]`, `b` `[batch, heads, k, n]`, result `[batch, heads, m, n]`. No size
/// is 0.
pub(super) fn multiply_heads(a: Tensor<4>, b: Tensor<4>, scale: f64) -> Tensor<4> {
    multiply_to(a, b, None, scale, Order::RowsFirst)
}

/// Returns `a * b`, and the sum of each column of `b`. See [`multiply`].
///
/// # Shapes
///
/// `a` `[m, k]`, `b` `[k, n]`, results `[m, n]` and `[n]`. No size is 0.
pub(super) fn multiply_and_sum(a: Tensor<2>, b: Tensor<2>) -> (Tensor<2>, Tensor<1>) {
    if !is_supported(&a) || !has_kernels(&b) {
        return (multiply(a, b.clone(), 1.0), b.sum_dim(0).squeeze_dim::<1>(0));
    }
    let ([m, _], [_, n], dtype) = (a.dims(), b.dims(), a.dtype());
    let outputs = [(vec![m, n], dtype), (vec![n], dtype)];
    let inputs = vec![plain(a), plain(b)];
    let [product, sums] = queue("product_and_sums", inputs, outputs, product_and_sums);
    (tensor(product), tensor(sums))
}

fn multiply_to<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    bias: Option<Tensor<1>>,
    scale: f64,
    order: Order,
) -> Tensor<D> {
    if !is_supported(&a) {
        let product = a.matmul(b);
        let product = if scale == 1.0 { product } else { product * scale };
        return match bias {
            Some(bias) => product + bias.unsqueeze(),
            None => product,
        };
    }
    let mut shape = a.dims();
    shape[D - 1] = b.dims()[D - 1];
    let dtype = a.dtype();
    let inputs = [plain(a), plain(b)].into_iter().chain(bias.map(plain)).collect();
    let [output] = queue("product", inputs, [(shape.to_vec(), dtype)], move |inputs| {
        [product(inputs, scale as f32, order)]
    });
    tensor(output)
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
fn product(_: Vec<CubeTensor>, _: f32, _: Order) -> CubeTensor {
    unreachable!("no other backend is supported")
}

#[cfg(not(feature = "cuda"))]
fn product_and_sums(_: Vec<CubeTensor>) -> [CubeTensor; 2] {
    unreachable!("no other backend is supported")
}

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
