//! Products by cuBLAS, from tensors to buffers.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::ops::{permute, reshape};
use burn_cubecl::tensor::CubeTensor;

use super::super::cublas::{Epilogue, Product, WORKSPACE_BYTES, has_algorithm, multiply};
use super::super::rows::sum_columns;
use super::super::stream::{ask, on_stream};
use super::{Form, Layout, Order};

/// Multiplies the first two inputs, and adds the third one to each row.
pub(super) fn product(inputs: Vec<CubeTensor>, form: &Form) -> CubeTensor {
    let mut inputs = inputs.into_iter();
    let (Some(a), Some(b)) = (inputs.next(), inputs.next()) else {
        unreachable!("a product has two inputs");
    };
    let bias = inputs.next().map(into_contiguous);
    let epilogue = if bias.is_some() { Epilogue::Bias } else { Epilogue::Nothing };
    let prepared = Prepared::new(a, b, form, epilogue);
    with_shape(prepared.queue(None, bias), &form.shape)
}

/// Multiplies the inputs, and adds up the columns of the second one. If cuBLAS has no algorithm
/// that does both, a kernel adds up the columns.
pub(super) fn product_and_sums(inputs: Vec<CubeTensor>, form: &Form) -> [CubeTensor; 2] {
    let [a, b] = inputs.try_into().unwrap_or_else(|_| unreachable!("a product has two inputs"));
    let prepared = Prepared::new(a, b, form, Epilogue::ColumnSums);
    if !prepared.has_algorithm() {
        let sums = sum_columns(prepared.b.clone());
        let prepared = prepared.with(Epilogue::Nothing);
        return [prepared.queue(None, None), sums];
    }
    let sums = empty(&prepared.b, &[prepared.product.b.columns], Order::Contiguous);
    [prepared.queue(Some(&sums), None), sums]
}

/// A product before it is queued.
struct Prepared {
    a: CubeTensor,
    b: CubeTensor,
    output: CubeTensor,
    product: Product,
}

impl Prepared {
    fn new(a: CubeTensor, b: CubeTensor, form: &Form, epilogue: Epilogue) -> Self {
        let arranged = |tensor, factor: usize| {
            arranged(tensor, form.is_flat[factor], form.is_transposed[factor])
        };
        let ((a, of_a), (b, of_b)) = (matrices(arranged(a, 0)), matrices(arranged(b, 1)));
        let (scale, order) = (form.scale, form.order);
        let mut shape = a.meta.shape().to_vec();
        let last = shape.len() - 1;
        shape[last] = of_b.columns;
        let output = empty(&a, &shape, order);
        let of_output =
            Layout::new(&shape, output.meta.strides()).expect("new matrices have a layout");
        let dtype = a.dtype;
        let product = Product { a: of_a, b: of_b, output: of_output, dtype, scale, epilogue };
        Self { a, b, output, product }
    }

    fn with(mut self, epilogue: Epilogue) -> Self {
        self.product.epilogue = epilogue;
        self
    }

    /// Returns whether cuBLAS has an algorithm. Waits for the answer once for each product.
    fn has_algorithm(&self) -> bool {
        type Answers = HashMap<(u16, Layout, Layout, DType, [u64; 3]), bool>;
        static ANSWERS: Mutex<Option<Answers>> = Mutex::new(None);
        let offsets = [&self.b, &self.a, &self.output]
            .map(|tensor| tensor.handle.offset_start.unwrap_or_default());
        let product: Product = self.product;
        let gpu = self.a.client.service_id().device.index_id;
        let key = (gpu, product.a, product.b, product.dtype, offsets);
        let answers = || ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = answers().get_or_insert_default().get(&key).copied();
        // The lock is free during the wait, so that no other thread waits for this GPU.
        let answer = known.or_else(|| {
            ask(&self.a.client, move |gpu| has_algorithm(&product, offsets, gpu)).inspect(
                |answer| {
                    answers().get_or_insert_default().insert(key, *answer);
                },
            )
        });
        answer.unwrap_or(false)
    }

    /// Queues the product and returns its output.
    fn queue(self, sums: Option<&CubeTensor>, bias: Option<CubeTensor>) -> CubeTensor {
        let Self { a, b, output, product } = self;
        let client = a.client.clone();
        let workspace = client.empty(WORKSPACE_BYTES);
        let sums = sums.map(|sums| sums.handle.clone());
        let written = [output.handle.clone(), workspace].into_iter().chain(sums).collect();
        let bias = bias.map(|bias| bias.handle);
        let read = [a.handle, b.handle].into_iter().chain(bias).collect();
        on_stream(&client, written, read, move |stream, written, read| {
            multiply(&product, stream, written, read)
        });
        output
    }
}

/// Flattens all dimensions except the last one to rows, and transposes, without copying a tensor in
/// row-major order.
fn arranged(tensor: CubeTensor, is_flat: bool, is_transposed: bool) -> CubeTensor {
    let mut tensor = tensor;
    if is_flat {
        let columns = tensor.meta.shape().last().copied().unwrap_or(1);
        let rows = tensor.meta.num_elements() / columns;
        tensor = with_shape(tensor, &[rows, columns]);
    }
    if is_transposed {
        let mut axes: Vec<usize> = (0..tensor.meta.num_dims()).collect();
        let last = axes.len() - 1;
        axes.swap(last - 1, last);
        tensor = permute(tensor, &axes);
    }
    tensor
}

fn with_shape(tensor: CubeTensor, shape: &[usize]) -> CubeTensor {
    if tensor.meta.shape().as_slice() == shape {
        return tensor;
    }
    reshape(tensor, shape.to_vec().into())
}

/// Returns uninitialized matrices on the device of `like`, with its type.
fn empty(like: &CubeTensor, shape: &[usize], order: Order) -> CubeTensor {
    let empty = |shape: &[usize]| {
        let (client, device) = (like.client.clone(), like.device.clone());
        empty_device_contiguous_dtype(client, device, shape.to_vec().into(), like.dtype)
    };
    match (order, shape) {
        (Order::RowsFirst, [batch, heads, rows, columns]) => {
            permute(empty(&[*rows, *batch, *heads, *columns]), &[1, 2, 0, 3])
        }
        _ => empty(shape),
    }
}

/// Returns a tensor with its layout. Copies the tensor if its strides fit no layout.
fn matrices(tensor: CubeTensor) -> (CubeTensor, Layout) {
    let layout = |tensor: &CubeTensor| Layout::new(tensor.meta.shape(), tensor.meta.strides());
    if let Some(layout) = layout(&tensor) {
        return (tensor, layout);
    }
    let copy = into_contiguous(tensor);
    let layout = layout(&copy).expect("contiguous matrices have a layout");
    (copy, layout)
}
