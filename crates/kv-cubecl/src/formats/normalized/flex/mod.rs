//! Variance-normalized tiles on the CPU.

#![allow(
    clippy::extra_unused_type_parameters,
    reason = "macerator compiles a function for its first type parameter, used or not"
)]

mod balance;

use half::f16;
use macerator::Simd;

use super::Normalized;
use crate::{
    formats::{
        Granularity, QuantSpec,
        affine::{
            Affine,
            flex::{
                AddScratch, F16_MAX, Quantized, add_words, column_ranges, encode_columns,
                fits_widened, reads_codes, score_words, through_range, unpack_parameters,
            },
        },
        flex::{CpuCodec, PackedRun},
    },
    layout::PackedLayout,
};
use balance::{Columns, balance};

/// A tile with its scales and the ranges of its groups.
struct Prepared {
    /// The root mean square of the tile; 1 if all numbers are 0.
    rms: f32,
    /// The scales by which the tile is divided after its root mean square.
    tokens: Vec<f32>,
    channels: Vec<f32>,
    /// The divided numbers, a column for each group.
    columns: Columns,
    /// The groups, then one for each padding column.
    groups: Vec<Group>,
}

#[derive(Clone, Copy)]
struct Group {
    /// The least and the greatest number that codes stand for.
    range: (f32, f32),
    step: f32,
}

impl Prepared {
    fn new(rows: &[f32], head_dim: usize, spec: &QuantSpec) -> Self {
        // A NaN counts as 0, so that it changes no other number.
        let limited = |x: &f32| if x.is_nan() { 0.0 } else { x.clamp(-F16_MAX, F16_MAX) };
        let mut numbers: Vec<f32> = rows.iter().map(limited).collect();
        // Eight sums can be added side by side. Tiles have a multiple of 8 numbers.
        let mut squares = [0f64; 8];
        for part in numbers.as_chunks::<8>().0 {
            squares.iter_mut().zip(part).for_each(|(sum, &x)| *sum += f64::from(x).powi(2));
        }
        let rms = (squares.iter().sum::<f64>() / numbers.len() as f64).sqrt() as f32;
        let rms = if rms > 0.0 { rms } else { 1.0 };
        numbers.iter_mut().for_each(|x| *x /= rms);

        let by_token = Columns::transposed(&numbers, head_dim);
        let by_channel = Columns::new(&numbers, head_dim);
        let iterations = spec.tile.map_or(0, |tile| tile.iterations);
        let [tokens, channels] = balance(&by_token, &by_channel, iterations);
        let (mut columns, of_rows, of_columns) = match spec.granularity {
            Granularity::PerChannel => (by_channel, &tokens, &channels),
            Granularity::PerToken => (by_token, &channels, &tokens),
        };
        columns.divide(of_rows, of_columns);
        let ranges = column_ranges(&columns.numbers, columns.width, spec.range, spec.max_code());
        let max_code = spec.max_code() as f32;
        let group = |range: (f32, f32)| Group { range, step: (range.1 - range.0) / max_code };
        let groups = ranges.into_iter().map(group).collect();
        Self { rms, tokens, channels, columns, groups }
    }

    /// Returns the factor that is stored with the step and the minimum of a group, and the one that
    /// is stored by itself.
    fn factors(&self, spec: &QuantSpec) -> (Vec<f32>, Vec<f32>) {
        let channels = self.channels.iter().map(|channel| channel * self.rms).collect();
        match spec.granularity {
            Granularity::PerChannel => (channels, self.tokens.clone()),
            Granularity::PerToken => (self.tokens.clone(), channels),
        }
    }
}

impl Group {
    /// Returns the parameter word: step and minimum, multiplied by a factor.
    fn parameter(&self, factor: f32) -> u32 {
        halves([self.step * factor, self.range.0 * factor])
    }
}

/// Returns the word of two numbers as f16, which saturate.
fn halves(pair: [f32; 2]) -> u32 {
    let half = |x: f32| u32::from(f16::from_f32(x.clamp(-F16_MAX, F16_MAX)).to_bits());
    let [low, high] = pair.map(half);
    low | high << 16
}

/// Quantizes one tile into its words.
fn quantize_tile(rows: &[f32], words: &mut [u32], head_dim: usize, spec: &QuantSpec) {
    let tile = Prepared::new(rows, head_dim, spec);
    let (with_groups, alone) = tile.factors(spec);
    let (groups, factors) = words.split_at_mut(words.len() - alone.len() / 2);
    let pairs = alone.as_chunks::<2>().0.iter();
    factors.iter_mut().zip(pairs).for_each(|(word, &pair)| *word = halves(pair));
    let width = tile.columns.width;
    let (min, steps): (Vec<_>, Vec<_>) =
        tile.groups.iter().map(|group| (group.range.0, group.step)).unzip();
    let code_words = spec.code_words();
    let mut lines = vec![0; code_words * width];
    encode_columns(&tile.columns.numbers, &mut lines, spec.n_bits, &min, &steps);
    for (nth, (group, factor)) in tile.groups.iter().zip(with_groups).enumerate() {
        let (first, stride) = match spec.granularity {
            Granularity::PerChannel => (nth, head_dim),
            Granularity::PerToken => (nth * (code_words + 1), 1),
        };
        let codes = lines[nth..].iter().step_by(width);
        let words = groups[first..].iter_mut().step_by(stride);
        words.zip(codes).for_each(|(word, &codes)| *word = codes);
        groups[first + code_words * stride] = group.parameter(factor);
    }
}

/// Most factors of a tile: one for each token or channel.
const MOST_FACTORS: usize = 256;

/// Scratch memory for the factors of a block, reused for all blocks: clearing it for each took a
/// tenth of the time of a kernel.
struct Factors([f32; MOST_FACTORS]);

impl Factors {
    fn new() -> Self {
        Self([0.0; MOST_FACTORS])
    }

    /// Returns the words of the groups of a block, and its factors. `words` begin with the block.
    fn read<'a>(
        &mut self,
        words: &'a [u32],
        PackedLayout { spec, head_dim, .. }: &PackedLayout,
    ) -> (&'a [u32], &[f32]) {
        let (n, len) = (spec.factors(*head_dim), spec.block_words(*head_dim));
        let (groups, words) = words[..len].split_at(len - n / 2);
        let factors = &mut self.0[..n];
        widen(words, factors);
        (groups, factors)
    }
}

/// Converts pairs of halves, which are positive.
#[macerator::with_simd]
fn widen<S: Simd>(words: &[u32], factors: &mut [f32]) {
    for (pair, &word) in factors.as_chunks_mut::<2>().0.iter_mut().zip(words) {
        let (low, high) = unpack_parameters(word);
        *pair = [low, high];
    }
}

/// Returns the layout of a block's groups without its factors: groups of KIVI.
fn without_tile(place: &PackedLayout) -> PackedLayout {
    let spec = QuantSpec { tile: None, ..place.spec };
    let tokens = place.spec.block_tokens();
    PackedLayout { spec, tokens, ..*place }
}

/// The tokens of a run that are in one block.
struct Part<'a> {
    /// The words of the block, and of what follows it.
    words: &'a [u32],
    /// Tokens of the block before these.
    skipped: usize,
    /// Tokens of the run before these.
    first: usize,
    count: usize,
}

/// Returns the blocks of a run.
fn parts<'a>(run: &'a PackedRun<'_>) -> impl Iterator<Item = Part<'a>> {
    let PackedLayout { spec, head_dim, .. } = run.place;
    let (block, tokens) = (spec.block_tokens(), run.tokens.clone());
    (tokens.start / block * block..tokens.end).step_by(block).map(move |token| {
        let (begin, end) = (token.max(tokens.start), (token + block).min(tokens.end));
        Part {
            words: &run.words[spec.words(token, head_dim)..],
            skipped: begin - token,
            first: begin - tokens.start,
            count: end - begin,
        }
    })
}

impl CpuCodec for Normalized {
    fn quantize(&self, rows: &[f32], words: &mut [u32], first: usize, place: &PackedLayout) {
        let PackedLayout { spec, head_dim, .. } = *place;
        let blocks = words[place.codes(first)..].chunks_exact_mut(spec.block_words(head_dim));
        for (rows, words) in rows.chunks_exact(spec.block_tokens() * head_dim).zip(blocks) {
            quantize_tile(rows, words, head_dim, &spec);
        }
    }

    fn restore(&self, words: &[u32], first: usize, rows: &mut [f32], place: &PackedLayout) {
        let PackedLayout { spec, head_dim, .. } = *place;
        let groups = without_tile(place);
        let mut factors = Factors::new();
        let blocks = words[place.codes(first)..].chunks_exact(spec.block_words(head_dim));
        for (rows, words) in rows.chunks_exact_mut(spec.block_tokens() * head_dim).zip(blocks) {
            let (words, factors) = factors.read(words, place);
            Affine.restore(words, 0, rows, &groups);
            for (token, row) in rows.chunks_exact_mut(head_dim).enumerate() {
                match spec.granularity {
                    Granularity::PerChannel => row.iter_mut().for_each(|x| *x *= factors[token]),
                    Granularity::PerToken => {
                        row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
                    }
                }
            }
        }
    }

    /// The scales of tokens and channels count as constants.
    fn through_scales(&self, rows: &[f32], grad: &mut [f32], place: &PackedLayout) {
        let PackedLayout { spec, head_dim, .. } = *place;
        let len = spec.block_tokens() * head_dim;
        for (rows, grad) in rows.chunks_exact(len).zip(grad.chunks_exact_mut(len)) {
            let tile = Prepared::new(rows, head_dim, &spec);
            let Prepared { rms, tokens, channels, columns, groups } = &tile;
            let scale = |i: usize| rms * tokens[i / head_dim] * channels[i % head_dim];
            for (nth, group) in groups.iter().take(columns.len).enumerate() {
                let elements: Vec<usize> = match spec.granularity {
                    Granularity::PerChannel => (nth..len).step_by(head_dim).collect(),
                    Granularity::PerToken => (nth * head_dim..(nth + 1) * head_dim).collect(),
                };
                let numbers: Vec<f32> =
                    columns.numbers[nth..].iter().copied().step_by(columns.width).collect();
                let mut of_numbers: Vec<f32> =
                    elements.iter().map(|&i| grad[i] * scale(i)).collect();
                let Group { range, step } = *group;
                let group = Quantized { range, step, min: range.0, max_code: spec.max_code() };
                through_range(&numbers, &mut of_numbers, spec.range, &group);
                for (&i, of_number) in elements.iter().zip(of_numbers) {
                    grad[i] = of_number / scale(i);
                }
            }
        }
    }

    fn score(
        &self,
        keys: &PackedRun<'_>,
        query: &[f32],
        scores: &mut [f32],
        n: usize,
        scratch: &mut [f32],
    ) {
        let groups = without_tile(&keys.place);
        if !reads_codes(&groups.spec) {
            return keys.score_restored(query, scores, n);
        }
        let rows = query.len() / keys.place.head_dim;
        let mut factors = Factors::new();
        for Part { words, first, count, .. } in parts(keys) {
            let (_, factors) = factors.read(words, &keys.place);
            let scores = &mut scores[first..];
            score_words(words, &groups, count, query, scores, n, scratch);
            for row in 0..rows {
                let scores = &mut scores[row * n..][..count];
                scores.iter_mut().zip(factors).for_each(|(score, factor)| *score *= factor);
            }
        }
    }

    fn add(&self, values: &PackedRun<'_>, weights: &[f32], n: usize, o: &mut [f32]) {
        let groups = without_tile(&values.place);
        if !reads_codes(&groups.spec) || !fits_widened(&groups) {
            return values.add_restored(weights, n, o);
        }
        let head_dim = values.place.head_dim;
        let (mut sums, mut scratch) = (vec![0.0; o.len()], AddScratch::default());
        let mut factors = Factors::new();
        let line = groups.spec.words_per_group();
        for Part { words, skipped, first, count } in parts(values) {
            let (_, factors) = factors.read(words, &values.place);
            let words = &words[skipped * line..];
            sums.fill(0.0);
            add_words(words, &groups, count, &weights[first..], n, &mut sums, &mut scratch);
            for (o, sums) in o.chunks_exact_mut(head_dim).zip(sums.chunks_exact(head_dim)) {
                for ((o, sum), factor) in o.iter_mut().zip(sums).zip(factors) {
                    *o += sum * factor;
                }
            }
        }
    }
}
