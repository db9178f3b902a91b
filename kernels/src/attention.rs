//! Scaled dot-product attention.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor, module};

use crate::array::Strided;
use crate::chunks::{chunk_rows, map_chunks};
use crate::dropout::Dropout;
use crate::is_enabled;
use crate::machine::{Matrix, Output, Threads, multiply, multiply_rows, vectorize};
use crate::new_values::{Blank, NewValues, fill_rows};
use crate::softmax::{softmax_row, softmax_row_gradient};
use crate::tape::{Gradient, Operand, booleans, record, share_tape};
use crate::vector::max;

mod composed;
mod order;

use composed::composed;
use order::Order;

/// Returns `softmax(query * key^T * scale) * value` for each head.
///
/// Vaswani et al., Attention Is All You Need, 2017. `mask` hides positions where it is `true`. A
/// causal mask is aligned to the last key. A query without visible keys gives zeros. `attn_bias`
/// and `softcap` are not fused. The backward pass keeps the probabilities. Heads and positions of
/// the result have the order of `query` in memory, so heads that are views with swapped dimensions
/// are not copied.
///
/// # Shapes
///
/// `query` `[batch, heads, len_query, d_head]`, `key` `[batch, heads, len_key, d_head]`, `value`
/// `[batch, heads, len_key, d_value]`, `mask` broadcast to `[batch, heads, len_query, len_key]`,
/// result `[batch, heads, len_query, d_value]`.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Tensor<4> {
    if attn_bias.is_some() || !is_enabled() {
        return module::attention(query, key, value, mask, attn_bias, options);
    }
    #[cfg(feature = "cubecl")]
    if query.device().is_autodiff()
        && let Some(y) = crate::gpu::attention(&query, &key, &value, mask.as_ref(), &options, 0.0)
    {
        return y;
    }
    match fused(&query, &key, &value, mask.as_ref(), &options, None) {
        Some(y) => y,
        None if query.device().is_autodiff() => composed(query, key, value, mask, options, 0.0),
        // Without gradients, burn has a fused kernel for GPUs.
        None => module::attention(query, key, value, mask, None, options),
    }
}

/// Returns [`attention`](attention()) with dropout, for training: each probability becomes 0 with
/// probability `dropout`, and is divided by `1 - dropout` otherwise.
///
/// The random numbers of the device give one seed for each call. With equal seeds, outputs are
/// bit-identical with any number of threads. burn's operators sample other numbers. Without
/// fusion, burn's operators compute the same distribution.
///
/// # Panics
///
/// `dropout` is not in [0, 1).
pub fn attention_with_dropout(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    options: AttentionModuleOptions,
    dropout: f64,
) -> Tensor<4> {
    assert!(
        (0.0..1.0).contains(&dropout),
        "the dropout probability is {dropout}, but must be in [0, 1)"
    );
    if dropout == 0.0 {
        return attention(query, key, value, mask, None, options);
    }
    #[cfg(feature = "cubecl")]
    if let Some(y) = crate::gpu::attention(&query, &key, &value, mask.as_ref(), &options, dropout) {
        return y;
    }
    let factors = Dropout::new(dropout, &query.device());
    fused(&query, &key, &value, mask.as_ref(), &options, Some(factors))
        .unwrap_or_else(|| composed(query, key, value, mask, options, dropout))
}

fn fused(
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
    mask: Option<&Tensor<4, Bool>>,
    options: &AttentionModuleOptions,
    dropout: Option<Dropout>,
) -> Option<Tensor<4>> {
    let [batch, heads, len_query, d_head] = query.dims();
    let [_, _, len_key, d_value] = value.dims();
    let fits = key.dims() == [batch, heads, len_key, d_head]
        && value.dims() == [batch, heads, len_key, d_value]
        && len_key > 0;
    if !fits || options.softcap.is_some() {
        return None;
    }
    let mask = match mask {
        Some(mask) => Some(Mask::new(mask, [batch, heads, len_query, len_key])?),
        None => None,
    };
    let operands = [Operand::new(query)?, Operand::new(key)?, Operand::new(value)?];
    if !share_tape(&operands.each_ref()) {
        return None;
    }
    let scale = options.scale.unwrap_or_else(|| 1.0 / (d_head as f64).sqrt());
    let orders = operands.each_ref().map(|operand| Order::of(&operand.tensor()));
    let [query, key, value] = operands.each_ref().map(|operand| Strided::new(operand.tensor()));
    let heads = Heads {
        query,
        key,
        value,
        num: [batch, heads],
        len: [len_query, len_key],
        depth: [d_head, d_value],
        scale: scale as f32,
        dropout,
        orders,
    };
    let visible = Visible { is_causal: options.is_causal, mask };
    let is_tracked = operands.iter().any(Operand::is_tracked);
    let (output, probabilities) = heads.forward(&visible, is_tracked);
    let output = orders[0].tensor(output, [batch, heads.num[1], len_query, d_value]);
    let gradient = || -> Arc<dyn Gradient> { Arc::new(AttentionGradient { heads, probabilities }) };
    Some(record(operands, output, gradient))
}

/// Booleans with strides, broadcast to the shape of the scores.
struct Mask {
    tensor: FlexTensor,
    strides: [usize; 4],
}

impl Mask {
    /// Returns `None` if the mask cannot be broadcast, or is not on Flex.
    fn new(mask: &Tensor<4, Bool>, shape: [usize; 4]) -> Option<Self> {
        let dims = mask.dims();
        if dims.iter().zip(shape).any(|(dim, size)| *dim != 1 && *dim != size) {
            return None;
        }
        let tensor = booleans(mask)?.to_contiguous();
        let mut strides = [0; 4];
        let mut stride = 1;
        for axis in (0..4).rev() {
            strides[axis] = if dims[axis] == 1 { 0 } else { stride };
            stride *= dims[axis];
        }
        Some(Self { tensor, strides })
    }

    /// Hides the scores of a query where the mask is `true`.
    fn hide(&self, [batch, head, query]: [usize; 3], scores: &mut [f32]) {
        let [first, second, third, step] = self.strides;
        let start = batch * first + head * second + query * third;
        let values = &self.tensor.storage::<u8>()[start..];
        for (key, score) in scores.iter_mut().enumerate() {
            if values[key * step] != 0 {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    /// Returns whether the mask hides the first `num` keys of a query.
    fn hides_all(&self, [batch, head, query]: [usize; 3], num: usize) -> bool {
        let [first, second, third, step] = self.strides;
        let start = batch * first + head * second + query * third;
        let values = &self.tensor.storage::<u8>()[start..];
        (0..num).all(|key| values[key * step] != 0)
    }
}

/// Keys that each query sees.
struct Visible {
    is_causal: bool,
    mask: Option<Mask>,
}

/// Inputs of all heads.
struct Heads {
    query: Strided,
    key: Strided,
    value: Strided,
    /// Batch and heads.
    num: [usize; 2],
    /// Queries and keys.
    len: [usize; 2],
    /// Sizes of a query or key, and of a value.
    depth: [usize; 2],
    scale: f32,
    /// Applied to the probabilities.
    dropout: Option<Dropout>,
    /// Orders of query, key and value. The output has that of the query.
    orders: [Order; 3],
}

impl Heads {
    fn num_heads(&self) -> usize {
        self.num[0] * self.num[1]
    }

    /// Multiplications of the forward pass.
    fn num_products(&self) -> usize {
        self.num_heads() * self.len[0] * self.len[1] * (self.depth[0] + self.depth[1])
    }

    /// Returns batch and head.
    fn index(&self, head: usize) -> [usize; 2] {
        [head / self.num[1], head % self.num[1]]
    }

    /// Returns the output of all heads, and the probabilities if `is_tracked`.
    fn forward(&self, visible: &Visible, is_tracked: bool) -> (Vec<f32>, Vec<f32>) {
        let [len_query, len_key] = self.len;
        let (num_scores, num_out) = (len_query * len_key, len_query * self.depth[1]);
        let mut output = NewValues::new(self.num_heads() * num_out);
        let num_kept = if is_tracked { self.num_heads() * num_scores } else { 0 };
        if self.num_heads() * num_out == 0 {
            return (vec![], vec![0.0; num_kept]);
        }
        let mut kept = NewValues::new(num_kept);
        let size = chunk_rows(self.num_heads());
        let mut kept_chunks = kept.chunks((size * num_scores).max(1));
        let [batch, heads] = self.num;
        let rows = self.orders[0].rows(&mut output, [batch, heads, len_query, self.depth[1]]);
        let parts = into_chunks(rows, size).into_iter().enumerate();
        let parts = parts
            .map(move |(chunk, rows)| (chunk * size, rows, kept_chunks.next().unwrap_or_default()));
        map_chunks(self.num_products(), parts.collect(), |(first, heads, kept)| {
            let (heads, kept): (Vec<Rows<'_>>, Blank<'_, f32>) = (heads, kept);
            let mut kept = kept.filled(num_scores.max(1), 0.0);
            let mut scratch = vec![0.0; if is_tracked { 0 } else { num_scores }];
            let mut dropped = vec![];
            for (index, rows) in heads.into_iter().enumerate() {
                let scores = kept.next().unwrap_or(&mut scratch);
                self.head_probabilities(self.index(first + index), visible, scores);
                let scores = self.drop_some(first + index, scores, &mut dropped);
                let scores = Matrix::row_major(scores, len_query, len_key);
                let value = self.value.matrix(&self.index(first + index));
                multiply_rows(fill_rows(rows, None), Output::Replace, 1.0, scores, value);
            }
        });
        (output.into_vec(), kept.into_vec())
    }

    /// Returns the probabilities of a head after the dropout. `dropped` is scratch space.
    fn drop_some<'a>(&self, head: usize, p: &'a [f32], dropped: &'a mut Vec<f32>) -> &'a [f32] {
        let Some(dropout) = self.dropout else { return p };
        dropped.clear();
        dropped.extend_from_slice(p);
        self.apply_dropout(dropout, head, dropped);
        dropped
    }

    /// Multiplies values of the shape of a head's probabilities by the factors of the dropout.
    fn apply_dropout(&self, dropout: Dropout, head: usize, values: &mut [f32]) {
        let [len_query, len_key] = self.len;
        vectorize(
            #[inline(always)]
            || {
                for (query, row) in values.chunks_exact_mut(len_key).enumerate() {
                    dropout.apply(head * len_query + query, row);
                }
            },
        );
    }

    /// Writes the probabilities of one head.
    fn head_probabilities(&self, index: [usize; 2], visible: &Visible, scores: &mut [f32]) {
        let [len_query, len_key] = self.len;
        let (query, key) = (self.query.matrix(&index), self.key.matrix(&index));
        multiply(scores, Output::Replace, self.scale, query, key.transposed(), Threads::One);
        for (query, row) in scores.chunks_exact_mut(len_key).enumerate() {
            if let Some(mask) = &visible.mask {
                mask.hide([index[0], index[1], query], row);
            }
            let num_visible = match visible.is_causal {
                true => (query + len_key + 1).saturating_sub(len_query).min(len_key),
                false => len_key,
            };
            let (row, hidden) = row.split_at_mut(num_visible);
            hidden.fill(0.0);
            let maximum = vectorize(
                #[inline(always)]
                || {
                    let maximum = max(row);
                    if maximum > f32::NEG_INFINITY {
                        softmax_row(row, maximum);
                    }
                    maximum
                },
            );
            if maximum == f32::NEG_INFINITY {
                let position = [index[0], index[1], query];
                let is_hidden = |mask: &Mask| mask.hides_all(position, num_visible);
                let sees_none = num_visible == 0 || visible.mask.as_ref().is_some_and(is_hidden);
                // As in PyTorch, NaN if visible keys have only scores of negative infinity or NaN.
                row.fill(if sees_none { 0.0 } else { f32::NAN });
            }
        }
    }
}

struct AttentionGradient {
    heads: Heads,
    probabilities: Vec<f32>,
}

impl Gradient for AttentionGradient {
    /// With the probabilities `p` and the factors `f` of the dropout: `dvalue = (p f)^T * dy`,
    /// `dp = (dy * value^T) f`, `ds` the gradient of the softmax, `dquery = scale * ds * key`,
    /// `dkey = scale * ds^T * query`.
    fn backward(&self, output: FlexTensor, _: &[bool]) -> Vec<Option<FlexTensor>> {
        let Heads { num: [batch, num_heads], len: [len_query, len_key], orders, .. } = self.heads;
        let [d_head, d_value] = self.heads.depth;
        let shapes = [(len_query, d_head), (len_key, d_head), (len_key, d_value)];
        let shapes = shapes.map(|(len, depth)| [batch, num_heads, len, depth]);
        let mut gradients = shapes.map(|shape| NewValues::new(shape.iter().product()));
        let size = chunk_rows(self.heads.num_heads());
        let [query, key, value] = &mut gradients;
        let query = orders[0].rows(query, shapes[0]).into_iter();
        let key = orders[1].rows(key, shapes[1]).into_iter();
        let value = orders[2].rows(value, shapes[2]).into_iter();
        let heads = query.zip(key).zip(value).map(|((query, key), value)| [query, key, value]);
        let parts = into_chunks(heads.collect(), size).into_iter().enumerate();
        let parts = parts.map(|(chunk, gradients)| (chunk * size, gradients)).collect();
        let output = Strided::new(output);
        map_chunks(2 * self.heads.num_products(), parts, |(first, gradients)| {
            self.chunk_gradients(first, gradients, &output);
        });
        let tensors = gradients.into_iter().zip(orders).zip(shapes);
        let tensor = |((values, order), shape): ((NewValues<_>, Order), _)| {
            Some(order.tensor(values.into_vec(), shape))
        };
        tensors.map(tensor).collect()
    }
}

impl AttentionGradient {
    /// Writes the gradients of query, key and value of the heads from `first` on.
    fn chunk_gradients(&self, first: usize, gradients: Vec<[Rows<'_>; 3]>, output: &Strided) {
        let Heads { len: [len_query, len_key], scale, .. } = self.heads;
        let num_scores = len_query * len_key;
        let mut scores = vec![0.0; num_scores];
        let mut dropped = vec![];
        for (head, gradients) in (first..).zip(gradients) {
            let [dquery, dkey, dvalue] = gradients.map(|rows| fill_rows(rows, None));
            let index = self.heads.index(head);
            let dy = output.matrix(&index);
            let values = &self.probabilities[head * num_scores..][..num_scores];
            let p = self.heads.drop_some(head, values, &mut dropped);
            let p = Matrix::row_major(p, len_query, len_key);
            multiply_rows(dvalue, Output::Replace, 1.0, p.transposed(), dy);
            let value = self.heads.value.matrix(&index).transposed();
            multiply(&mut scores, Output::Replace, 1.0, dy, value, Threads::One);
            if let Some(dropout) = self.heads.dropout {
                self.heads.apply_dropout(dropout, head, &mut scores);
            }
            vectorize(
                #[inline(always)]
                || {
                    let rows = scores.chunks_exact_mut(len_key).zip(values.chunks_exact(len_key));
                    rows.for_each(|(gradient, p)| softmax_row_gradient(gradient, p));
                },
            );
            let ds = Matrix::row_major(&scores, len_query, len_key);
            let (query, key) = (self.heads.query.matrix(&index), self.heads.key.matrix(&index));
            multiply_rows(dquery, Output::Replace, scale, ds, key);
            multiply_rows(dkey, Output::Replace, scale, ds.transposed(), query);
        }
    }
}

/// Rows of an output of one head.
type Rows<'a> = Vec<Blank<'a, f32>>;

/// Divides values into chunks of this size. The last one may be shorter.
fn into_chunks<T>(values: Vec<T>, size: usize) -> Vec<Vec<T>> {
    let mut values = values.into_iter();
    let chunks = std::iter::from_fn(|| {
        let chunk: Vec<T> = values.by_ref().take(size).collect();
        (!chunk.is_empty()).then_some(chunk)
    });
    chunks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        Case, assert_gradients, assert_matches_burn, assert_same_on_threads, device, run,
    };

    /// Batch, heads, queries, keys, size of a key and of a value.
    type Sizes = [usize; 6];

    const SIZES: [Sizes; 5] = [
        [1, 1, 1, 1, 1, 1],
        [2, 3, 5, 5, 4, 4],
        [1, 9, 3, 7, 2, 5],
        [2, 1, 6, 4, 3, 3],
        [0, 2, 3, 3, 2, 2],
    ];

    #[derive(Clone, Copy, Debug)]
    enum Masking {
        None,
        Causal,
        /// Hides the middle key from all queries.
        Keys,
        /// Hides by query and key, all keys from query 0.
        Queries,
    }

    const MASKINGS: [Masking; 4] =
        [Masking::None, Masking::Causal, Masking::Keys, Masking::Queries];

    fn case([batch, heads, len_query, len_key, d_head, d_value]: Sizes) -> Case {
        let num = batch * heads;
        Case::new(&[num * len_query * d_head, num * len_key * d_head, num * len_key * d_value])
    }

    fn is_hidden(masking: Masking, sizes: Sizes, query: usize, key: usize) -> bool {
        let [_, _, len_query, len_key, ..] = sizes;
        match masking {
            Masking::None => false,
            Masking::Causal => key + len_query > query + len_key,
            Masking::Keys => len_key > 1 && key == len_key / 2,
            Masking::Queries => query == 0 || (query + 2 * key).is_multiple_of(3),
        }
    }

    fn mask(masking: Masking, sizes: Sizes) -> Option<Tensor<4, Bool>> {
        let [_, _, len_query, len_key, ..] = sizes;
        let num_rows = match masking {
            Masking::None | Masking::Causal => return None,
            Masking::Keys => 1,
            Masking::Queries => len_query,
        };
        let hidden = (0..num_rows * len_key)
            .map(|index| is_hidden(masking, sizes, index / len_key, index % len_key));
        let data = burn::tensor::TensorData::new(hidden.collect::<Vec<_>>(), [num_rows * len_key]);
        Some(Tensor::<1, Bool>::from_data(data, &device()).reshape([1, 1, num_rows, len_key]))
    }

    fn options(masking: Masking) -> AttentionModuleOptions {
        let is_causal = matches!(masking, Masking::Causal);
        AttentionModuleOptions { scale: Some(0.7), softcap: None, is_causal }
    }

    fn shaped(sizes: Sizes, inputs: &[Tensor<1>]) -> [Tensor<4>; 3] {
        let [batch, heads, len_query, len_key, d_head, d_value] = sizes;
        // Keys are a view with swapped dimensions.
        let key = inputs[1].clone().reshape([batch, len_key, heads, d_head]).swap_dims(1, 2);
        let query = inputs[0].clone().reshape([batch, heads, len_query, d_head]);
        [query, key, inputs[2].clone().reshape([batch, heads, len_key, d_value])]
    }

    fn flat(y: Tensor<4>) -> Tensor<1> {
        let num = y.dims().iter().product::<usize>();
        y.reshape([num])
    }

    fn ours(sizes: Sizes, masking: Masking) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        ours_with(sizes, masking, None)
    }

    fn ours_with(
        sizes: Sizes,
        masking: Masking,
        dropout: Option<Dropout>,
    ) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let [query, key, value] = shaped(sizes, inputs);
            let mask = mask(masking, sizes);
            let options = options(masking);
            flat(fused(&query, &key, &value, mask.as_ref(), &options, dropout).unwrap())
        }
    }

    #[test]
    fn matches_burn_for_masks() {
        for sizes in SIZES {
            for masking in MASKINGS {
                let burns = |inputs: &[Tensor<1>]| {
                    let [query, key, value] = shaped(sizes, inputs);
                    let mask = mask(masking, sizes);
                    flat(module::attention(query, key, value, mask, None, options(masking)))
                };
                let name = format!("{masking:?}, {sizes:?}");
                assert_matches_burn(&name, &case(sizes), &ours(sizes, masking), &burns);
            }
        }
    }

    /// Scores of query 0 overflow; query 1 sees no key. The same with burn's operators.
    #[test]
    fn overflowed_scores_give_nan() {
        let row = |value: f32| [value, value];
        let heads = |rows: [[f32; 2]; 2]| Tensor::<4>::from_floats([[rows]], &device());
        let query = heads([row(-1e30), row(1.0)]);
        let (key, value) = (heads([row(1e30), row(1e30)]), heads([row(1.0), row(2.0)]));
        let hidden = Tensor::<4, Bool>::from_data([[[[false, true], [true, true]]]], &device());
        let options = AttentionModuleOptions::default();
        let fused = fused(&query, &key, &value, Some(&hidden), &options, None).unwrap();
        let burns = composed(query, key, value, Some(hidden), options, 0.0);
        for y in [fused, burns] {
            let y: Vec<f32> = y.into_data().try_to_vec().unwrap();
            assert!(y[0].is_nan() && y[1].is_nan() && y[2..] == [0.0; 2], "{y:?}");
        }
    }

    /// The gradients of a query without visible keys are zero, not NaN.
    #[test]
    fn composed_gradients_match_with_hidden_rows() {
        for sizes in [[1, 2, 3, 3, 2, 2], [1, 1, 4, 2, 3, 2]] {
            for masking in MASKINGS {
                let hides_all = |inputs: &[Tensor<1>]| {
                    let [query, key, value] = shaped(sizes, inputs);
                    let mask = mask(masking, sizes).map(|mask| {
                        let hidden = mask.ones_like().slice([0..1, 0..1, 0..1]);
                        mask.slice_assign([0..1, 0..1, 0..1], hidden)
                    });
                    (query, key, value, mask)
                };
                let ours = |inputs: &[Tensor<1>]| {
                    let (query, key, value, mask) = hides_all(inputs);
                    let options = options(masking);
                    flat(fused(&query, &key, &value, mask.as_ref(), &options, None).unwrap())
                };
                let burns = |inputs: &[Tensor<1>]| {
                    let (query, key, value, mask) = hides_all(inputs);
                    flat(composed(query, key, value, mask, options(masking), 0.0))
                };
                let name = format!("{masking:?}, {sizes:?}");
                assert_matches_burn(&name, &case(sizes), &ours, &burns);
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for dropout in [None, Some(Dropout::with_seed(0.4, 3))] {
            for masking in MASKINGS {
                for sizes in [[1, 2, 3, 3, 2, 2], [1, 1, 2, 4, 3, 2]] {
                    let reference =
                        |inputs: &[Vec<f64>]| reference(sizes, masking, dropout, inputs);
                    let name = format!("{masking:?}, {sizes:?}, {dropout:?}");
                    let ours = ours_with(sizes, masking, dropout);
                    assert_gradients(&name, &case(sizes), &ours, &reference);
                }
            }
        }
    }

    /// Attention by its definition.
    fn reference(
        sizes: Sizes,
        masking: Masking,
        dropout: Option<Dropout>,
        inputs: &[Vec<f64>],
    ) -> Vec<f64> {
        let [batch, heads, len_query, len_key, d_head, d_value] = sizes;
        let mut out = vec![];
        for index in 0..batch * heads * len_query {
            let (head, query) = (index / len_query, index % len_query);
            let exponential = |key: usize| {
                if is_hidden(masking, sizes, query, key) {
                    return 0.0;
                }
                let start = ((head / heads * len_key + key) * heads + head % heads) * d_head;
                let product =
                    (0..d_head).map(|k| inputs[0][index * d_head + k] * inputs[1][start + k]);
                (0.7 * product.sum::<f64>()).exp()
            };
            let weights: Vec<f64> = (0..len_key).map(exponential).collect();
            let sum = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            let mut factors = vec![1.0_f32; len_key];
            if let Some(dropout) = dropout {
                dropout.apply(index, &mut factors);
            }
            let weight = |key: usize| weights[key] / sum * f64::from(factors[key]);
            for column in 0..d_value {
                let value = |key| inputs[2][(head * len_key + key) * d_value + column];
                out.push((0..len_key).map(|key| weight(key) * value(key)).sum());
            }
        }
        out
    }

    #[test]
    fn threads_do_not_change_bits() {
        let sizes = [3, 7, 33, 33, 16, 16];
        for dropout in [None, Some(Dropout::with_seed(0.1, 3))] {
            let ours = ours_with(sizes, Masking::Causal, dropout);
            assert_same_on_threads(&case(sizes), &ours);
        }
    }

    /// Heads of linear layers are such views.
    #[test]
    fn views_give_the_bits_of_copies() {
        let sizes @ [batch, heads, len_query, len_key, d_head, d_value] = [2, 3, 5, 6, 4, 3];
        let shapes = [(len_query, d_head), (len_key, d_head), (len_key, d_value)];
        let outcome = |is_copied: bool| {
            run(&case(sizes), &|inputs: &[Tensor<1>]| {
                let [query, key, value] = [0, 1, 2].map(|index| {
                    let (len, depth) = shapes[index];
                    let x = inputs[index].clone().reshape([batch, len, heads, depth]);
                    let x = x.swap_dims(1, 2);
                    // The view cannot have this shape without a copy.
                    if !is_copied {
                        return x;
                    }
                    x.reshape([batch * heads * len * depth]).reshape([batch, heads, len, depth])
                });
                let y = attention(query, key, value, None, None, options(Masking::Causal));
                let output = Operand::new(&y).unwrap().tensor();
                let expected = if is_copied { Order::Heads } else { Order::Positions };
                assert_eq!(Order::of(&output), expected);
                flat(y)
            })
        };
        let (views, copies) = (outcome(false), outcome(true));
        assert_eq!(views.output, copies.output);
        for (view, copy) in views.gradients.iter().zip(&copies.gradients) {
            assert_eq!(view, copy);
        }
    }

    #[test]
    fn gradients_with_any_strides_are_read() {
        let sizes @ [batch, heads, len_query, _, _, d_value] = [2, 3, 5, 6, 4, 3];
        type View = fn(Tensor<4>) -> Tensor<4>;
        let views: [(&str, View); 3] = [
            ("swapped heads and positions", |y| y.swap_dims(1, 2)),
            ("swapped positions and depth", |y| y.swap_dims(2, 3)),
            ("flipped heads and positions", |y| y.flip([1, 2])),
        ];
        for (name, view) in views {
            let gradients = |is_view: bool| {
                let outcome = run(&case(sizes), &|inputs: &[Tensor<1>]| {
                    let [query, key, value] = shaped(sizes, inputs);
                    let y = attention(query, key, value, None, None, options(Masking::Causal));
                    let num = batch * heads * len_query * d_value;
                    let weights: Vec<f32> = (0..num).map(|index| index as f32).collect();
                    let weights = Tensor::<1>::from_floats(&*weights, &y.device());
                    let weights = weights.reshape([batch, heads, len_query, d_value]);
                    // The gradient of a view's input is a view, too.
                    let product = match is_view {
                        true => view(y) * view(weights),
                        false => y * weights,
                    };
                    product.sum().reshape([1])
                });
                outcome.gradients
            };
            assert_eq!(gradients(true), gradients(false), "{name}");
        }
    }

    #[test]
    fn inputs_with_any_strides_give_the_bits_of_copies() {
        let [batch, heads, len, depth] = [2, 3, 5, 4];
        type View = fn(Tensor<4>) -> Tensor<4>;
        let views: [(&str, View); 4] = [
            ("flipped positions", |x| x.flip([2])),
            ("flipped heads and depth", |x| x.flip([1, 3])),
            ("swapped positions and depth", |x| x.reshape([2, 3, 4, 5]).swap_dims(2, 3)),
            ("one head for all", |x| x.narrow(1, 0, 1).expand([2, 3, 5, 4])),
        ];
        for (name, view) in views {
            let outcome = |is_copied: bool| {
                run(&Case::new(&[batch * heads * len * depth; 3]), &|inputs: &[Tensor<1>]| {
                    let [query, key, value] = [0, 1, 2].map(|index| {
                        let x = view(inputs[index].clone().reshape([batch, heads, len, depth]));
                        // Multiplying by 1 gives contiguous values.
                        if is_copied { x.clone() * Tensor::ones(x.dims(), &x.device()) } else { x }
                    });
                    flat(attention(query, key, value, None, None, options(Masking::Causal)))
                })
            };
            let (views, copies) = (outcome(false), outcome(true));
            assert_eq!(views.output, copies.output, "{name}");
            assert_eq!(views.gradients, copies.gradients, "{name}");
        }
    }

    #[test]
    fn nan_stays_in_its_query() {
        let sizes = [1, 1, 2, 3, 2, 1];
        let mut case = case(sizes);
        case.inputs[0][0] = f32::NAN;
        let output = run(&case, &ours(sizes, Masking::None)).output;
        assert!(output[0].is_nan() && output[1].is_finite(), "{output:?}");
    }

    #[test]
    fn untracked_inputs_give_equal_bits() {
        let sizes = [2, 3, 5, 5, 4, 4];
        let case = case(sizes);
        for dropout in [None, Some(Dropout::with_seed(0.1, 3))] {
            let ours = ours_with(sizes, Masking::Causal, dropout);
            let tracked = run(&case, &ours).output;
            let plain = ours(&case.tensors(&device()));
            assert_eq!(plain.into_data().try_to_vec::<f32>().unwrap(), tracked);
        }
    }

    /// Values of 1 give the sum of the kept probabilities, whose mean is 1.
    #[test]
    fn composed_and_fused_dropout_have_equal_means() {
        let device = device().autodiff();
        let (query, key) =
            (Tensor::zeros([20, 5, 10, 2], &device), Tensor::zeros([20, 5, 10, 2], &device));
        let value = Tensor::<4>::ones([20, 5, 10, 1], &device);
        let options = options(Masking::Causal);
        let fused =
            attention_with_dropout(query.clone(), key.clone(), value.clone(), None, options, 0.2);
        let composed = composed(query, key, value, None, options, 0.2);
        for (name, y) in [("fused", fused), ("composed", composed)] {
            let y: Vec<f32> = y.into_data().try_to_vec().unwrap();
            let mean = y.iter().sum::<f32>() / y.len() as f32;
            assert!((mean - 1.0).abs() < 0.05, "{name}: {mean}");
            // The first query sees one key, which is dropped or kept.
            let is_first = |y: &f32| *y == 0.0 || (y - 1.25).abs() < 1e-6;
            assert!(y.iter().step_by(10).all(is_first), "{name}");
        }
    }

    #[test]
    fn composed_attention_matches_burn() {
        let all = [[2, 3, 5, 7, 4, 4], [2, 3, 7, 5, 4, 6]];
        for (sizes, masking) in all.iter().flat_map(|sizes| MASKINGS.map(|of| (*sizes, of))) {
            let composed = |inputs: &[Tensor<1>]| {
                let [query, key, value] = shaped(sizes, inputs);
                let mask = mask(masking, sizes);
                flat(composed(query, key, value, mask, options(masking), 0.0))
            };
            let burns = |inputs: &[Tensor<1>]| {
                let [query, key, value] = shaped(sizes, inputs);
                let mask = mask(masking, sizes);
                flat(module::attention(query, key, value, mask, None, options(masking)))
            };
            assert_matches_burn(&format!("{masking:?}"), &case(sizes), &composed, &burns);
        }
    }

    #[test]
    fn composed_attention_broadcasts_batch_and_heads() {
        let tensor = |[batch, heads]: [usize; 2], seed: u64| -> Tensor<4> {
            crate::testing::random([batch, heads, 5, 4], seed).into_tensor(&device().autodiff())
        };
        for [of_query, of_keys] in [[[2, 3], [2, 1]], [[2, 3], [1, 1]], [[1, 3], [2, 3]]] {
            let (query, key, value) = (tensor(of_query, 1), tensor(of_keys, 2), tensor(of_keys, 3));
            let all = |x: &Tensor<4>| x.clone().expand([2, 3, 5, 4]);
            let options = options(Masking::Causal);
            let expected = attention(all(&query), all(&key), all(&value), None, None, options);
            let shared = attention(query, key, value, None, None, options);
            let name = format!("{of_query:?} over {of_keys:?}");
            crate::testing::assert_close_tensors(&name, shared, expected);
        }
    }

    #[test]
    fn softcap_and_bias_use_operator_of_burn() {
        let tensor = || Tensor::<4>::ones([1, 1, 2, 2], &device());
        let options = AttentionModuleOptions { softcap: Some(1.0), ..options(Masking::None) };
        assert!(fused(&tensor(), &tensor(), &tensor(), None, &options, None).is_none());
        let bias = Some(tensor());
        let y = attention(tensor(), tensor(), tensor(), None, bias, options);
        assert_eq!(y.dims(), [1, 1, 2, 2]);
    }
}
