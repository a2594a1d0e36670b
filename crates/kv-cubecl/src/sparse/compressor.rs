//! [`EntryCompressor`] and [`KeyCompressor`]: from projections of tokens to compressed entries.

use burn::tensor::{DType, Int, Tensor, activation};

use super::{Compression, RowFormat, rope_pairs};
use crate::{Error, Result, RopeTable, error::invalid, functions::hadamard};

/// The part of compression after its projections: a softmax over the tokens of a window, for each
/// channel by itself, then an RMS norm and rope.
///
/// With the projections `c` and `z` of a window's tokens and a bias `p` for each place in a window,
/// an entry is `rope(norm(sum_j softmax_j(z_j + p_j) * c_j))`, as in DeepSeek-V4 (2026).
/// [`Compression`] says which tokens these are. All sums are f32.
#[derive(Clone, Debug)]
pub(crate) struct Compressor {
    pub(crate) compression: Compression,
    /// `[ratio, lanes * width]`
    pub(crate) position_bias: Tensor<2>,
    /// `[width]`
    pub(crate) gain: Tensor<1>,
    pub(crate) epsilon: f64,
    pub(crate) rope: RopeTable,
    /// True if entries are multiplied by the Hadamard matrix after rope.
    pub(crate) hadamard: bool,
    /// The format that entries are rounded to, before a cache stores them in its own.
    pub(crate) rounding: Option<RowFormat>,
}

/// The gated projections of tokens.
#[derive(Clone, Debug)]
pub struct Gated {
    /// The numbers that are averaged, `[batch, tokens, lanes * width]`. With overlap, each token's
    /// numbers for the next window come first, then the numbers for its own.
    pub content: Tensor<3>,
    /// The logits of the softmax over tokens, of the same shape.
    pub gate: Tensor<3>,
}

impl Compressor {
    fn new(
        op: &'static str,
        compression: Compression,
        position_bias: Tensor<2>,
        gain: Tensor<1>,
        epsilon: f64,
        rope: RopeTable,
    ) -> Result<Self> {
        compression.validate()?;
        let [width] = gain.dims();
        let expected = [compression.ratio, compression.lanes() * width];
        if position_bias.dims() != expected {
            let rule = format!("must be [ratio, lanes * width], {expected:?}");
            let shape = position_bias.dims().to_vec();
            return Err(Error::Shape { op, tensor: "position_bias", shape, rule });
        }
        if rope.rotary_dim() > width {
            let rule = format!("must have at most the {width} channels of an entry");
            let shape = rope.table().dims().to_vec();
            return Err(Error::Shape { op, tensor: "rope", shape, rule });
        }
        let (position_bias, gain) = (position_bias.cast(DType::F32), gain.cast(DType::F32));
        Ok(Self {
            compression,
            position_bias,
            gain,
            epsilon,
            rope,
            hadamard: false,
            rounding: None,
        })
    }

    fn with_rounding(self, field: &'static str, format: RowFormat) -> Result<Self> {
        format.validate(field, self.width())?;
        Ok(Self { rounding: Some(format), ..self })
    }

    /// Returns the number of channels of an entry.
    pub(crate) fn width(&self) -> usize {
        self.gain.dims()[0]
    }

    /// Checks the shapes of projections.
    pub(super) fn check(&self, op: &'static str, gated: &Gated) -> Result<()> {
        let [batch, tokens, _] = gated.content.dims();
        let width = self.compression.lanes() * self.width();
        for (tensor, part) in [("content", &gated.content), ("gate", &gated.gate)] {
            if part.dims() != [batch, tokens, width] {
                let rule = format!("must be [{batch}, {tokens}, lanes * width = {width}]");
                return Err(Error::Shape { op, tensor, shape: part.dims().to_vec(), rule });
            }
        }
        Ok(())
    }

    /// Computes all entries of a sequence, `[batch, 1, entries, width]` in f32. Tokens after the
    /// last whole window are ignored.
    pub(crate) fn whole(&self, op: &'static str, gated: Gated) -> Result<Option<Tensor<4>>> {
        self.check(op, &gated)?;
        let Compression { ratio, overlap } = self.compression;
        let (width, lanes) = (self.width(), self.compression.lanes());
        let [batch, tokens, _] = gated.content.dims();
        let n = self.compression.entries(tokens);
        if self.rope.positions() < n * ratio {
            let rule = format!("must have a row for each of the {tokens} tokens");
            let shape = self.rope.table().dims().to_vec();
            return Err(Error::Shape { op, tensor: "rope", shape, rule });
        }
        if n == 0 {
            return Ok(None);
        }
        let windows = |part: Tensor<3>| {
            let part = part.narrow(1, 0, n * ratio).cast(DType::F32);
            part.reshape([batch, n, ratio, lanes * width])
        };
        let content = windows(gated.content);
        let gate = windows(gated.gate) + self.position_bias.clone().unsqueeze::<4>();
        let (content, gate) = match overlap {
            false => (content, gate),
            true => (self.with_previous(content, 0.0), self.with_previous(gate, f32::NEG_INFINITY)),
        };
        // [batch, n, span, width] -> [batch, 1, n, width]
        let pooled = (activation::softmax(gate, 2) * content).sum_dim(2).swap_dims(1, 2);
        self.finish(pooled).map(Some)
    }

    /// Joins each window's own numbers with the numbers that the window before has for it; `empty`
    /// stands for the window before the first.
    fn with_previous(&self, windows: Tensor<4>, empty: f32) -> Tensor<4> {
        let (width, [batch, n, ratio, _]) = (self.width(), windows.dims());
        let own = windows.clone().narrow(3, width, width);
        let none = Tensor::full([batch, 1, ratio, width], empty, &windows.device());
        let previous = match n {
            1 => none,
            _ => Tensor::cat(vec![none, windows.narrow(1, 0, n - 1).narrow(3, 0, width)], 1),
        };
        Tensor::cat(vec![previous, own], 2)
    }

    /// Applies Hadamard transform and rounding to entries, `[batch, 1, entries, width]`.
    pub(super) fn encode(&self, entries: Tensor<4>) -> Result<Tensor<4>> {
        let entries = if self.hadamard { hadamard(entries)? } else { entries };
        Ok(match &self.rounding {
            Some(format) => format.rounded(entries),
            None => entries,
        })
    }

    /// Applies norm, rope, Hadamard transform and rounding to pooled windows from the first on.
    fn finish(&self, pooled: Tensor<4>) -> Result<Tensor<4>> {
        let [_, _, n, _] = pooled.dims();
        let rms = (pooled.clone().square().mean_dim(3) + self.epsilon).sqrt();
        let normed = pooled / rms * self.gain.clone().unsqueeze();
        let half = self.rope.rotary_dim() / 2;
        // Each entry has the rope of its window's first token.
        let table = self.rope.table().clone();
        let ratio = self.compression.ratio;
        let positions =
            Tensor::<1, Int>::arange_step(0..(n * ratio) as i64, ratio, &table.device());
        let rows: Tensor<2> = table.select(0, positions);
        let part = |first| rows.clone().narrow(1, first, half).unsqueeze();
        self.encode(rope_pairs(normed, part(0), part(half)))
    }
}

/// Compresses tokens into the entries that attention reads.
#[derive(Clone, Debug)]
pub struct EntryCompressor(pub(crate) Compressor);

impl EntryCompressor {
    /// Creates a compressor.
    ///
    /// # Shapes
    /// - `position_bias`: `[ratio, lanes * head_dim]`, see [`Compression::lanes`]
    /// - `gain`: `[head_dim]`, the gains of the norm
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a ratio of 0, and [`Error::Shape`] for tensors that do not fit.
    pub fn new(
        compression: Compression,
        position_bias: Tensor<2>,
        gain: Tensor<1>,
        epsilon: f64,
        rope: RopeTable,
    ) -> Result<Self> {
        let op = "EntryCompressor";
        Ok(Self(Compressor::new(op, compression, position_bias, gain, epsilon, rope)?))
    }

    /// Rounds entries to `format`, as models do that were trained with it. Gradients pass straight
    /// through. A cache then stores the rounded entries in its own format.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a format that does not fit the width of an entry.
    pub fn with_rounding(self, format: RowFormat) -> Result<Self> {
        Ok(Self(self.0.with_rounding("entries", format)?))
    }

    /// Computes the entries of a whole sequence, `[batch, 1, entries, head_dim]` in f32, with
    /// gradients; `None` if no window is complete.
    ///
    /// # Errors
    /// [`Error::Shape`] for projections of another width.
    pub fn compress(&self, gated: Gated) -> Result<Option<Tensor<4>>> {
        self.0.whole("EntryCompressor::compress", gated)
    }
}

/// Compresses tokens into the keys by which an indexer selects entries. It is another type than
/// [`EntryCompressor`], because its keys have another width and never reach attention.
#[derive(Clone, Debug)]
pub struct KeyCompressor(pub(crate) Compressor);

impl KeyCompressor {
    /// Creates a compressor, as [`EntryCompressor::new`] does with the indexer's head_dim. With
    /// `hadamard`, keys are multiplied by the Hadamard matrix, so that few bits lose less; queries
    /// must then be, too.
    ///
    /// # Errors
    /// Fails as [`EntryCompressor::new`] does, and for a Hadamard transform of a width that is not
    /// a power of two up to 256.
    pub fn new(
        compression: Compression,
        position_bias: Tensor<2>,
        gain: Tensor<1>,
        epsilon: f64,
        rope: RopeTable,
        hadamard: bool,
    ) -> Result<Self> {
        let op = "KeyCompressor";
        let width = gain.dims()[0];
        if hadamard && !(width.is_power_of_two() && width <= 256) {
            let rule = "must be a power of two up to 256 for a Hadamard transform";
            return Err(invalid("index_head_dim", width, rule));
        }
        let compressor = Compressor::new(op, compression, position_bias, gain, epsilon, rope)?;
        Ok(Self(Compressor { hadamard, ..compressor }))
    }

    /// Rounds keys to `format` after the Hadamard transform, as
    /// [`EntryCompressor::with_rounding`] does.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a format that does not fit the width of a key.
    pub fn with_rounding(self, format: RowFormat) -> Result<Self> {
        Ok(Self(self.0.with_rounding("index keys", format)?))
    }

    /// Computes the keys of a whole sequence, `[batch, 1, entries, index_head_dim]` in f32, with
    /// gradients; `None` if no window is complete.
    ///
    /// # Errors
    /// [`Error::Shape`] for projections of another width.
    pub fn compress(&self, gated: Gated) -> Result<Option<Tensor<4>>> {
        self.0.whole("KeyCompressor::compress", gated)
    }
}
