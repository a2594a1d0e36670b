//! Benchmarks of quantizing and restoring whole tensors.

use burn::tensor::{Distribution, Tensor};
use kv_cubecl::{Granularity, KvFormat, On, Target, quantize};
use kv_models::spans::PHASE;
use serde::Serialize;
use tracing::trace_span;

use super::{Subject, Timing, size, time_in_turn, wait};
use crate::Result;

/// Times of quantizing and restoring one tensor.
#[derive(Clone, Debug, Serialize)]
pub struct CodecPoint {
    /// Bits per code.
    pub n_bits: u32,
    /// `keys` for groups of tokens, `values` for groups of channels.
    pub side: &'static str,
    /// Bytes of the tensor in f32.
    pub float_bytes: usize,
    /// Seconds to quantize it.
    pub quantize: Timing,
    /// Seconds to restore it.
    pub dequantize: Timing,
}

/// Returns the bytes that [`time_codec`] takes: the tensor, its packed forms, and a restored copy.
///
/// # Errors
/// [`Error::Plan`](crate::Error::Plan) for a tensor of 2^32 elements or more.
pub fn codec_bytes([heads, tokens, head_dim]: [usize; 3]) -> Result<u64> {
    /// All packed forms together take 28 bits per number and parameters, less than one f32.
    /// Quantizing and restoring take one f32 more.
    const COPIES: u64 = 4;
    Ok(COPIES * size::tensor_bytes([1, heads, tokens, head_dim])?)
}

/// Times quantizing and restoring f32 `[1, heads, tokens, head_dim]` with all bits, as keys and as
/// values.
///
/// # Errors
/// Fails as [`quantize`] and [`codec_bytes`] do, and for a number of samples that is 0 or too
/// large.
pub fn time_codec<T: Target>(
    device: &On<T>,
    [heads, tokens, head_dim]: [usize; 3],
    group_size: usize,
    samples: usize,
) -> Result<Vec<CodecPoint>> {
    let shape = [1, heads, tokens, head_dim];
    codec_bytes([heads, tokens, head_dim])?;
    size::check_samples("samples", samples)?;
    let input = Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &**device);
    let kinds: Vec<(&'static str, Granularity, KvFormat)> =
        [KvFormat::Affine2, KvFormat::Affine4, KvFormat::Affine8]
            .into_iter()
            .flat_map(|bits| {
                [("keys", Granularity::PerChannel, bits), ("values", Granularity::PerToken, bits)]
            })
            .collect();
    let mut packed = Vec::with_capacity(kinds.len());
    for &(_, granularity, bits) in &kinds {
        packed.push(quantize(input.clone(), granularity, bits, group_size)?);
    }
    let quantizing = kinds.iter().map(|&(side, granularity, bits)| -> Subject<'_> {
        let input = &input;
        Box::new(move || {
            let cache = format_args!("{side} in {} bits", bits.n_bits());
            let _phase = trace_span!(target: PHASE, "quantize", %cache).entered();
            quantize(input.clone(), granularity, bits, group_size)?;
            wait(device)
        })
    });
    let restoring = packed.iter().map(|packed| -> Subject<'_> {
        Box::new(|| {
            let _phase = trace_span!(target: PHASE, "restore").entered();
            packed.dequantize();
            wait(device)
        })
    });
    let timings = time_in_turn(samples, quantizing.chain(restoring).collect())?;
    let (quantize, dequantize) = timings.split_at(kinds.len());
    let points = kinds.iter().zip(quantize).zip(dequantize);
    Ok(points
        .map(|((&(side, _, bits), &quantize), &dequantize)| CodecPoint {
            n_bits: bits.n_bits(),
            side,
            float_bytes: size_of::<f32>() * shape.iter().product::<usize>(),
            quantize,
            dequantize,
        })
        .collect())
}
