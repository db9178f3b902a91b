//! Scaled dot-product attention.

use std::sync::Arc;

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Distribution, Tensor, activation};

use super::product::{Factor, multiply, multiply_heads};
use super::rows::{softmax, softmax_gradient};
use super::tape::{
    Gradient, Operand, Plain, booleans, fit_together, has_kernels, plain, record, tensor,
};

/// See [`attention`](crate::attention()) and
/// [`attention_with_dropout`](crate::attention_with_dropout). Returns `None` if the tensors are not
/// on a GPU or do not fit, or with `softcap`.
pub(crate) fn attention(
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
    mask: Option<&Tensor<4, Bool>>,
    options: &AttentionModuleOptions,
    dropout: f64,
) -> Option<Tensor<4>> {
    let [batch, heads, len_query, d_head] = query.dims();
    let [_, _, len_key, d_value] = value.dims();
    let fits = key.dims() == [batch, heads, len_key, d_head]
        && value.dims() == [batch, heads, len_key, d_value]
        && batch * heads * len_query * d_head * len_key * d_value > 0;
    if !fits || options.softcap.is_some() {
        return None;
    }
    let mask = match mask {
        Some(mask) => Some(booleans(mask)?),
        None => None,
    };
    let operands = [Operand::new(query)?, Operand::new(key)?, Operand::new(value)?];
    if !fit_together(&operands.each_ref()) {
        return None;
    }
    let scale = options.scale.unwrap_or_else(|| 1.0 / (d_head as f64).sqrt());
    let [query, key, value] = operands.each_ref().map(Operand::tensor::<4>);
    let scores = multiply(query.clone(), Factor::transposed(key.clone()), scale);
    let probabilities = probabilities(scores, mask, options.is_causal);
    let factors = (dropout > 0.0).then(|| {
        probabilities.random_like(Distribution::Bernoulli(1.0 - dropout)) / (1.0 - dropout)
    });
    let dropped = match &factors {
        Some(factors) => probabilities.clone() * factors.clone(),
        None => probabilities.clone(),
    };
    let output = plain(multiply_heads(dropped, value.clone(), 1.0));
    let gradient = || -> Arc<dyn Gradient> {
        let [query, key, value, probabilities] = [query, key, value, probabilities].map(plain);
        let factors = factors.map(plain);
        Arc::new(AttentionGradient { query, key, value, probabilities, factors, scale })
    };
    Some(record(operands, output, gradient))
}

/// Softmax over the visible keys of each query. Queries without visible keys have zeros.
fn probabilities(scores: Tensor<4>, mask: Option<Tensor<4, Bool>>, is_causal: bool) -> Tensor<4> {
    let shape @ [_, _, len_query, len_key] = scores.dims();
    if mask.is_none() && has_kernels(&scores) {
        return softmax(scores, is_causal.then_some(len_query));
    }
    let future = is_causal.then(|| {
        let offset = len_key as i64 - len_query as i64;
        let future = Tensor::<2, Bool>::tril_mask([len_query, len_key], offset, &scores.device());
        future.unsqueeze::<4>().expand(shape)
    });
    let mask = mask.map(|mask| mask.expand(shape));
    let may_hide_all = mask.is_some() || len_query > len_key;
    let hidden = match (mask, future) {
        (Some(mask), Some(future)) => Some(mask.bool_or(future)),
        (mask, future) => mask.or(future),
    };
    let Some(hidden) = hidden else { return activation::softmax(scores, 3) };
    let min = scores.dtype().finfo().map_or(f64::from(f32::MIN), |info| info.min);
    let probabilities = activation::softmax(scores.mask_fill(hidden.clone(), min), 3);
    if may_hide_all { probabilities.mask_fill(hidden, 0.0) } else { probabilities }
}

struct AttentionGradient {
    query: Plain,
    key: Plain,
    value: Plain,
    probabilities: Plain,
    /// Factors of dropout.
    factors: Option<Plain>,
    scale: f64,
}

impl Gradient for AttentionGradient {
    /// With probabilities `p`, and `dp` without dropout:
    /// `dvalue = p^T * dy`, `dp = dy * value^T`, `dscores = p * (dp - row sums of p * dp)`,
    /// `dquery = dscores * key * scale`, `dkey = dscores^T * query * scale`.
    fn backward(&self, output: Plain, is_wanted: &[bool]) -> Vec<Option<Plain>> {
        let of = |plain: &Plain| tensor::<4>(plain.clone());
        let output = tensor::<4>(output);
        let (probabilities, factors) = (of(&self.probabilities), self.factors.as_ref().map(of));
        let dvalue = is_wanted[2].then(|| {
            let dropped = match &factors {
                Some(factors) => probabilities.clone() * factors.clone(),
                None => probabilities.clone(),
            };
            plain(multiply_heads(Factor::transposed(dropped), output.clone(), 1.0))
        });
        if !is_wanted[0] && !is_wanted[1] {
            return vec![None, None, dvalue];
        }
        let dprobabilities = multiply(output, Factor::transposed(of(&self.value)), 1.0);
        let dprobabilities = match factors {
            Some(factors) => dprobabilities * factors,
            None => dprobabilities,
        };
        let dscores = softmax_gradient_of(probabilities, dprobabilities);
        let dquery =
            is_wanted[0].then(|| plain(multiply_heads(dscores.clone(), of(&self.key), self.scale)));
        let dkey = is_wanted[1].then(|| {
            plain(multiply_heads(Factor::transposed(dscores), of(&self.query), self.scale))
        });
        vec![dquery, dkey, dvalue]
    }
}

fn softmax_gradient_of(y: Tensor<4>, dy: Tensor<4>) -> Tensor<4> {
    if has_kernels(&y) {
        return softmax_gradient(y, dy);
    }
    let row_sums = (y.clone() * dy.clone()).sum_dim(3);
    y * (dy - row_sums)
}
