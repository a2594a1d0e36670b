//! Activations rounded to integers.

use macerator::Simd;

use kv_device::threads::in_parts;

/// Numbers that share a step.
pub(super) const BLOCK: usize = 32;
/// Numbers rounded by a thread at a time.
const PART: usize = 1 << 14;

/// Activations as 16-bit integers.
pub(super) struct Integers {
    pub(super) codes: Vec<i16>,
    /// Step of each block, or NaN if a number of the block is not finite.
    pub(super) steps: Vec<f32>,
    /// Sum of the rounded numbers of each block.
    pub(super) sums: Vec<f32>,
}

/// Rows of activations, rounded or not.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) enum Rows<'a> {
    Rounded(Integers),
    Exact(&'a [f32]),
}

impl Integers {
    /// Rounds activations so that the largest of each 32 becomes `largest`.
    pub(super) fn round(x: &[f32], largest: f32) -> Self {
        let blocks = x.len() / BLOCK;
        let mut rounded =
            Self { codes: vec![0; x.len()], steps: vec![0.0; blocks], sums: vec![0.0; blocks] };
        let parts = x.chunks(PART).zip(rounded.codes.chunks_mut(PART));
        let of_blocks = rounded.steps.chunks_mut(PART / BLOCK);
        let of_blocks = of_blocks.zip(rounded.sums.chunks_mut(PART / BLOCK));
        in_parts(parts.zip(of_blocks), x.len() > PART, |((x, codes), (steps, sums))| {
            round(x, largest, codes, steps, sums);
        });
        rounded
    }

    /// Returns the rounded numbers as floats.
    pub(super) fn floats(&self) -> Vec<f32> {
        let mut floats = vec![0.0; self.codes.len()];
        let parts = floats.chunks_mut(PART).zip(self.codes.chunks(PART));
        let parts = parts.zip(self.steps.chunks(PART / BLOCK));
        in_parts(parts, self.codes.len() > PART, |((floats, codes), steps)| {
            for ((floats, codes), step) in
                floats.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(BLOCK)).zip(steps)
            {
                for (float, &code) in floats.iter_mut().zip(codes) {
                    *float = f32::from(code) * step;
                }
            }
        });
        floats
    }
}

#[macerator::with_simd]
fn round<S: Simd>(x: &[f32], to: f32, codes: &mut [i16], steps: &mut [f32], sums: &mut [f32]) {
    let blocks = x.as_chunks::<BLOCK>().0.iter().zip(codes.as_chunks_mut::<BLOCK>().0);
    for ((x, codes), (step, sum)) in blocks.zip(steps.iter_mut().zip(sums)) {
        let mut largest = [0.0f32; 8];
        let mut finite = true;
        for x in x.as_chunks::<8>().0 {
            for (largest, x) in largest.iter_mut().zip(x) {
                *largest = if x.abs() > *largest { x.abs() } else { *largest };
                finite &= x.is_finite();
            }
        }
        let largest = largest.into_iter().fold(0.0f32, f32::max);
        *step = if finite { largest / to } else { f32::NAN };
        let per_step = if *step > 0.0 { 1.0 / *step } else { 0.0 };
        let mut total = 0;
        for (code, x) in codes.iter_mut().zip(x) {
            // If the step is NaN, the codes do not matter: any code times NaN is NaN.
            let integer = (x * per_step).round_ties_even() as i32;
            *code = integer as i16;
            total += integer;
        }
        *sum = total as f32 * *step;
    }
}
