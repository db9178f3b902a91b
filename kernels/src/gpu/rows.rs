//! Kernels for the rows of a matrix on NVIDIA GPUs. burn's operators would read and write the
//! matrix several times. All values are computed in single precision.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl::{CubeCount, CubeDim};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::operation::queue;
use super::tape::{plain, tensor};

mod kernels;

use kernels::{
    layer_norm_gradient_kernel, layer_norm_kernel, partial_sums_kernel, softmax_gradient_kernel,
    softmax_kernel, sums_kernel,
};

/// Number of threads that read a row together: a warp.
const LANES: u32 = 32;
/// Number of rows, or of chunks of rows, of a thread block.
const BLOCK_ROWS: u32 = 8;

/// Returns the softmax of each row. With `causal`, the last of each number of rows sees all
/// columns, each row before it sees one less, and invisible columns are 0.
///
/// # Shapes
///
/// `x` and result `[.., columns]`. No size is 0.
pub(super) fn softmax<const D: usize>(x: Tensor<D>, causal: Option<usize>) -> Tensor<D> {
    let [rows, columns] = size(&x);
    let shape = x.dims();
    let output = (shape.to_vec(), x.dtype());
    let [output] = queue("softmax", vec![plain(x)], [output], move |inputs| {
        let [x] = contiguous(inputs);
        let output = empty_like(&x, &shape, x.dtype);
        let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
        softmax_kernel::launch(
            &client,
            CubeCount::Static((rows as u32).div_ceil(BLOCK_ROWS), 1, 1),
            CubeDim::new_2d(LANES, BLOCK_ROWS),
            x.into_tensor_arg(),
            output.clone().into_tensor_arg(),
            rows as u32,
            columns as u32,
            causal.unwrap_or(1) as u32,
            causal.is_some(),
            dtype,
        );
        [output]
    });
    tensor(output)
}

/// Returns `y * (dy - sum of y * dy in the row)`, the gradient of a softmax with the output `y`.
///
/// # Shapes
///
/// `y`, `dy` and result `[.., columns]`. No size is 0.
pub(super) fn softmax_gradient<const D: usize>(y: Tensor<D>, dy: Tensor<D>) -> Tensor<D> {
    let [rows, columns] = size(&y);
    let shape = y.dims();
    let output = (shape.to_vec(), y.dtype());
    let inputs = vec![plain(y), plain(dy)];
    let [output] = queue("softmax_gradient", inputs, [output], move |inputs| {
        let [y, dy] = contiguous(inputs);
        let output = empty_like(&y, &shape, y.dtype);
        let (client, dtype) = (y.client.clone(), dtype_to_storage_type(y.dtype));
        softmax_gradient_kernel::launch(
            &client,
            CubeCount::Static((rows as u32).div_ceil(BLOCK_ROWS), 1, 1),
            CubeDim::new_2d(LANES, BLOCK_ROWS),
            y.into_tensor_arg(),
            dy.into_tensor_arg(),
            output.clone().into_tensor_arg(),
            rows as u32,
            columns as u32,
            dtype,
        );
        [output]
    });
    tensor(output)
}

/// Returns the layer normalization of each row, and the mean and the reciprocal standard deviation
/// of each row in single precision.
///
/// # Shapes
///
/// `x` and the first result `[.., columns]`, `gamma` and `beta` `[columns]`, the second result
/// `[rows, 2]`. No size is 0.
pub(super) fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<2>) {
    let [rows, columns] = size(&x);
    let shape = x.dims();
    let outputs = [(shape.to_vec(), x.dtype()), (vec![rows, 2], DType::F32)];
    let has_beta = beta.is_some();
    let beta = beta.unwrap_or_else(|| gamma.clone());
    let inputs = vec![plain(x), plain(gamma), plain(beta)];
    let [output, moments] = queue("layer_norm", inputs, outputs, move |inputs| {
        let [x, gamma, beta] = contiguous(inputs);
        let output = empty_like(&x, &shape, x.dtype);
        let moments = empty_like(&x, &[rows, 2], DType::F32);
        let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
        layer_norm_kernel::launch(
            &client,
            CubeCount::Static((rows as u32).div_ceil(BLOCK_ROWS), 1, 1),
            CubeDim::new_2d(LANES, BLOCK_ROWS),
            x.into_tensor_arg(),
            gamma.into_tensor_arg(),
            beta.into_tensor_arg(),
            output.clone().into_tensor_arg(),
            moments.clone().into_tensor_arg(),
            rows as u32,
            columns as u32,
            epsilon as f32,
            has_beta,
            dtype,
        );
        [output, moments]
    });
    (tensor(output), tensor(moments))
}

/// Returns the gradient of the input of [`layer_norm`]. See its gradient for the formula.
///
/// # Shapes
///
/// `dy`, `x` and result `[.., columns]`, `gamma` `[columns]`, `moments` `[rows, 2]`.
pub(super) fn layer_norm_gradient<const D: usize>(
    dy: Tensor<D>,
    x: Tensor<D>,
    gamma: Tensor<1>,
    moments: Tensor<2>,
) -> Tensor<D> {
    let [rows, columns] = size(&x);
    let shape = x.dims();
    let output = (shape.to_vec(), x.dtype());
    let inputs = vec![plain(dy), plain(x), plain(gamma), plain(moments)];
    let [output] = queue("layer_norm_gradient", inputs, [output], move |inputs| {
        let [dy, x, gamma, moments] = contiguous(inputs);
        let output = empty_like(&x, &shape, x.dtype);
        let (client, dtype) = (x.client.clone(), dtype_to_storage_type(x.dtype));
        layer_norm_gradient_kernel::launch(
            &client,
            CubeCount::Static((rows as u32).div_ceil(BLOCK_ROWS), 1, 1),
            CubeDim::new_2d(LANES, BLOCK_ROWS),
            dy.into_tensor_arg(),
            x.into_tensor_arg(),
            gamma.into_tensor_arg(),
            moments.into_tensor_arg(),
            output.clone().into_tensor_arg(),
            rows as u32,
            columns as u32,
            dtype,
        );
        [output]
    });
    tensor(output)
}

/// Returns the sum of each column of `y`, and of `y` times the input `x` of a layer normalization
/// after it is normalized.
///
/// # Shapes
///
/// `y` and `x` `[.., columns]`, `moments` `[rows, 2]`, results `[columns]`. No size is 0.
pub(super) fn column_sums<const D: usize>(
    y: Tensor<D>,
    x: Tensor<D>,
    moments: Tensor<2>,
) -> [Tensor<1>; 2] {
    let output = (vec![y.dims()[D - 1]], y.dtype());
    let inputs = vec![plain(y), plain(x), plain(moments)];
    queue("column_sums", inputs, [output.clone(), output], move |inputs| {
        let [y, x, moments] = contiguous(inputs);
        launch_sums(y, Some((x, moments)))
    })
    .map(tensor)
}

/// Returns the sum of each column.
///
/// # Shapes
///
/// `y` `[rows, columns]`, result `[columns]`. No size is 0.
#[cfg(feature = "cuda")]
pub(super) fn sum_columns(y: CubeTensor) -> CubeTensor {
    let [sums, _] = launch_sums(into_contiguous(y), None);
    sums
}

/// Without an input with its moments, the second result is the first one.
fn launch_sums(y: CubeTensor, normalized: Option<(CubeTensor, CubeTensor)>) -> [CubeTensor; 2] {
    let columns = y.meta.shape().last().copied().unwrap_or(1);
    let rows = y.meta.num_elements() / columns;
    let has_input = normalized.is_some();
    let (x, moments) = normalized.unwrap_or_else(|| (y.clone(), y.clone()));
    let sums = empty_like(&y, &[columns], y.dtype);
    let products = if has_input { empty_like(&y, &[columns], y.dtype) } else { sums.clone() };
    // A thread adds up a column of a chunk of rows.
    let size = (rows as f64).sqrt().ceil() as usize;
    let chunks = rows.div_ceil(size);
    let partial = empty_like(&y, &[chunks, 2 * columns], DType::F32);
    let (client, dtype) = (y.client.clone(), dtype_to_storage_type(y.dtype));
    let width = (columns as u32).div_ceil(LANES);
    partial_sums_kernel::launch(
        &client,
        CubeCount::Static(width, (chunks as u32).div_ceil(BLOCK_ROWS), 1),
        CubeDim::new_2d(LANES, BLOCK_ROWS),
        y.into_tensor_arg(),
        x.into_tensor_arg(),
        moments.into_tensor_arg(),
        partial.clone().into_tensor_arg(),
        rows as u32,
        columns as u32,
        size as u32,
        has_input,
        dtype,
    );
    sums_kernel::launch(
        &client,
        CubeCount::Static(width, 1, 1),
        CubeDim::new_2d(LANES, 1),
        partial.into_tensor_arg(),
        sums.clone().into_tensor_arg(),
        products.clone().into_tensor_arg(),
        chunks as u32,
        columns as u32,
        has_input,
        dtype,
    );
    [sums, products]
}

/// Returns the number of rows and of columns: all dimensions except the last one are rows.
fn size<const D: usize>(x: &Tensor<D>) -> [usize; 2] {
    let shape = x.dims();
    [shape[..D - 1].iter().product(), shape[D - 1]]
}

/// Returns contiguous inputs.
fn contiguous<const N: usize>(inputs: Vec<CubeTensor>) -> [CubeTensor; N] {
    let inputs: Vec<CubeTensor> = inputs.into_iter().map(into_contiguous).collect();
    inputs.try_into().unwrap_or_else(|_| unreachable!("burn passes all inputs"))
}

/// Returns an uninitialized tensor on the device of `like`.
fn empty_like(like: &CubeTensor, shape: &[usize], dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, shape.to_vec().into(), dtype)
}
