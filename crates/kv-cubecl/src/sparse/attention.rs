//! Sparse attention of a whole sequence at once, with gradients.

use core::ops::Range;

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

use super::{
    Compression, Selection,
    select::hidden_entries,
    sequence::{SCORES, joined, part, parts},
};
use crate::{Error, Result, error::invalid};

/// The shortest and the longest block of tokens that attend to the same recent tokens. A sliding
/// window between them is a block.
const BLOCK: core::ops::RangeInclusive<usize> = 64..=256;

/// The compressed entries of a sequence, and which of them a token attends to.
#[derive(Clone, Copy, Debug)]
pub struct Compressed<'a> {
    /// `[batch, 1, entries, head_dim]`.
    pub entries: &'a Tensor<4>,
    /// The tokens that an entry stands for.
    pub compression: Compression,
    /// The selected entries, which the token must see; `None` for all that it sees.
    pub selection: Option<&'a Selection>,
}

/// The options of [`sparse_attention`].
#[derive(Clone, Debug)]
pub struct SparseOptions {
    /// Recent tokens that a query sees themselves, including its own.
    pub sliding_window: usize,
    /// The factor of scores; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// The learned sink of each head, `[n_heads]`.
    pub sink_logits: Option<Tensor<1>>,
}

/// Attention of each token to recent tokens and to compressed entries, in one softmax, for a whole
/// sequence with gradients (DeepSeek-V4, 2026). One row serves as key and value of all heads.
///
/// # Shapes
/// - `query`: `[batch, n_heads, tokens, head_dim]`, after rope
/// - `rows`: `[batch, 1, tokens, head_dim]`, the tokens' own keys and values, after rope
/// - output: f32 `[batch, n_heads, tokens, head_dim]`
///
/// # Errors
/// [`Error::Shape`] for tensors that do not fit, and [`Error::InvalidConfig`] for a sliding window
/// of 0.
///
/// # Panics
/// Panics for a selection of an entry that does not exist, and may panic for one that the token
/// does not see.
pub fn sparse_attention(
    query: Tensor<4>,
    rows: &Tensor<4>,
    compressed: Option<Compressed<'_>>,
    options: &SparseOptions,
) -> Result<Tensor<4>> {
    check(&query, rows, compressed.as_ref(), options)?;
    let blocks = Blocks::new(query, rows, compressed, options);
    let outputs: Vec<_> = blocks.parts().map(|part| blocks.output(part)).collect();
    Ok(joined(outputs, 2))
}

/// Sparse attention in blocks of tokens. The tokens of a block are compared with the recent tokens
/// that any of them sees.
pub(super) struct Blocks<'a> {
    /// Scaled queries, f32.
    query: Tensor<4>,
    /// f32 `[batch, tokens, head_dim]`.
    rows: Tensor<3>,
    compressed: Option<Compressed<'a>>,
    options: &'a SparseOptions,
    /// Tokens of a block.
    block: usize,
}

/// A softmax that is not divided by its sum yet, for some blocks of tokens.
struct Softmax {
    /// The exponentials of recent tokens, `[batch, blocks, heads * block, recent]`.
    recent: Tensor<4>,
    /// The recent tokens of each block, `[batch, blocks, recent, head_dim]`.
    rows: Tensor<4>,
    /// The exponentials of entries, `[batch, 1, blocks * heads * block, entries]`, and the entries,
    /// `[batch, 1, entries, head_dim]`.
    entries: Option<[Tensor<4>; 2]>,
    /// `[batch, blocks, heads * block, 1]`.
    sum: Tensor<4>,
}

impl<'a> Blocks<'a> {
    /// Takes checked arguments of [`sparse_attention`].
    pub(super) fn new(
        query: Tensor<4>,
        rows: &Tensor<4>,
        compressed: Option<Compressed<'a>>,
        options: &'a SparseOptions,
    ) -> Self {
        let scale = options.scale.unwrap_or(1.0 / (query.dims()[3] as f32).sqrt());
        let query = query.cast(DType::F32) * scale;
        let block = options.sliding_window.clamp(*BLOCK.start(), *BLOCK.end());
        let rows = rows.clone().cast(DType::F32).squeeze_dim(1);
        Self { query, rows, compressed, options, block }
    }

    /// Returns the parts of the sequence that are computed together, in whole blocks.
    pub(super) fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let [_, heads, tokens, _] = self.query.dims();
        let scores = heads * (self.recent() + self.seen(tokens));
        parts(tokens, SCORES / scores, self.block)
    }

    /// Returns the number of entries that the tokens before `end` see.
    pub(super) fn seen(&self, end: usize) -> usize {
        self.compressed.map_or(0, |Compressed { entries, compression, .. }| {
            compression.entries(end).min(entries.dims()[2])
        })
    }

    /// Returns the number of blocks before its own that a token sees tokens of.
    fn blocks_before(&self) -> usize {
        (self.options.sliding_window - 1).div_ceil(self.block).min(self.rows.dims()[1] / self.block)
    }

    /// Returns the number of recent tokens that a block is compared with.
    fn recent(&self) -> usize {
        (self.blocks_before() + 1) * self.block
    }

    fn output(&self, tokens: Range<usize>) -> Tensor<4> {
        let ([batch, heads, _, width], n) = (self.query.dims(), tokens.len());
        let Softmax { recent, rows, entries, sum } = self.softmax(tokens);
        let output = recent.matmul(rows);
        let output = match entries {
            Some([weights, entries]) => {
                output.clone() + weights.matmul(entries).reshape(output.dims())
            }
            None => output,
        };
        let blocks = sum.dims()[1];
        let output = (output / sum).reshape([batch, blocks, heads, self.block, width]);
        let output = output.swap_dims(1, 2).reshape([batch, heads, blocks * self.block, width]);
        part(&output, 2, 0..n)
    }

    /// Returns the weights of the entries that the last of these tokens sees, summed over heads,
    /// `[batch, tokens, entries]`; `None` if it sees none.
    pub(super) fn entry_weights(&self, tokens: Range<usize>) -> Option<Tensor<3>> {
        let ([batch, heads, ..], count) = (self.query.dims(), tokens.len());
        let Softmax { entries, sum, .. } = self.softmax(tokens);
        let [weights, _] = entries?;
        let (blocks, n) = (sum.dims()[1], weights.dims()[3]);
        let weights = weights.reshape([batch, blocks, heads * self.block, n]) / sum;
        let weights = weights.reshape([batch, blocks, heads, self.block, n]).sum_dim(2);
        Some(part(&weights.reshape([batch, blocks * self.block, n]), 1, 0..count))
    }

    /// Returns the softmax of tokens that start with a block, over recent tokens, entries and
    /// sinks.
    fn softmax(&self, tokens: Range<usize>) -> Softmax {
        let [batch, heads, _, width] = self.query.dims();
        let (block, device) = (self.block, self.query.device());
        let blocks = tokens.len().div_ceil(block);
        let query = padded(part(&self.query, 2, tokens.clone()), 2, 0, blocks * block);
        // One row serves all heads, so the queries of all heads are rows of one product.
        let query = query.reshape([batch, heads, blocks, block, width]).swap_dims(1, 2);
        let query = query.reshape([batch, blocks, heads * block, width]);

        let rows = self.recent_rows(&tokens, blocks);
        let recent = rows.dims()[2];
        let hidden = self.outside(&tokens, blocks, &device);
        let scores = query.clone().matmul(rows.clone().swap_dims(2, 3));
        let scores = scores.reshape([batch, blocks, heads, block, recent]) + hidden;
        let mut largest = scores.clone().detach().max_dim(4);

        let of_entries = self.entry_scores(query, &tokens);
        if let Some((scores, _)) = &of_entries {
            largest = largest.max_pair(scores.clone().detach().max_dim(4));
        }
        let sinks = self
            .options
            .sink_logits
            .as_ref()
            .map(|logits| logits.clone().cast(DType::F32).reshape([1, 1, heads, 1, 1]));
        if let Some(sinks) = &sinks {
            let sinks = sinks.clone().detach().expand(largest.dims());
            largest = largest.max_pair(sinks);
        }

        let recent_exp = (scores - largest.clone()).exp();
        let mut sum = recent_exp.clone().sum_dim(4);
        let entries = of_entries.map(|(scores, entries)| {
            let n = scores.dims()[4];
            let exp = (scores - largest.clone()).exp();
            sum = sum.clone() + exp.clone().sum_dim(4);
            [exp.reshape([batch, 1, blocks * heads * block, n]), entries]
        });
        if let Some(sinks) = sinks {
            sum = sum + (sinks - largest).exp();
        }
        Softmax {
            recent: recent_exp.reshape([batch, blocks, heads * block, recent]),
            rows,
            entries,
            sum: sum.reshape([batch, blocks, heads * block, 1]),
        }
    }

    /// Returns the tokens that the blocks of `tokens` are compared with, each block's own last,
    /// `[batch, blocks, recent, head_dim]`; 0 before the first token and after the last.
    fn recent_rows(&self, tokens: &Range<usize>, blocks: usize) -> Tensor<4> {
        let ([batch, _, width], block) = (self.rows.dims(), self.block);
        let before = self.blocks_before();
        let wanted = before * block;
        let first = tokens.start.saturating_sub(wanted);
        let rows = part(&self.rows, 1, first..tokens.end);
        let missing = wanted - (tokens.start - first);
        let rows = padded(rows, 1, missing, (blocks + before) * block);
        let shifted = |by: usize| {
            let rows = part(&rows, 1, by * block..(by + blocks) * block);
            rows.reshape([batch, blocks, block, width])
        };
        joined((0..=before).map(shifted).collect(), 2)
    }

    /// Returns what hides the recent tokens that a token does not see, `-inf` or 0,
    /// `[1, blocks, 1, block, recent]`.
    fn outside(&self, tokens: &Range<usize>, blocks: usize, device: &Device) -> Tensor<5> {
        let (block, recent) = (self.block, self.recent());
        let mut hidden = Vec::with_capacity(blocks * block * recent);
        for t in tokens.start..tokens.start + blocks * block {
            // The block's own tokens come last, so this is the token in the first column.
            let first = (t / block * block + block) as isize - recent as isize;
            let seen = (t + 1).saturating_sub(self.options.sliding_window)..t + 1;
            hidden.extend((first..first + recent as isize).map(|k| {
                match usize::try_from(k).is_ok_and(|k| seen.contains(&k)) {
                    true => 0.0,
                    false => f32::NEG_INFINITY,
                }
            }));
        }
        Tensor::from_data(TensorData::new(hidden, [1, blocks, 1, block, recent]), device)
    }

    /// Returns the scores of the entries that the last token sees,
    /// `[batch, blocks, heads, block, entries]` with `-inf` for hidden ones, and these entries;
    /// `None` without any.
    fn entry_scores(
        &self,
        query: Tensor<4>,
        tokens: &Range<usize>,
    ) -> Option<(Tensor<5>, Tensor<4>)> {
        let n = self.seen(tokens.end);
        let compressed = self.compressed.filter(|_| n > 0)?;
        let ([batch, blocks, rows, width], block) = (query.dims(), self.block);
        let entries = part(compressed.entries, 2, 0..n).cast(DType::F32);
        let query = query.reshape([batch, 1, blocks * rows, width]);
        let scores = query.matmul(entries.clone().swap_dims(2, 3));
        let scores = scores.reshape([batch, blocks, rows / block, block, n]);
        let unseen = padded(unseen(&compressed, tokens, n), 1, 0, blocks * block);
        let unseen = unseen.clone().reshape([unseen.dims()[0], blocks, 1, block, n]);
        Some((scores + unseen, entries))
    }
}

/// Returns what hides entries that a token does not see or that are not selected, `-inf` or 0,
/// `[batch or 1, tokens, n]`.
fn unseen(compressed: &Compressed<'_>, tokens: &Range<usize>, n: usize) -> Tensor<3> {
    let Compressed { entries, compression, selection } = *compressed;
    let (first, count, device) = (tokens.start, tokens.len(), entries.device());
    let hidden: Tensor<3, Bool> = match selection {
        None => hidden_entries(first, count, n, compression, &device).unsqueeze(),
        Some(selection) => unselected(selection.indices.clone().narrow(1, first, count), n),
    };
    Tensor::zeros(hidden.dims(), &device).mask_fill(hidden, f32::NEG_INFINITY)
}

/// Adds zeros before an axis, and behind it up to a length of `len`.
fn padded<const D: usize>(x: Tensor<D>, axis: usize, before: usize, len: usize) -> Tensor<D> {
    let (mut shape, device) = (x.dims(), x.device());
    let after = len - before - shape[axis];
    let mut zeros = |n: usize| {
        shape[axis] = n;
        (n > 0).then(|| Tensor::zeros(shape, &device))
    };
    let (before, after) = (zeros(before), zeros(after));
    joined(before.into_iter().chain([x]).chain(after).collect(), axis)
}

/// Checks the arguments of [`sparse_attention`].
fn check(
    query: &Tensor<4>,
    rows: &Tensor<4>,
    compressed: Option<&Compressed<'_>>,
    options: &SparseOptions,
) -> Result<()> {
    let [batch, heads, tokens, width] = query.dims();
    let misfit = |tensor, shape: Vec<usize>, rule: String| {
        Err(Error::Shape { op: "sparse_attention", tensor, shape, rule })
    };
    if query.dims().contains(&0) {
        let rule = "must have no empty axis".to_string();
        return misfit("query", query.dims().to_vec(), rule);
    }
    if options.sliding_window == 0 {
        return Err(invalid("sliding_window", 0, "must be at least 1"));
    }
    if rows.dims() != [batch, 1, tokens, width] {
        let rule = format!("must be [{batch}, 1, {tokens}, {width}]");
        return misfit("rows", rows.dims().to_vec(), rule);
    }
    if let Some(logits) = options.sink_logits.as_ref().filter(|logits| logits.dims() != [heads]) {
        let rule = format!("must be [n_heads], [{heads}]");
        return misfit("sink_logits", logits.dims().to_vec(), rule);
    }
    let Some(Compressed { entries, selection, .. }) = compressed else { return Ok(()) };
    let n = entries.dims()[2];
    if n == 0 || entries.dims() != [batch, 1, n, width] {
        let rule = format!("must be [{batch}, 1, entries, {width}] with at least one entry");
        return misfit("entries", entries.dims().to_vec(), rule);
    }
    match selection.map(|selection| selection.indices().dims()) {
        Some(shape) if shape[..2] != [batch, tokens] || shape[2] == 0 => {
            let rule = format!("must be [{batch}, {tokens}, top_k]");
            misfit("selection", shape.to_vec(), rule)
        }
        _ => Ok(()),
    }
}

/// Returns which of `n` entries are not among `indices` `[batch, tokens, top_k]`, as
/// `[batch, tokens, n]`.
fn unselected(indices: Tensor<3, Int>, n: usize) -> Tensor<3, Bool> {
    let [batch, tokens, _] = indices.dims();
    let device = indices.device();
    // Column 0 stands for -1.
    let ones = Tensor::<3>::ones(indices.dims(), &device);
    let counts = Tensor::<3>::zeros([batch, tokens, n + 1], &device);
    let counts = counts.scatter(2, indices + 1, ones, burn::tensor::IndexingUpdateOp::Add);
    counts.narrow(2, 1, n).equal_elem(0.0)
}
