//! Quantizes floats to packed weights.

use half::f16;

use crate::{Error, PackedLayout, Result, WeightFormat, error::invalid};

/// The method of choosing the range of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Range {
    /// All numbers of a group are in its range and are rounded to the nearest code.
    #[default]
    Whole,
    /// The range with the least squared error, among the whole one and some narrower ones. For
    /// MXFP4, the same choice among powers of two.
    LeastError,
}

/// Options of [`quantize`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Quantize {
    /// The method of choosing the range of a group.
    pub range: Range,
    /// True if the zero code is the middle one, 8 or 128, instead of the one that best uses the
    /// range. Ignored for MXFP4, which is always symmetric.
    pub symmetric: bool,
}

impl Quantize {
    /// Sets the method of choosing the range of a group.
    #[must_use]
    pub const fn with_range(mut self, range: Range) -> Self {
        self.range = range;
        self
    }

    /// Sets whether the zero code is the middle one.
    #[must_use]
    pub const fn with_symmetric(mut self, symmetric: bool) -> Self {
        self.symmetric = symmetric;
        self
    }
}

/// Numbers of candidate ranges, each narrower than the one before.
const NARROWER: core::ops::Range<usize> = 0..20;
/// Difference between candidate ranges, as a part of the whole one.
const NARROWING: f32 = 0.025;

/// Quantizes a matrix of `[rows, columns]` and returns its blocks, row by row, as
/// [`PackedMatrix::from_bytes`](crate::PackedMatrix::from_bytes) takes them.
///
/// # Errors
/// [`Error::Unsupported`] for a read-only format. [`Error::Invalid`] for a wrong number of weights,
/// for rows that are not whole groups, and for weights that are not finite or need a scale beyond
/// f16.
pub fn quantize(
    weights: &[f32],
    shape: [usize; 2],
    format: WeightFormat,
    options: Quantize,
) -> Result<Vec<u8>> {
    let layout = PackedLayout::new(format, shape)?;
    let [rows, columns] = shape;
    if rows.checked_mul(columns) != Some(weights.len()) {
        let rule = format!("must be {rows} rows of {columns} columns");
        return Err(invalid("weights", weights.len(), rule));
    }
    let group: fn(&[f32], Quantize, &mut Vec<u8>) -> Option<()> = match format {
        WeightFormat::Int4(_) => integers::<4>,
        WeightFormat::Int8(_) => integers::<8>,
        WeightFormat::Mxfp4 => mxfp4,
        _ => {
            let why = "only int4, int8 and mxfp4 can be created; other formats are read from files"
                .into();
            return Err(Error::Unsupported { what: format!("quantizing to {format}"), why });
        }
    };
    let mut blocks = Vec::with_capacity(layout.bytes());
    for (i, weights) in weights.chunks_exact(format.block_numbers()).enumerate() {
        if group(weights, options, &mut blocks).is_none() {
            let at = weights.iter().position(|x| !x.is_finite());
            let largest = |a: &usize, b: &usize| weights[*a].abs().total_cmp(&weights[*b].abs());
            let at = at.or_else(|| (0..weights.len()).max_by(largest)).unwrap_or(0);
            let (value, number) = (weights[at], i * weights.len() + at);
            let (row, column) = (number / columns, number % columns);
            let rule =
                format!("must be finite, with a scale within f16 (row {row}, column {column})");
            return Err(invalid("weight", value, rule));
        }
    }
    Ok(blocks)
}

/// Parameters of a group of integers: `scale * (code - zero)`.
#[derive(Clone, Copy)]
struct Parameters {
    scale: f32,
    zero: f32,
}

/// Appends a group of [`WeightFormat::Int4`] or [`WeightFormat::Int8`].
fn integers<const BITS: u32>(x: &[f32], options: Quantize, blocks: &mut Vec<u8>) -> Option<()> {
    let most = (1u32 << BITS) as f32 - 1.0;
    let (least, largest) = range(x)?;
    let parameters = |part: f32| {
        let (scale, zero) = if options.symmetric {
            let middle = (most + 1.0) / 2.0;
            (part * largest.max(-least) / (middle - 1.0), middle)
        } else {
            let scale = part * (largest - least) / most;
            (scale, if scale > 0.0 { (-part * least / scale).round() } else { 0.0 })
        };
        Parameters { scale: f16::from_f32(scale).to_f32(), zero }
    };
    let code = |x: f32, Parameters { scale, zero }: Parameters| match scale {
        0.0 => zero,
        scale => (x / scale + zero).round_ties_even().clamp(0.0, most),
    };
    let error = |parameters: Parameters| -> f32 {
        let restored = |x: &f32| parameters.scale * (code(*x, parameters) - parameters.zero);
        x.iter().map(|x| (x - restored(x)).powi(2)).sum()
    };
    let mut best = parameters(1.0);
    if !best.scale.is_finite() {
        return None;
    }
    if options.range == Range::LeastError {
        let tried = NARROWER.map(|i| parameters(1.0 - NARROWING * i as f32));
        best = tried.min_by(|a, b| error(*a).total_cmp(&error(*b)))?;
    }
    blocks.extend(f16::from_f32(best.scale).to_le_bytes());
    blocks.extend((best.zero as u16).to_le_bytes());
    let codes = |x: &[f32]| x.iter().map(|x| code(*x, best) as u8).collect::<Vec<_>>();
    if BITS == 8 {
        blocks.extend(codes(x));
    } else {
        x.chunks_exact(32).for_each(|x| halves(&codes(x), blocks));
    }
    Some(())
}

/// Appends 32 codes of 4 bits, the first half in the lower halves of 16 bytes.
fn halves(codes: &[u8], blocks: &mut Vec<u8>) {
    blocks.extend(codes[..16].iter().zip(&codes[16..]).map(|(low, high)| low | high << 4));
}

/// Returns the smallest and largest of all numbers and 0, or `None` if one is not finite.
fn range(x: &[f32]) -> Option<(f32, f32)> {
    x.iter().try_fold((0.0f32, 0.0f32), |(least, largest), &x| {
        x.is_finite().then(|| (least.min(x), largest.max(x)))
    })
}

/// Appends a block of [`WeightFormat::Mxfp4`].
///
/// As the authors of the format propose, the power of two is that of the largest number, divided by
/// 4, the largest power of two among the codes. [`Range::LeastError`] also tries its neighbors.
fn mxfp4(x: &[f32], options: Quantize, blocks: &mut Vec<u8>) -> Option<()> {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (least, largest) = range(x)?;
    let largest = largest.max(-least);
    // If all numbers are subnormal, the exponent is the smallest one.
    let exponent = (largest.to_bits() >> 23) as i32 - 2;
    let scale = |exponent: i32| 2f64.powi(exponent - 127) as f32;
    let code = |x: f32, scale: f32| {
        let magnitude = x.abs() / scale;
        let nearest = |a: &usize, b: &usize| {
            let distance = |i: usize| (MAGNITUDES[i] - magnitude).abs();
            // Ties go to the even code.
            distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)))
        };
        let code = (0..8).min_by(nearest).unwrap_or(0) as u8;
        if x < 0.0 && code > 0 { code | 8 } else { code }
    };
    let error = |exponent: i32| -> f32 {
        let scale = scale(exponent);
        let restored = |x: f32| MAGNITUDES[usize::from(code(x, scale) & 7)] * scale;
        x.iter().map(|x| (x.abs() - restored(*x)).powi(2)).sum()
    };
    let mut best = exponent.clamp(0, 254);
    if options.range == Range::LeastError {
        let tried = best.max(1) - 1..=(best + 1).min(254);
        best = tried.min_by(|a, b| error(*a).total_cmp(&error(*b)))?;
    }
    blocks.push(best as u8);
    let scale = scale(best);
    let codes: Vec<u8> = x.iter().map(|x| code(*x, scale)).collect();
    halves(&codes, blocks);
    Some(())
}
