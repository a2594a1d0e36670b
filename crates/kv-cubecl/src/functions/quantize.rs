use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor, TensorData},
};
use half::f16;

use crate::{Bits, Error, Granularity, KvCacheOps, Result, SteGradient, layout::QuantSpec, shapes};

/// A quantized tensor: codes and parameters in one u32 buffer, in the layout of
/// [`crate::layout`].
#[derive(Clone, Debug)]
pub struct Packed {
    words: Tensor<4, Int>,
    spec: QuantSpec,
}

/// A quantized tensor on the host in a plain form: codes, scales and minima in separate lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Logical {
    /// Code words, least significant bits first, consecutive elements of the grouped axis in one
    /// word: `[batch, n_kv_heads, tokens / codes_per_word, head_dim]` per channel,
    /// `[batch, n_kv_heads, tokens, head_dim / codes_per_word]` per token.
    pub codes: Vec<u32>,
    /// One f16 scale per group, `[batch, n_kv_heads, groups, head_dim]` per channel,
    /// `[batch, n_kv_heads, tokens, groups]` per token.
    pub scale: Vec<f16>,
    /// One f16 minimum per group, shaped like `scale`.
    pub min: Vec<f16>,
}

impl Packed {
    pub(crate) fn new(words: Tensor<4, Int>, spec: QuantSpec) -> Self {
        Self { words, spec }
    }

    /// One sequence of the batch.
    pub(crate) fn sequence(self, sequence: usize) -> Self {
        Self { words: self.words.narrow(0, sequence, 1), ..self }
    }

    /// How it was quantized.
    pub fn spec(&self) -> QuantSpec {
        self.spec
    }

    /// Shape of the tensor it restores to, `[batch, n_kv_heads, tokens, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        shapes::dequantized(self.words.dims(), &self.spec)
    }

    /// `code * scale + min`, f32 `[batch, n_kv_heads, tokens, head_dim]`.
    pub fn dequantize(&self) -> Tensor<4> {
        let words = self.words.clone().into_dispatch();
        Tensor::from_dispatch(<Dispatch as KvCacheOps>::dequantize(words, self.spec))
    }

    /// Copies codes, scales and minima to the host in their plain order, bit for bit.
    pub fn to_logical(&self) -> Logical {
        let [batch, heads, rows, width] = self.words.dims();
        let words: Vec<u32> = self.words.clone().into_data().iter::<u32>().collect();
        let per_group = self.spec.words_per_group() - 1;
        let mut out = Logical { codes: Vec::new(), scale: Vec::new(), min: Vec::new() };
        let mut params = |words: &[u32]| {
            out.scale.extend(words.iter().map(|&word| f16::from_bits(word as u16)));
            out.min.extend(words.iter().map(|&word| f16::from_bits((word >> 16) as u16)));
        };
        match self.spec.granularity {
            Granularity::PerChannel => {
                for group in words.chunks_exact((per_group + 1) * width) {
                    let (codes, tail) = group.split_at(per_group * width);
                    out.codes.extend_from_slice(codes);
                    params(tail);
                }
            }
            Granularity::PerToken => {
                let n_codes = width / (per_group + 1) * per_group;
                for token in words.chunks_exact(width) {
                    let (codes, tail) = token.split_at(n_codes);
                    out.codes.extend_from_slice(codes);
                    params(tail);
                }
            }
        }
        debug_assert_eq!(words.len(), batch * heads * rows * width);
        out
    }
}

/// Quantizes `input` by groups, with scale and minimum in f16. Over a group, with
/// `n = 2^n_bits - 1`: `min = f16(min x)`, `scale = f16((max x - min x) / n)`,
/// `code = round_half_even(clamp((x - min) / scale, 0, n))`. A constant group has scale 0 and codes
/// 0. Values beyond ±65504, the range of f16, saturate.
///
/// # Shapes
/// - `input`: `[batch, n_kv_heads, tokens, head_dim]`; the grouped axis (tokens per channel, head_dim
///   per token) must be a multiple of `group_size`.
///
/// # Errors
/// [`Error::Shape`] or [`Error::InvalidConfig`] for a group size that does not fit,
/// [`Error::Unsupported`] for a type other than f32, or for more elements than the device can count.
/// Non-finite values are [`Error::NonFinite`] in debug builds. In release builds infinite ones
/// saturate as well; a NaN does not count for minimum and maximum and has code 0, so that it is
/// restored as the minimum, or as 0 if the group is all NaN. [`ensure_finite`] checks in any build.
pub fn quantize(
    input: Tensor<4>,
    granularity: Granularity,
    bits: Bits,
    group_size: usize,
) -> Result<Packed> {
    let spec = QuantSpec::new(granularity, bits, group_size)?;
    check("quantize", &input, spec)?;
    let words = <Dispatch as KvCacheOps>::quantize(input.into_dispatch(), spec);
    Ok(Packed::new(Tensor::from_dispatch(words), spec))
}

/// Quantizes and restores `input` in one pass, with a straight-through gradient: the derivative of
/// the output with respect to the input is taken as the identity (Bengio et al., 2013,
/// <https://arxiv.org/abs/1308.3432>).
///
/// # Shapes
/// As [`quantize`]; the output has the shape of the input.
///
/// # Errors
/// As [`quantize`].
pub fn fake_quantize(
    input: Tensor<4>,
    granularity: Granularity,
    bits: Bits,
    group_size: usize,
) -> Result<Tensor<4>> {
    fake_quantize_with(input, granularity, bits, group_size, SteGradient::Identity)
}

/// [`fake_quantize`] with a choice of gradient, for the same shapes.
///
/// # Errors
/// As [`quantize`].
pub fn fake_quantize_with(
    input: Tensor<4>,
    granularity: Granularity,
    bits: Bits,
    group_size: usize,
    gradient: SteGradient,
) -> Result<Tensor<4>> {
    let spec = QuantSpec::new(granularity, bits, group_size)?;
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
    let (axis, len) = match spec.granularity {
        Granularity::PerChannel => ("tokens", shape[2]),
        Granularity::PerToken => ("head_dim", shape[3]),
    };
    if !len.is_multiple_of(spec.group_size) || shape.contains(&0) {
        return Err(Error::Shape {
            op,
            tensor: "input",
            shape: shape.to_vec(),
            rule: format!("group_size {} must divide {axis} {len}", spec.group_size),
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
