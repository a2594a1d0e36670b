use burn::{backend::Dispatch, tensor::Tensor};

use crate::{
    CacheFloat, Error, FakeQuantOptions, KvCacheConfig, KvCacheOps, Result,
    layout::{CacheLayout, CacheShape, StreamSpec},
};

use super::quantize::{check_dtype, debug_check_finite, fake_quantize_from};

/// Causal attention over a whole sequence exactly as a KIVI cache would compute it token by token,
/// without the token loop: row `t` sees quantized keys and values by
/// [`Window::counts`](crate::layout::Window::counts) and the rest in float. Scores are scaled by
/// `1 / sqrt(head_dim)`.
///
/// Differentiable in all three inputs, straight through the quantizer: this is what
/// quantization-aware training of the cache runs.
///
/// # Shapes
/// - `query`: `[batch, n_heads, tokens, head_dim]`
/// - `key`, `value`: `[batch, n_kv_heads, tokens, head_dim]`, keys after the position encoding;
///   `n_kv_heads` divides `n_heads`
/// - output: the shape of `query`
///
/// NaN and infinite inputs spread no further than in a cache: the output of row `t` is not finite
/// exactly if something that the row sees makes it so, a NaN or infinite score (the whole row) or
/// an element of a value (its channel). Quantized tokens are always finite, as
/// [`quantize`](crate::quantize) says. Gradients follow the same rule. An f16 cache saturates
/// values beyond ±65504, infinities too, when they enter.
///
/// # Errors
/// [`Error::Shape`] and [`Error::InvalidConfig`] naming the argument; [`Error::Unsupported`] for a
/// device without the cache's float type, or more elements than it can count; [`Error::NonFinite`] in
/// debug builds.
pub fn streaming_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    config: &KvCacheConfig,
) -> Result<Tensor<4>> {
    streaming_attention_with(query, key, value, config, FakeQuantOptions::default())
}

/// [`streaming_attention`] with a choice of how training treats the quantizer.
///
/// # Errors
/// Those of [`streaming_attention`].
pub fn streaming_attention_with(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    config: &KvCacheConfig,
    options: FakeQuantOptions,
) -> Result<Tensor<4>> {
    let shape = check_qkv("streaming_attention", &query, &key, &value)?;
    if query.dims()[2] != key.dims()[2] {
        return Err(Error::Shape {
            op: "streaming_attention",
            tensor: "query",
            shape: query.dims().to_vec(),
            rule: format!("must have the {} tokens of key", key.dims()[2]),
        });
    }
    // No cache is allocated here, so any valid capacity will do.
    let layout = CacheLayout::new(&config.with_capacity(1), shape)?;
    let device = query.device();
    crate::backends::check("streaming_attention", &layout, &device)?;
    let spec = StreamSpec::whole(config);
    crate::backends::check_stream(query.dims(), key.dims(), spec, &device)?;
    debug_check_finite("streaming_attention", "key", &key)?;
    debug_check_finite("streaming_attention", "value", &value)?;
    Ok(closed_form(query, key, value, &layout, options))
}

/// [`streaming_attention_with`] without the checks, for a sequence that starts with an empty cache.
pub(crate) fn closed_form(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    layout: &CacheLayout,
    options: FakeQuantOptions,
) -> Tensor<4> {
    let config = layout.config();
    let (key, value) = (store(key, config.float), store(value, config.float));
    let skip = if options.quantize_everything { 0 } else { config.sink_tokens };
    let hat = |side: &Tensor<4>, spec| match spec {
        Some(spec) => fake_quantize_from(side.clone(), spec, skip, options.gradient),
        None => side.clone(),
    };
    let (key_hat, value_hat) = (hat(&key, layout.key_spec()), hat(&value, layout.value_spec()));
    if options.quantize_everything {
        // Every row sees the restored form of every token.
        let spec = StreamSpec::whole(&KvCacheConfig::float());
        return stream(query, key_hat.clone(), key_hat, value_hat.clone(), value_hat, spec).0;
    }
    stream(query, key, key_hat, value, value_hat, StreamSpec::whole(config)).0
}

/// Rounds to the cache's float type and saturates, as storing in the cache does; the gradient is
/// that of the identity.
pub(crate) fn store(tensor: Tensor<4>, float: CacheFloat) -> Tensor<4> {
    match float {
        CacheFloat::F32 => tensor,
        CacheFloat::F16 => {
            let rounded = <Dispatch as KvCacheOps>::round_to_f16(tensor.into_dispatch());
            Tensor::from_dispatch(rounded)
        }
    }
}

/// [`KvCacheOps::streaming_attention`] on Burn's high-level tensors.
pub(crate) fn stream(
    query: Tensor<4>,
    key: Tensor<4>,
    key_hat: Tensor<4>,
    value: Tensor<4>,
    value_hat: Tensor<4>,
    spec: StreamSpec,
) -> (Tensor<4>, Tensor<3>) {
    let (output, lse) = <Dispatch as KvCacheOps>::streaming_attention(
        query.into_dispatch(),
        key.into_dispatch(),
        key_hat.into_dispatch(),
        value.into_dispatch(),
        value_hat.into_dispatch(),
        spec,
    );
    (Tensor::from_dispatch(output), Tensor::from_dispatch(lse))
}

/// Merges attention over two disjoint sets of tokens by their log-sum-exps.
pub(crate) fn merge(a: (Tensor<4>, Tensor<3>), b: (Tensor<4>, Tensor<3>)) -> Tensor<4> {
    let weight = burn::tensor::activation::sigmoid(a.1.clone() - b.1.clone());
    let weight = weight.unsqueeze_dim::<4>(3);
    // A part whose scores are all -inf has output 0 / 0 = NaN; it counts as 0.
    let [a, b] = [a, b].map(|(output, lse)| {
        let none = lse.lower_elem(f32::MIN).unsqueeze_dim::<4>(3).expand(output.dims());
        output.mask_fill(none, 0.0)
    });
    (a - b.clone()) * weight + b
}

/// Checks that query, key and value fit each other and returns the cache shape they imply.
pub(crate) fn check_qkv(
    op: &'static str,
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
) -> Result<CacheShape> {
    let fail = |tensor, shape: [usize; 4], rule: String| {
        Err(Error::Shape { op, tensor, shape: shape.to_vec(), rule })
    };
    let (q, k, v) = (query.dims(), key.dims(), value.dims());
    for (name, shape) in [("query", q), ("key", k), ("value", v)] {
        if shape.contains(&0) {
            return fail(name, shape, "no axis may be empty".to_string());
        }
    }
    if k != v {
        return fail("value", v, format!("must have the shape of key {k:?}"));
    }
    if q[0] != k[0] {
        return fail("query", q, format!("batch must be that of key, {}", k[0]));
    }
    if q[3] != k[3] {
        return fail("query", q, format!("head_dim must be that of key, {}", k[3]));
    }
    if !q[1].is_multiple_of(k[1]) {
        return fail("query", q, format!("n_heads must be a multiple of n_kv_heads {}", k[1]));
    }
    for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
        check_dtype(op, name, tensor)?;
    }
    Ok(CacheShape { batch: k[0], n_kv_heads: k[1], head_dim: k[3] })
}
