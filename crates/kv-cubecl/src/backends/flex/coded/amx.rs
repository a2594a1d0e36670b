//! [`Coded`](super::Coded) with AMX, for codecs with a scale for each token. It multiplies each f32
//! as the sum of two numbers in bf16, which is off by at most 2^-17.

use crate::{
    formats::flex::PackedRun,
    layout::PackedLayout,
    simd::amx::{COLUMNS, DEPTH, Digits, Products},
};

pub(super) use crate::simd::amx::available;

/// Values whose codes are in memory at once.
const TOKENS: usize = 128;

/// Returns whether tokens of this layout can be multiplied.
pub(super) fn reads(layout: &PackedLayout) -> bool {
    layout.spec.format.on_cpu().unpacks(layout)
}

/// The query rows of a block as digits, and the memory of products.
pub(in super::super) struct Coded {
    query: Digits,
    weights: Digits,
    products: Products,
    codes: Vec<u16>,
    scales: [f32; TOKENS],
}

impl Coded {
    /// Stores the query, multiplied by `scale`, as digits.
    ///
    /// # Safety
    /// [`available`] must have returned true, and the thread must not have another one.
    pub(super) unsafe fn new(query: &[f32], head_dim: usize, scale: f32) -> Self {
        let mut digits = Digits::default();
        // SAFETY: as the caller guarantees.
        let products = unsafe {
            digits.fill(query, head_dim, query.len() / head_dim, &vec![scale; head_dim]);
            Products::new()
        };
        let (weights, codes) = (Digits::default(), vec![]);
        Self { query: digits, weights, products, codes, scales: [0.0; TOKENS] }
    }

    pub(super) fn score(&mut self, keys: &PackedRun<'_>, scores: &mut [f32], n: usize) {
        let stride = keys.place.head_dim.next_multiple_of(DEPTH);
        self.visit(keys, stride, COLUMNS, |coded, first, count| {
            let Self { query, products, codes, scales, .. } = coded;
            let (codes, scales) = (&codes[..count * stride], &scales[..count]);
            // SAFETY: the processor has the instructions.
            unsafe { products.with_rows(query, codes, scales, &mut scores[first..], n) };
        });
    }

    pub(super) fn add(&mut self, values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
        let head_dim = values.place.head_dim;
        let stride = head_dim.next_multiple_of(COLUMNS);
        self.visit(values, stride, TOKENS, |coded, first, count| {
            let Self { weights: digits, products, codes, scales, .. } = coded;
            let (rows, codes) = (o.len() / head_dim, &codes[..count * stride]);
            // SAFETY: the processor has the instructions.
            unsafe {
                digits.fill(&weights[first..], n, rows, &scales[..count]);
                products.with_columns(digits, codes, o, head_dim);
            }
        });
    }

    /// Unpacks a run, `step` tokens at a time. Calls `visit` with each part's first token, counted
    /// from the run's start, and its length.
    fn visit(
        &mut self,
        run: &PackedRun<'_>,
        stride: usize,
        step: usize,
        mut visit: impl FnMut(&mut Self, usize, usize),
    ) {
        let codec = run.place.spec.format.on_cpu();
        // Numbers past `head_dim` stay 0.
        self.codes.clear();
        self.codes.resize(step * stride, 0);
        for token in run.tokens.clone().step_by(step) {
            let count = step.min(run.tokens.end - token);
            // The run may end where the words end, so nothing after its last token is read.
            let (codes, scales) = (&mut self.codes[..count * stride], &mut self.scales[..count]);
            codec.unpack(run.words, token, codes, stride, &run.place);
            codec.scales(run.words, token, scales, &run.place);
            visit(self, token - run.tokens.start, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        formats::{Codec, Granularity, GroupRange, QuantSpec},
        layout::PackedLayout,
    };

    fn place(
        format: Codec,
        granularity: Granularity,
        head_dim: usize,
        group_size: usize,
    ) -> PackedLayout {
        let spec = QuantSpec {
            format,
            granularity,
            n_bits: 8,
            group_size,
            range: GroupRange::MinMax,
            tile: None,
        };
        PackedLayout { spec, head_dim, tokens: 96 }
    }

    /// Unpacked numbers times their scales are the restored rows, bit for bit.
    #[test]
    fn unpacked_codes_are_those_restored() {
        for format in [Codec::Int8, Codec::E4m3, Codec::E5m2] {
            for head_dim in [32, 64, 96] {
                let place = place(format, Granularity::PerToken, head_dim, head_dim);
                let codec = format.on_cpu();
                assert!(codec.unpacks(&place), "{format:?}");
                let x = |i: usize| ((i * 7919 % 1013) as f32 / 500.0 - 1.0) * (i % 7) as f32;
                let rows: Vec<f32> = (0..96 * head_dim).map(x).collect();
                let mut words = vec![0; place.words()];
                codec.quantize(&rows, &mut words, 0, &place);
                let (first, count, stride) = (17, 40, head_dim + 32);
                let mut restored = vec![0.0; count * head_dim];
                codec.restore(&words, first, &mut restored, &place);
                let mut codes = vec![0x7fc0; count * stride];
                let mut scales = vec![f32::NAN; count];
                codec.unpack(&words, first, &mut codes, stride, &place);
                codec.scales(&words, first, &mut scales, &place);
                for (t, restored) in restored.chunks_exact(head_dim).enumerate() {
                    let codes = &codes[t * stride..][..head_dim];
                    for (code, wanted) in codes.iter().zip(restored) {
                        let x = f32::from_bits(u32::from(*code) << 16) * scales[t];
                        assert_eq!(x.to_bits(), wanted.to_bits(), "{format:?}, token {t}");
                    }
                }
            }
        }
        for (format, granularity, group_size) in [
            (Codec::Int8, Granularity::PerChannel, 32),
            (Codec::E4m3Blocks, Granularity::PerToken, 32),
            (Codec::Affine, Granularity::PerToken, 64),
        ] {
            let place = place(format, granularity, 64, group_size);
            assert!(!format.on_cpu().unpacks(&place), "{format:?}");
        }
    }
}
