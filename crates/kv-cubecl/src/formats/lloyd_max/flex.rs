//! Lloyd-Max codes on the CPU.

use half::f16;

use super::{LloydMax, edge, level};
use crate::{
    formats::{
        Codec,
        affine::flex::write_codes,
        flex::CpuCodec,
        scaled::flex::{half_scale, half_value},
    },
    layout::PackedLayout,
};

/// The number of levels of 4 bits, the most that a format has.
const MOST: usize = 16;

/// Returns the numbers that codes stand for.
fn levels(n_bits: u32) -> [f32; MOST] {
    let codes = 1 << n_bits;
    core::array::from_fn(|code| if code < codes { level(code, n_bits) } else { 0.0 })
}

/// Returns a number as it is quantized.
#[inline(always)]
fn limited(x: f32) -> f32 {
    let limit = Codec::LloydMax.limit();
    if x.is_nan() { 0.0 } else { x.clamp(-limit, limit) }
}

fn root_mean_square(numbers: impl ExactSizeIterator<Item = f32>) -> f32 {
    let n = numbers.len() as f32;
    (numbers.map(|x| x * x).sum::<f32>() / n).sqrt()
}

/// Quantizes a token into `codes`, and returns the scale that is stored.
fn quantize_token<const CODES: usize>(row: &[f32], codes: &mut [u32]) -> f16 {
    let n_bits = CODES.trailing_zeros();
    let (levels, edges) = (levels(n_bits), edges::<CODES>());
    let rms = root_mean_square(row.iter().map(|&x| limited(x)));
    let divisor = if rms == 0.0 { f32::INFINITY } else { rms };
    for (code, &x) in codes.iter_mut().zip(row) {
        let x = limited(x) / divisor;
        *code = edges[1..].iter().map(|&edge| u32::from(x > edge)).sum();
    }
    half_scale(rms / root_mean_square(codes.iter().map(|&code| levels[code as usize])))
}

const fn edges<const CODES: usize>() -> [f32; CODES] {
    let mut edges = [0.0; CODES];
    let mut code = 1;
    while code < CODES {
        edges[code] = edge(code, CODES.trailing_zeros());
        code += 1;
    }
    edges
}

/// Quantizes tokens from slot `first` on.
fn quantize_tokens<const BITS: usize, const CODES: usize>(
    rows: &[f32],
    words: &mut [u32],
    first: usize,
    place: &PackedLayout,
) {
    let PackedLayout { spec, head_dim, .. } = *place;
    let mut codes = vec![0; head_dim];
    for (i, row) in rows.chunks_exact(head_dim).enumerate() {
        let token = first + i;
        let scale = quantize_token::<CODES>(row, &mut codes);
        place.set_parameter(words, token, 0, scale.to_bits().into());
        let words = &mut words[place.codes(token)..][..spec.code_words()];
        for (run, codes) in codes.chunks(16).enumerate() {
            write_codes::<BITS>(words, run * 16, codes);
        }
    }
}

impl CpuCodec for LloydMax {
    fn quantize(&self, rows: &[f32], words: &mut [u32], first: usize, place: &PackedLayout) {
        match place.spec.n_bits {
            2 => quantize_tokens::<2, 4>(rows, words, first, place),
            3 => quantize_tokens::<3, 8>(rows, words, first, place),
            _ => quantize_tokens::<4, 16>(rows, words, first, place),
        }
    }

    fn restore(&self, words: &[u32], first: usize, rows: &mut [f32], place: &PackedLayout) {
        let PackedLayout { spec, head_dim, .. } = *place;
        let levels = levels(spec.n_bits);
        for (i, row) in rows.chunks_exact_mut(head_dim).enumerate() {
            let token = first + i;
            let scale = half_value(place.parameter_in(words, token, 0));
            let levels = levels.map(|level| level * scale);
            let words = &words[place.codes(token)..][..spec.code_words()];
            // As `QuantSpec::code`, but each word is read once.
            for (run, row) in row.chunks_mut(spec.codes_per_word()).enumerate() {
                let low = words[spec.low_word(run)];
                let high = match spec.splits_codes() {
                    true => {
                        let (word, first) = spec.high_word(run);
                        words[word] >> first
                    }
                    false => 0,
                };
                let mask = (1 << spec.low_bits()) - 1;
                for (nth, x) in row.iter_mut().enumerate() {
                    let low = low >> (nth as u32 * spec.low_bits()) & mask;
                    *x = levels[(low | (high >> nth & 1) << 2) as usize];
                }
            }
        }
    }

    /// With its codes, a restored token is proportional to its root mean square.
    fn through_scales(&self, rows: &[f32], grad: &mut [f32], place: &PackedLayout) {
        let PackedLayout { spec, head_dim, .. } = *place;
        let words = spec.words(1, head_dim);
        let token = PackedLayout { tokens: 1, ..*place };
        let (mut words, mut restored) = (vec![0; words], vec![0.0; head_dim]);
        for (row, grad) in rows.chunks_exact(head_dim).zip(grad.chunks_exact_mut(head_dim)) {
            self.quantize(row, &mut words, 0, &token);
            self.restore(&words, 0, &mut restored, &token);
            let squares: f32 = row.iter().map(|&x| limited(x) * limited(x)).sum();
            if squares == 0.0 {
                continue;
            }
            let errors = restored.iter().zip(row).zip(&*grad);
            let of_errors: f32 = errors.map(|((y, &x), grad)| grad * (y - limited(x))).sum();
            let rate = of_errors / squares;
            grad.iter_mut().zip(row).for_each(|(grad, &x)| *grad += rate * limited(x));
        }
    }
}
