//! Attention from burn's operators.

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Distribution, Tensor, activation};

/// Attention from burn's operators, whose own attention has no dropout.
pub(super) fn composed(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    options: AttentionModuleOptions,
    dropout: f64,
) -> Tensor<4> {
    let [batch, heads, len_query, d_head] = query.dims();
    let ([of_keys @ .., len_key, _], [of_values @ .., _, _]) = (key.dims(), value.dims());
    let has_equal_heads = [of_keys, of_values] == [[batch, heads]; 2];
    // Heads are often views with swapped dimensions. Merging batch and heads copies such views.
    let merge = |x: Tensor<4>| match x.dims() {
        [_, _, len, depth] if has_equal_heads => x.reshape([1, batch * heads, len, depth]),
        _ => x,
    };
    let split = |x: Tensor<4>| match x.dims() {
        [_, _, len, depth] if has_equal_heads => x.reshape([batch, heads, len, depth]),
        _ => x,
    };
    let device = query.device();
    let scale = options.scale.unwrap_or_else(|| 1.0 / (d_head as f64).sqrt());
    let mut scores = split(merge(query).matmul(merge(key).swap_dims(2, 3))) * scale;
    let shape = scores.dims();
    if let Some(softcap) = options.softcap {
        assert!(softcap > 0.0, "softcap is {softcap}, but must be above 0");
        scores = (scores / softcap).tanh() * softcap;
    }
    let future = options.is_causal.then(|| {
        let offset = len_key as i64 - len_query as i64;
        let future = Tensor::<2, Bool>::tril_mask([len_query, len_key], offset, &device);
        future.unsqueeze::<4>().expand(shape)
    });
    let mask = mask.map(|mask| mask.expand(shape));
    let may_hide_all = mask.is_some() || len_query > len_key;
    let hidden = match (mask, future) {
        (Some(mask), Some(future)) => Some(mask.bool_or(future)),
        (mask, future) => mask.or(future),
    };
    if let Some(hidden) = &hidden {
        // Not the smallest number: a query whose visible scores overflowed would see hidden keys.
        scores = scores.mask_fill(hidden.clone(), f64::NEG_INFINITY);
    }
    let mut probabilities = activation::softmax(scores, 3);
    // A query without visible keys gives zeros.
    if let Some(hidden) = hidden.filter(|_| may_hide_all) {
        probabilities = probabilities.mask_fill(hidden, 0.0);
    }
    if dropout > 0.0 {
        let kept = probabilities.random_like(Distribution::Bernoulli(1.0 - dropout));
        probabilities = probabilities * kept / (1.0 - dropout);
    }
    split(merge(probabilities).matmul(merge(value)))
}
