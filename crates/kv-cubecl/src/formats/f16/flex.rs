//! Half precision on the CPU.

use half::{f16, slice::HalfFloatSliceExt};

/// Converts f16 to f32.
pub(super) fn widen(halves: &[f16], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("f16c") {
        // SAFETY: the CPU has the extension.
        unsafe { widen_f16c(halves, out) };
        return;
    }
    halves.convert_to_f32_slice(out);
}

/// Computes [`widen`] with one instruction per eight elements, where the `half` crate makes a call.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
fn widen_f16c(halves: &[f16], out: &mut [f32]) {
    use core::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    let ((halves, rest), (out, rest_out)) = (halves.as_chunks::<8>(), out.as_chunks_mut::<8>());
    for (halves, out) in halves.iter().zip(out) {
        // SAFETY: both hold eight elements.
        unsafe {
            let halves = _mm_loadu_si128(halves.as_ptr().cast());
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(halves));
        }
    }
    rest.convert_to_f32_slice(rest_out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        // One less than a multiple of eight, so a remainder is left.
        let halves: Vec<f16> = (0..u16::MAX).map(f16::from_bits).collect();
        let mut out = vec![0.0; halves.len()];
        widen(&halves, &mut out);
        for (half, out) in halves.iter().zip(out) {
            match half.is_nan() {
                true => assert!(out.is_nan()),
                false => assert_eq!(out.to_bits(), half.to_f32().to_bits()),
            }
        }
    }
}
