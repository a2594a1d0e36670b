//! The softmax of attention to rows.

use core::{f32::consts::LOG2_E, ops::Range};

use super::rows::SequenceRows;
use crate::{
    formats::flex::TILE,
    simd::{self, add_rows, exp2_minus_max, score_rows},
};

/// The softmax of some heads of one token over rows that come tile by tile.
pub(super) struct Softmax<'a> {
    /// Scaled, so that scores are powers of 2.
    query: Vec<f32>,
    /// The largest score of each head.
    most: Vec<f32>,
    /// The sum of each head's weights.
    sums: Vec<f32>,
    scores: Vec<f32>,
    tile: Vec<f32>,
    /// The sum of weighted rows of each head.
    out: &'a mut [f32],
    width: usize,
}

impl<'a> Softmax<'a> {
    pub(super) fn new(query: &[f32], scale: f32, out: &'a mut [f32], width: usize) -> Self {
        let heads = query.len() / width;
        Self {
            query: query.iter().map(|x| x * scale * LOG2_E).collect(),
            most: vec![f32::NEG_INFINITY; heads],
            sums: vec![0.0; heads],
            scores: vec![0.0; heads * TILE],
            tile: vec![0.0; TILE * width],
            out,
            width,
        }
    }

    /// Attends to the rows with these numbers, in a ring.
    pub(super) fn ring(&mut self, rows: &SequenceRows<'_>, numbers: Range<usize>) {
        let (slots, mut number) = (rows.layout.slots, numbers.start);
        while number < numbers.end {
            let slot = number % slots;
            let n = TILE.min(numbers.end - number).min(slots - slot);
            let mut tile = core::mem::take(&mut self.tile);
            self.add(rows.tile(slot..slot + n, &mut tile));
            self.tile = tile;
            number += n;
        }
    }

    /// Attends to selected rows; negative numbers stand for none.
    pub(super) fn selected(&mut self, rows: &SequenceRows<'_>, numbers: &[i32]) {
        let (width, mut tile) = (self.width, core::mem::take(&mut self.tile));
        let mut row = vec![0.0; width];
        let mut n = 0;
        let chosen = numbers.iter().filter_map(|&number| usize::try_from(number).ok());
        for number in chosen {
            let to = &mut tile[n * width..][..width];
            to.copy_from_slice(rows.tile(number..number + 1, &mut row));
            n += 1;
            if n == TILE {
                self.add(&tile);
                n = 0;
            }
        }
        self.add(&tile[..n * width]);
        self.tile = tile;
    }

    /// Attends to a tile of rows.
    fn add(&mut self, rows: &[f32]) {
        let (width, n) = (self.width, rows.len() / self.width);
        if n == 0 {
            return;
        }
        let heads = self.most.len();
        let scores = &mut self.scores[..heads * n];
        score_rows(&self.query, rows, scores, n, width);
        let outs = self.out.chunks_exact_mut(width);
        for (head, (scores, out)) in scores.chunks_exact_mut(n).zip(outs).enumerate() {
            let most = self.most[head].max(simd::maximum(scores));
            let base = simd::finite_or_zero(most);
            if most > self.most[head] {
                let factor = (self.most[head] - base).exp2();
                self.sums[head] *= factor;
                out.iter_mut().for_each(|x| *x *= factor);
                self.most[head] = most;
            }
            self.sums[head] += exp2_minus_max(scores, base);
        }
        add_rows(scores, n, rows, self.out, width);
    }

    /// Adds the sinks to the denominators and divides.
    pub(super) fn finish(self, sinks: &[f32]) {
        for (head, out) in self.out.chunks_exact_mut(self.width).enumerate() {
            let sink = sinks[head] * LOG2_E;
            let base = simd::finite_or_zero(self.most[head].max(sink));
            let factor = (self.most[head] - base).exp2();
            let sum = self.sums[head] * factor + (sink - base).exp2();
            out.iter_mut().for_each(|x| *x *= factor / sum);
        }
    }
}
