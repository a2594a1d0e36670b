use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor, TensorData},
};
use half::f16;

use crate::{
    Error, Granularity, KvCacheConfig, KvCacheOps, KvFormat, Result, Side, SteGradient,
    error::invalid,
    layout::{PackedLayout, QuantSpec},
    shapes,
};

/// A quantized tensor: codes and parameters in one u32 buffer, in the layout of
/// [`crate::layout`].
#[derive(Clone, Debug)]
pub struct Packed {
    words: Tensor<4, Int>,
    spec: QuantSpec,
    /// Shape of the restored tensor.
    shape: [usize; 4],
}

/// A quantized tensor on the host in a plain form: codes, scales and minima in separate lists.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logical {
    /// Code words, least significant bits first, consecutive elements of the grouped axis in one
    /// word: `[batch, n_kv_heads, tokens * bits / 32, head_dim]` per channel,
    /// `[batch, n_kv_heads, tokens, head_dim * bits / 32]` per token.
    pub codes: Vec<u32>,
    /// One f16 scale per group, `[batch, n_kv_heads, groups, head_dim]` per channel,
    /// `[batch, n_kv_heads, tokens, groups]` per token. Where scales are powers of two it is empty.
    pub scale: Vec<f16>,
    /// One f16 minimum per group, shaped like `scale`; empty in formats that have none.
    pub min: Vec<f16>,
    /// The exponents of scales that are powers of two, plus 127, one per group and shaped as
    /// `scale` would be; empty for other scales.
    pub exponents: Vec<u8>,
    /// The factors of tiles, `[batch, n_kv_heads, tiles, tile.tokens]` for keys and
    /// `[batch, n_kv_heads, tiles, head_dim]` for values; empty in formats without tiles.
    pub factors: Vec<f16>,
}

impl Packed {
    /// `words` of a tensor of this shape.
    pub(crate) fn new(words: Tensor<4, Int>, spec: QuantSpec, shape: [usize; 4]) -> Self {
        debug_assert_eq!(words.dims(), shapes::packed(shape, &spec));
        Self { words, spec, shape }
    }

    /// Returns the quantization parameters.
    pub fn spec(&self) -> QuantSpec {
        self.spec
    }

    /// Shape of the tensor it restores to, `[batch, n_kv_heads, tokens, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Restores the numbers as `code * scale + min`, f32 `[batch, n_kv_heads, tokens, head_dim]`.
    pub fn dequantize(&self) -> Tensor<4> {
        let words = self.words.clone().into_dispatch();
        Tensor::from_dispatch(<Dispatch as KvCacheOps>::dequantize(words, self.spec, self.shape))
    }

    /// Copies codes, scales and minima to the host in their plain order, bit for bit.
    pub fn to_logical(&self) -> Logical {
        let [batch, heads, rows, width] = self.words.dims();
        let words: Vec<u32> = self.words.clone().into_data().iter::<u32>().collect();
        let mut out = Logical::default();
        if self.spec.packs_parameters() {
            words.chunks_exact(width).for_each(|slice| self.slice_to_logical(slice, &mut out));
            return out;
        }
        let (per_group, has_min) = (self.spec.code_words(), self.spec.format.has_offset());
        let head_dim = self.shape[3];
        let halves = |word: u32| [word as u16, (word >> 16) as u16].map(f16::from_bits);
        // A tile has one group for each channel or token, so its lines are as wide as KIVI's.
        let line = match self.spec.granularity {
            Granularity::PerChannel => head_dim,
            Granularity::PerToken => head_dim / self.spec.group_size,
        };
        let block_words = self.spec.block_words(head_dim);
        for block in words.chunks_exact(block_words) {
            let (groups, factors) = block.split_at(block_words - self.spec.factors(head_dim) / 2);
            for groups in groups.chunks_exact((per_group + 1) * line) {
                let (codes, params) = groups.split_at(per_group * line);
                out.codes.extend_from_slice(codes);
                for [scale, min] in params.iter().map(|&word| halves(word)) {
                    out.scale.push(scale);
                    out.min.extend(has_min.then_some(min));
                }
            }
            out.factors.extend(factors.iter().flat_map(|&word| halves(word)));
        }
        debug_assert_eq!(words.len(), batch * heads * rows * width);
        out
    }

    /// [`to_logical`](Self::to_logical) of one (batch, head), where parameters share words.
    fn slice_to_logical(&self, words: &[u32], out: &mut Logical) {
        let [_, _, tokens, head_dim] = self.shape;
        let place = PackedLayout { spec: self.spec, head_dim, tokens };
        out.codes.extend_from_slice(&words[..place.parameters()]);
        for token in 0..tokens {
            for group in 0..self.spec.groups(head_dim) {
                let (word, shift) = place.parameter(token, group);
                let bits = words[word] >> shift;
                match self.spec.format.parameter_bits() {
                    8 => out.exponents.push(bits as u8),
                    _ => out.scale.push(f16::from_bits(bits as u16)),
                }
            }
        }
    }
}

/// Quantizes `input` by groups in one of KIVI's formats, with scale and minimum in f16. Over a
/// group, with `n = 2^n_bits - 1`: `min = f16(min x)`, `scale = f16((max x - min x) / n)`, `code =
/// round_half_even(clamp((x - min) / scale, 0, n))`. A constant group has scale 0 and codes
/// 0. Values beyond ±65504, the range of f16, saturate.
///
/// # Shapes
/// - `input`: `[batch, n_kv_heads, tokens, head_dim]`; the grouped axis (tokens per channel,
///   head_dim per token) must be a multiple of `group_size`.
///
/// # Errors
/// [`Error::Shape`] or [`Error::InvalidConfig`] for a group size that does not fit,
/// [`Error::Unsupported`] for a type other than f32, or for more elements than the device can
/// count. Non-finite values are [`Error::NonFinite`] in debug builds. In release builds infinite
/// ones saturate as well; a NaN does not count for minimum and maximum and has code 0, so that it
/// is restored as the minimum, or as 0 if the group is all NaN. [`ensure_finite`] checks in any
/// build.
pub fn quantize(
    input: Tensor<4>,
    granularity: Granularity,
    format: KvFormat,
    group_size: usize,
) -> Result<Packed> {
    quantize_with(input, QuantSpec::new(granularity, format, group_size)?)
}

/// Quantizes `input` as a side of a cache of this configuration does. The [format](KvFormat) says
/// what numbers become; infinities saturate, and a NaN counts for no scale and has code 0. In
/// tiles, a NaN counts as 0.
///
/// `input` is what the cache quantizes: if the cache transforms the side, it has been transformed.
///
/// # Shapes
/// As [`quantize`].
///
/// # Errors
/// Fails as [`quantize`] does, and with [`Error::InvalidConfig`] for [`KvFormat::Float`] and for a
/// head_dim that the format does not take.
pub fn quantize_side(input: Tensor<4>, side: Side, config: &KvCacheConfig) -> Result<Packed> {
    let spec = side_spec(&input, side, config)?;
    quantize_with(input, spec)
}

/// [`quantize_side`], restored in one pass, with a choice of gradient.
///
/// # Shapes
/// As [`quantize`]; the output has the shape of the input.
///
/// # Errors
/// Fails as [`quantize_side`] does.
pub fn fake_quantize_side(
    input: Tensor<4>,
    side: Side,
    config: &KvCacheConfig,
    gradient: SteGradient,
) -> Result<Tensor<4>> {
    let spec = side_spec(&input, side, config)?;
    check("fake_quantize", &input, spec)?;
    Ok(fake_quantize_from(input, spec, 0, gradient))
}

fn side_spec(input: &Tensor<4>, side: Side, config: &KvCacheConfig) -> Result<QuantSpec> {
    let ([.., head_dim], format) = (input.dims(), config.format(side));
    format.validate(side, head_dim, config.group_options(side))?;
    config
        .spec(side, head_dim)
        .ok_or_else(|| invalid("format", format, "must be one that quantizes, not float"))
}

fn quantize_with(input: Tensor<4>, spec: QuantSpec) -> Result<Packed> {
    check("quantize", &input, spec)?;
    let shape = input.dims();
    let words = <Dispatch as KvCacheOps>::quantize(input.into_dispatch(), spec);
    Ok(Packed::new(Tensor::from_dispatch(words), spec, shape))
}

/// Quantizes and restores `input` in one pass, with a straight-through gradient: the derivative of
/// the output with respect to the input is taken as the identity (Bengio et al., 2013,
/// <https://arxiv.org/abs/1308.3432>).
///
/// # Shapes
/// As [`quantize`]; the output has the shape of the input.
///
/// # Errors
/// Fails as [`quantize`] does.
pub fn fake_quantize(
    input: Tensor<4>,
    granularity: Granularity,
    format: KvFormat,
    group_size: usize,
) -> Result<Tensor<4>> {
    fake_quantize_with(input, granularity, format, group_size, SteGradient::Identity)
}

/// [`fake_quantize`] with a choice of gradient, for the same shapes.
///
/// # Errors
/// Fails as [`quantize`] does.
pub fn fake_quantize_with(
    input: Tensor<4>,
    granularity: Granularity,
    format: KvFormat,
    group_size: usize,
    gradient: SteGradient,
) -> Result<Tensor<4>> {
    let spec = QuantSpec::new(granularity, format, group_size)?;
    check("fake_quantize", &input, spec)?;
    Ok(fake_quantize_from(input, spec, 0, gradient))
}

/// [`fake_quantize_with`] without the checks. The first `skip` tokens and, with per-channel groups,
/// an incomplete last group are returned unchanged.
pub(crate) fn fake_quantize_from(
    input: Tensor<4>,
    spec: QuantSpec,
    skip: usize,
    gradient: SteGradient,
) -> Tensor<4> {
    let input = input.into_dispatch();
    Tensor::from_dispatch(<Dispatch as KvCacheOps>::fake_quantize(input, spec, skip, gradient))
}

/// Checks that `input` is f32, a whole number of groups, and not too large for its device; in debug
/// builds also that it is finite.
fn check(op: &'static str, input: &Tensor<4>, spec: QuantSpec) -> Result<()> {
    let shape = input.dims();
    let (axis, len, unit, name) = match (spec.tile, spec.granularity) {
        (Some(tile), _) => ("tokens", shape[2], tile.tokens, "tile.tokens"),
        (None, Granularity::PerChannel) => ("tokens", shape[2], spec.group_size, "group_size"),
        (None, Granularity::PerToken) => ("head_dim", shape[3], spec.group_size, "group_size"),
    };
    if unit == 0 || !len.is_multiple_of(unit) || shape.contains(&0) {
        return Err(Error::Shape {
            op,
            tensor: "input",
            shape: shape.to_vec(),
            rule: format!("{name} {unit} must divide {axis} {len}"),
        });
    }
    check_dtype(op, "input", input)?;
    crate::backends::check_device(op, &input.device())?;
    crate::backends::check_elements(op, shape, &input.device())?;
    debug_check_finite(op, "input", input)
}

/// Everything is computed in f32; another type would be read as if it were.
fn check_dtype(op: &'static str, name: &'static str, tensor: &Tensor<4>) -> Result<()> {
    match tensor.dtype() {
        DType::F32 => Ok(()),
        dtype => Err(Error::Unsupported {
            what: format!("{op}: {name} of type {dtype:?}"),
            why: "it is computed in f32; cast it first".to_string(),
        }),
    }
}

/// Reads `tensor` back and checks that it holds no NaN and no infinity.
///
/// # Errors
/// [`Error::NonFinite`] naming `op` and `name`.
pub fn ensure_finite(op: &'static str, name: &'static str, tensor: &Tensor<4>) -> Result<()> {
    let data: TensorData = tensor.clone().into_data();
    match data.iter::<f32>().all(f32::is_finite) {
        true => Ok(()),
        false => Err(Error::NonFinite { op, tensor: name }),
    }
}

/// [`ensure_finite`] in debug builds only, because it waits for the device.
pub(crate) fn debug_check_finite(
    op: &'static str,
    name: &'static str,
    tensor: &Tensor<4>,
) -> Result<()> {
    if cfg!(debug_assertions) { ensure_finite(op, name, tensor) } else { Ok(()) }
}
