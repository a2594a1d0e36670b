use burn::{
    backend::Dispatch,
    tensor::{DType, Tensor, activation},
};

use crate::{
    Attention, AttentionOptions, CacheFloat, Error, FakeQuantOptions, KvCacheConfig, KvCacheOps,
    Result,
    error::invalid,
    layout::{CacheLayout, CacheShape, Side, SideLayout, Sides, StreamSpec},
};

use super::quantize::{debug_check_finite, fake_quantize_from};

/// Causal attention over a whole sequence exactly as a KIVI cache would compute it token by token,
/// without the token loop: row `t` sees quantized keys and values by
/// [`Schedule::counts`](crate::layout::Schedule::counts) and the rest in float. Scores are scaled
/// by `1 / sqrt(head_dim)`.
///
/// Differentiable in all three inputs, straight through the quantizer: this is what
/// quantization-aware training of the cache runs.
///
/// # Shapes
/// - `query`: `[batch, n_heads, tokens, head_dim]`
/// - `key`: `[batch, n_kv_heads, tokens, head_dim]`, after the position encoding; `n_kv_heads`
///   divides `n_heads`
/// - `value`: as `key`, but a head may have another number of channels
/// - all three f32, f16 or bf16, sums are f32; output: the type of `query`, its shape with the
///   channels of `value`, and its [`lse`](Attention::lse)
///
/// NaN and infinite inputs spread no further than in a cache: the output of row `t` is not finite
/// exactly if something that the row sees makes it so, a NaN or infinite score (the whole row) or
/// an element of a value (its channel). Quantized tokens are always finite, as
/// [`quantize`](crate::quantize) says. Gradients follow the same rule. An f16 cache saturates
/// values beyond ±65504, infinities too, when they enter.
///
/// # Errors
/// [`Error::Shape`] and [`Error::InvalidConfig`] naming the argument; [`Error::Unsupported`] for a
/// device without the cache's float type, or more elements than it can count; [`Error::NonFinite`]
/// in debug builds.
pub fn streaming_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    config: &KvCacheConfig,
) -> Result<Attention> {
    let (fake_quant, options) = (FakeQuantOptions::default(), AttentionOptions::default());
    streaming_attention_with(query, key, value, config, fake_quant, options)
}

/// Computes [`streaming_attention`] with options for the quantizer's gradient and for the softmax.
///
/// # Errors
/// Fails as [`streaming_attention`] does.
pub fn streaming_attention_with(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    config: &KvCacheConfig,
    fake_quant: FakeQuantOptions,
    options: AttentionOptions,
) -> Result<Attention> {
    let layout = check_parallel(&query, &key, &value, config, options, false)?;
    let attend = Attend { layout: &layout, fake_quant, options, sink_logits: None };
    Ok(attend.closed_form(query, key, value))
}

/// Computes [`streaming_attention_with`] where a value is the first `value_dim` channels of its
/// key, as a cache of [such a shape](CacheShape::with_shared_values) does.
///
/// # Shapes
/// - as those of [`streaming_attention`], without `value`; output: `value_dim` channels
///
/// # Errors
/// Fails as [`streaming_attention`] does, and with [`Error::InvalidConfig`] for a `value_dim` of 0
/// or above the channels of `key`, and for keys after a Hadamard transform.
pub fn streaming_attention_latent(
    query: Tensor<4>,
    key: Tensor<4>,
    value_dim: usize,
    config: &KvCacheConfig,
    fake_quant: FakeQuantOptions,
    options: AttentionOptions,
) -> Result<Attention> {
    let value = shared_values(&key, value_dim)?;
    let layout = check_parallel(&query, &key, &value, config, options, true)?;
    let attend = Attend { layout: &layout, fake_quant, options, sink_logits: None };
    Ok(attend.closed_form(query, key, value))
}

/// Returns the values that are the first `value_dim` channels of `key`.
///
/// # Errors
/// [`Error::InvalidConfig`] for a `value_dim` of 0 or above the channels of `key`.
pub(crate) fn shared_values(key: &Tensor<4>, value_dim: usize) -> Result<Tensor<4>> {
    let width = key.dims()[3];
    match value_dim == 0 || value_dim > width {
        true => Err(invalid(
            "value_dim",
            value_dim,
            format!("must be 1 to {width}, the channels of key"),
        )),
        false => Ok(key.clone().narrow(3, 0, value_dim)),
    }
}

/// Computes [`streaming_attention_with`] with a learned sink per query head.
///
/// `sink_logits`, `[n_heads]` in f32, f16 or bf16, adds one score to each head's softmax whose
/// weight goes to no value, as in gpt-oss (2025, <https://arxiv.org/abs/2508.10925>). The
/// log-sum-exp includes it, and gradients reach it.
///
/// # Errors
/// Fails as [`streaming_attention`] does, and with [`Error::Shape`] for another number of logits
/// than query heads.
pub fn streaming_attention_with_sinks(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    sink_logits: Tensor<1>,
    config: &KvCacheConfig,
    fake_quant: FakeQuantOptions,
    options: AttentionOptions,
) -> Result<Attention> {
    let layout = check_parallel(&query, &key, &value, config, options, false)?;
    check_sinks("streaming_attention", &sink_logits, query.dims()[1])?;
    let attend = Attend { layout: &layout, fake_quant, options, sink_logits: Some(sink_logits) };
    Ok(attend.closed_form(query, key, value))
}

/// Checks the arguments of a function of this file and returns the layout of its cache.
fn check_parallel(
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
    config: &KvCacheConfig,
    options: AttentionOptions,
    shares_values: bool,
) -> Result<CacheLayout> {
    options.validate()?;
    let shape = check_qkv("streaming_attention", query, key, value)?;
    let shape = CacheShape { shares_values, ..shape };
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
    let spec = layout.stream();
    let n_heads = query.dims()[1];
    crate::backends::check_stream(n_heads, shape, key.dims()[2], spec, &device)?;
    debug_check_finite("streaming_attention", "key", key)?;
    debug_check_finite("streaming_attention", "value", value)?;
    Ok(layout)
}

/// Applies the Hadamard transform to a side if the cache stores it transformed.
pub(crate) fn hadamard_side(tensor: Tensor<4>, side: Side, config: &KvCacheConfig) -> Tensor<4> {
    match config.uses_hadamard(side) {
        true => apply_hadamard(tensor),
        false => tensor,
    }
}

/// Applies [`hadamard_side`] to values. The transform is its own inverse, so it also restores sums
/// of transformed values.
pub(crate) fn hadamard_values(value: Tensor<4>, config: &KvCacheConfig) -> Tensor<4> {
    hadamard_side(value, Side::Values, config)
}

/// Applies [`hadamard_side`] to queries and keys, which keeps their products.
pub(crate) fn hadamard_query_key(
    query_and_key: [Tensor<4>; 2],
    config: &KvCacheConfig,
) -> [Tensor<4>; 2] {
    query_and_key.map(|tensor| hadamard_side(tensor, Side::Keys, config))
}

/// Computes [`hadamard`] without its checks.
fn apply_hadamard(input: Tensor<4>) -> Tensor<4> {
    Tensor::from_dispatch(<Dispatch as KvCacheOps>::hadamard(floats(input).into_dispatch()))
}

/// Multiplies each row by Sylvester's Hadamard matrix divided by the root of its size.
///
/// The transform is its own inverse. A cache with [`KvCacheConfig::hadamard_values`] applies it to
/// values. The output is f32 for every input type.
///
/// # Shapes
/// - `input`, output: `[batch, heads, tokens, head_dim]`, head_dim a power of two up to 256
///
/// # Errors
/// [`Error::Shape`], and [`Error::Unsupported`] for a device without the operation.
pub fn hadamard(input: Tensor<4>) -> Result<Tensor<4>> {
    let shape = input.dims();
    if shape.contains(&0) || !shape[3].is_power_of_two() || shape[3] > 256 {
        let rule = "head_dim must be a power of two up to 256, and no axis empty".to_string();
        return Err(Error::Shape { op: "hadamard", tensor: "input", shape: shape.to_vec(), rule });
    }
    crate::backends::check_device("hadamard", &input.device())?;
    crate::backends::check_elements("hadamard", shape, &input.device())?;
    Ok(apply_hadamard(input))
}

/// Attention over a whole sequence.
pub(crate) struct Attend<'a> {
    pub(crate) layout: &'a CacheLayout,
    pub(crate) fake_quant: FakeQuantOptions,
    pub(crate) options: AttentionOptions,
    pub(crate) sink_logits: Option<Tensor<1>>,
}

impl Attend<'_> {
    /// Computes [`streaming_attention_with`] without its checks. The sequence starts with an empty
    /// cache.
    pub(crate) fn closed_form(
        self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
    ) -> Attention {
        let Self { layout, fake_quant, options, sink_logits } = self;
        let (config, dtype) = (layout.config(), query.dtype());
        // An output that is processed further is rounded to a narrow type once, at the end.
        let changed =
            config.uses_hadamard_values() || config.uses_hadamard_keys() || sink_logits.is_some();
        let query = if changed { floats(query) } else { query };
        let [query, key] = hadamard_query_key([query, key], config);
        let stored = |side| store(floats(side), config.float);
        let (key, value_dim) = (stored(key), value.dims()[3]);
        let value = match layout.shape().shares_values {
            true => key.clone().narrow(3, 0, value_dim),
            false => stored(hadamard_values(value, config)),
        };
        let skip = if fake_quant.quantize_everything { 0 } else { config.sink_tokens };
        let sides = layout.sides();
        let hat = |tensor: &Tensor<4>, side: SideLayout| match side.spec {
            Some(spec) => fake_quantize_from(tensor.clone(), spec, skip, fake_quant.gradient),
            None => tensor.clone(),
        };
        let key_hat = hat(&key, sides.keys);
        let value_hat = match layout.shape().shares_values {
            true => key_hat.clone().narrow(3, 0, value_dim),
            false => hat(&value, sides.values),
        };
        let (sides, spec) = match fake_quant.quantize_everything {
            // Every row sees the restored form of every token.
            true => {
                let float = KvCacheConfig::float().with_sliding_window(config.sliding_window);
                let spec = StreamSpec::whole(&float.with_sink_tokens(config.sink_tokens));
                ([key_hat.clone(), key_hat, value_hat.clone(), value_hat], spec)
            }
            false => ([key, key_hat, value, value_hat], layout.stream()),
        };
        let attention = stream(query, sides, sink_logits, spec, options);
        attention.undo_hadamard(config).with_dtype(dtype)
    }
}

/// A query, keys or values in f32.
pub(crate) fn floats(tensor: Tensor<4>) -> Tensor<4> {
    match tensor.dtype() {
        DType::F32 => tensor,
        _ => tensor.cast(DType::F32),
    }
}

/// Rounds to the cache's float type, as storing in the cache does, with a straight-through
/// gradient.
pub(crate) fn store(tensor: Tensor<4>, float: CacheFloat) -> Tensor<4> {
    match float {
        CacheFloat::F32 => tensor,
        _ => {
            Tensor::from_dispatch(<Dispatch as KvCacheOps>::round_to(tensor.into_dispatch(), float))
        }
    }
}

/// [`KvCacheOps::streaming_attention`] on Burn's high-level tensors; `sides` are key, key_hat,
/// value and value_hat.
pub(crate) fn stream(
    query: Tensor<4>,
    sides: [Tensor<4>; 4],
    sink_logits: Option<Tensor<1>>,
    spec: StreamSpec,
    options: AttentionOptions,
) -> Attention {
    let query = query.into_dispatch();
    let [key, key_hat, value, value_hat] = sides.map(Tensor::into_dispatch);
    let (output, lse) = match sink_logits {
        None => <Dispatch as KvCacheOps>::streaming_attention(
            query, key, key_hat, value, value_hat, spec, options,
        ),
        Some(logits) => {
            let logits = logits.cast(DType::F32).into_dispatch();
            <Dispatch as KvCacheOps>::streaming_attention_with_sinks(
                query, key, key_hat, value, value_hat, logits, spec, options,
            )
        }
    };
    Attention { output: Tensor::from_dispatch(output), lse: Tensor::from_dispatch(lse) }
}

impl Attention {
    /// Adds a learned sink: see [`streaming_attention_with_sinks`]. It serves the output of a
    /// cache, which records no gradient.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of logits than heads, [`Error::Unsupported`] on a device
    /// that records gradients.
    pub fn with_sinks(self, sink_logits: Tensor<1>) -> Result<Self> {
        const OP: &str = "with_sinks";
        check_sinks(OP, &sink_logits, self.lse.dims()[1])?;
        let device = self.output.device();
        if device.is_autodiff() || sink_logits.device() != device {
            let what =
                format!("{OP}: sink_logits on {:?}, output on {device:?}", sink_logits.device());
            let why = "both must be on one device without gradients; train with \
                       streaming_attention_with_sinks";
            return Err(Error::Unsupported { what, why: why.to_string() });
        }
        let dtype = self.output.dtype();
        let (output, lse) = <Dispatch as KvCacheOps>::add_sinks(
            floats(self.output).into_dispatch(),
            self.lse.into_dispatch(),
            sink_logits.cast(DType::F32).into_dispatch(),
        );
        let (output, lse) = (Tensor::from_dispatch(output), Tensor::from_dispatch(lse));
        Ok(Self { output, lse }.with_dtype(dtype))
    }

    /// Undoes the Hadamard transform of the values in the f32 output.
    pub(crate) fn undo_hadamard(self, config: &KvCacheConfig) -> Self {
        Self { output: hadamard_values(self.output, config), ..self }
    }

    /// Converts the output to the type of the query.
    pub(crate) fn with_dtype(self, dtype: DType) -> Self {
        match self.output.dtype() == dtype {
            true => self,
            false => Self { output: self.output.cast(dtype), ..self },
        }
    }

    /// Merges attention over two disjoint sets of tokens.
    pub(crate) fn merge(self, other: Self) -> Self {
        let difference = self.lse.clone() - other.lse.clone();
        // `(a - b) * weight + b` would lose a small `a` beside a large `b` of no weight.
        let weights = [difference.clone(), -difference.clone()]
            .map(|difference| activation::sigmoid(difference).unsqueeze_dim::<4>(3));
        // ln(e^a + e^b), of the greater one and the difference; where both are -inf, that is NaN.
        let largest = self.lse.clone().max_pair(other.lse.clone());
        let none = largest.clone().lower_elem(f32::MIN);
        let lse = largest + activation::softplus(-difference.abs(), 1.0);
        let lse = lse.mask_fill(none, f32::NEG_INFINITY);
        // Where all scores of a part are -inf, it has no output: 0 / 0.
        let [a, b] = [self, other].map(|Self { output, lse }| {
            let none = lse.lower_elem(f32::MIN).unsqueeze_dim::<4>(3).expand(output.dims());
            output.mask_fill(none, 0.0)
        });
        let [weight_a, weight_b] = weights;
        Self { output: a * weight_a + b * weight_b, lse }
    }
}

/// Checks that there is a sink logit for each query head.
fn check_sinks(op: &'static str, sink_logits: &Tensor<1>, n_heads: usize) -> Result<()> {
    let [found] = sink_logits.dims();
    match found == n_heads {
        true => Ok(()),
        false => Err(Error::Shape {
            op,
            tensor: "sink_logits",
            shape: vec![found],
            rule: format!("must be one for each of {n_heads} query heads"),
        }),
    }
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
    if k[..3] != v[..3] {
        let rule = format!("batch, heads and tokens must be those of key, {:?}", &k[..3]);
        return fail("value", v, rule);
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
    let dtype = query.dtype();
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::Unsupported {
            what: format!("{op}: query of type {dtype:?}"),
            why: "query, key and value are f32, f16 or bf16".to_string(),
        });
    }
    for (name, tensor) in [("key", key), ("value", value)] {
        if tensor.dtype() != dtype {
            return Err(Error::Unsupported {
                what: format!("{op}: {name} of type {:?}", tensor.dtype()),
                why: format!("the query is of type {dtype:?}"),
            });
        }
    }
    Ok(CacheShape::new(k[0], k[1], Sides { keys: k[3], values: v[3] }))
}
