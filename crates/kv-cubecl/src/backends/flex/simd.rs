//! Loops compiled once per vector extension and chosen at run time.

/// Defines a function whose body is compiled for AVX-512, for AVX2 with FMA, and for the build's
/// baseline; the best one the CPU has runs. The body must be safe code that vectorizes by itself.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<const $c:ident: $ct:ty>)? (
        $($arg:ident: $ty:ty),* $(,)?
    ) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "kernels take slices and strides")]
        $vis fn $name $(<const $c: $ct>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, reason = "as the outer function")]
            fn body $(<const $c: $ct>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "as the outer function")]
                fn avx512 $(<const $c: $ct>)? ($($arg: $ty),*) $(-> $ret)? {
                    body $(::<$c>)? ($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "as the outer function")]
                fn avx2 $(<const $c: $ct>)? ($($arg: $ty),*) $(-> $ret)? {
                    body $(::<$c>)? ($($arg),*)
                }
                match $crate::backends::flex::simd::level() {
                    $crate::backends::flex::simd::Level::Avx512 => {
                        // SAFETY: `level` found these features on this CPU.
                        return unsafe { avx512 $(::<$c>)? ($($arg),*) };
                    }
                    $crate::backends::flex::simd::Level::Avx2 => {
                        // SAFETY: `level` found these features on this CPU.
                        return unsafe { avx2 $(::<$c>)? ($($arg),*) };
                    }
                    $crate::backends::flex::simd::Level::Baseline => {}
                }
            }
            body $(::<$c>)? ($($arg),*)
        }
    };
}
pub(super) use vectorized;

/// Vector extensions with code of their own.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) enum Level {
    Baseline,
    Avx2,
    Avx512,
}

/// The best extension of this CPU, detected once.
#[cfg(target_arch = "x86_64")]
pub(super) fn level() -> Level {
    use std::sync::OnceLock;
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) => Level::Avx512,
            (true, false) => Level::Avx2,
            _ => Level::Baseline,
        }
    })
}

/// `e^x` for `x <= 0`, within 2 ulp; 0 below -87. Branch-free, so that loops over it vectorize.
///
/// Cody-Waite reduction to `|r| <= ln2 / 2` and the degree-6 minimax polynomial of Cephes `expf`.
#[inline(always)]
pub(super) fn exp_nonpositive(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.max(-87.0);
    let n = (clamped * core::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    let scaled = f32::from_bits(((n as i32 + 127) as u32) << 23) * y;
    if x < -87.0 { 0.0 } else { scaled }
}

/// Independent partial results of a reduction, so that it vectorizes.
pub(super) const LANES: usize = 16;

/// Largest element, `-inf` of none.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Dot product.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a_chunks, a_rest), (b_chunks, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += x * y;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sum_lanes(lanes) + rest
}

/// Dot products of `a` with four rows, sharing its loads and the reduction.
#[inline(always)]
pub(super) fn dot4(a: &[f32], rows: [&[f32]; 4]) -> [f32; 4] {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let [r0, r1, r2, r3] = rows.map(|row| row.as_chunks::<LANES>());
    let mut lanes = [[0.0; LANES]; 4];
    let chunks = a_chunks.iter().zip(r0.0).zip(r1.0).zip(r2.0).zip(r3.0);
    for ((((a, b0), b1), b2), b3) in chunks {
        for i in 0..LANES {
            lanes[0][i] += a[i] * b0[i];
            lanes[1][i] += a[i] * b1[i];
            lanes[2][i] += a[i] * b2[i];
            lanes[3][i] += a[i] * b3[i];
        }
    }
    let mut quarters = [[0.0; 4]; 4];
    for (quarter, lanes) in quarters.iter_mut().zip(&lanes) {
        for i in 0..4 {
            quarter[i] = (lanes[i] + lanes[i + 4]) + (lanes[i + 8] + lanes[i + 12]);
        }
    }
    let mut sums = [0.0; 4];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = (quarters[i][0] + quarters[i][1]) + (quarters[i][2] + quarters[i][3]);
    }
    for (sum, rest) in sums.iter_mut().zip([r0.1, r1.1, r2.1, r3.1]) {
        *sum += a_rest.iter().zip(rest).map(|(x, y)| x * y).sum::<f32>();
    }
    sums
}

#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

vectorized! {
    /// Replaces each score by `e^(score - maximum)` and returns their sum.
    pub(in crate::backends::flex) fn exp_minus_max(scores: &mut [f32], maximum: f32) -> f32 {
        let mut lanes = [0.0; LANES];
        let (chunks, rest) = scores.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (lane, score) in lanes.iter_mut().zip(chunk) {
                *score = exp_nonpositive(*score - maximum);
                *lane += *score;
            }
        }
        let mut sum = sum_lanes(lanes);
        for score in rest {
            *score = exp_nonpositive(*score - maximum);
            sum += *score;
        }
        sum
    }
}

vectorized! {
    /// Largest element, `-inf` of none.
    pub(in crate::backends::flex) fn maximum(x: &[f32]) -> f32 {
        max(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_of_f64() {
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let expected = (x as f64).exp();
            let relative = (exp_nonpositive(x) as f64 - expected).abs() / expected;
            // 2 ulp of f32: 2 * 2^-23.
            assert!(relative <= 2.4e-7, "exp({x}): relative error {relative}");
        }
        assert_eq!(exp_nonpositive(-88.0), 0.0);
        assert_eq!(exp_nonpositive(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_nonpositive(0.0), 1.0);
    }

    #[test]
    fn reductions_cover_every_length() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
            let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(maximum(&x), largest);
            let squares: f32 = x.iter().map(|v| v * v).sum();
            assert_eq!(dot(&x, &x), squares, "small integers add exactly");
            let mut e = x.clone();
            let sum = exp_minus_max(&mut e, largest);
            let expected: f64 = x.iter().map(|&v| ((v - largest) as f64).exp()).sum();
            assert!((sum as f64 - expected).abs() <= 1e-5 * expected.max(1.0));
        }
    }
}
