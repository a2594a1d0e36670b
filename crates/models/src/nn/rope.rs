//! Rotary position embedding in the half-split form of the transformers library.

use core::f64::consts::TAU;
use std::sync::{Arc, OnceLock};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_cubecl::{RopeTable, sparse::rope_pairs};

use crate::error::{Error, Result};

/// The deviation of a model's rope frequencies from `theta^(-2i / rotary_dim)`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// No deviation.
    #[default]
    Default,
    /// Position interpolation: every frequency is divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided, high ones are kept, and those between are blended.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length before scaling.
        original_max_positions: f64,
    },
    /// Phi-3 with a long context: frequencies have one of two sets of divisors, and sines and
    /// cosines are scaled (<https://arxiv.org/abs/2402.13753>).
    LongRope {
        /// The divisors in contexts of at most `original_max_positions`.
        short_factors: Vec<f32>,
        /// The divisors in longer contexts, from the first token on.
        long_factors: Vec<f32>,
        /// The context length before scaling.
        original_max_positions: usize,
        /// Multiplies sines and cosines. If all channels have rope, attention scores are multiplied
        /// by its square.
        attention_factor: f64,
    },
    /// YaRN (<https://arxiv.org/abs/2309.00071>): low frequencies are divided, high ones are kept,
    /// and those between are blended. The bounds are numbers of turns over the original context.
    /// Sines and cosines are scaled.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// Turns in `original_max_positions` above which a frequency is kept.
        beta_fast: f64,
        /// Turns in `original_max_positions` below which a frequency is divided.
        beta_slow: f64,
        /// The context length before scaling.
        original_max_positions: usize,
        /// Multiplies sines and cosines.
        attention_factor: f64,
        /// `true` if the bounds are rounded outwards to whole numbers of channel pairs.
        truncate: bool,
        /// `mscale_all_dim`, by which DeepSeek's models scale attention scores
        /// ([`score_gain`](Self::score_gain)); 0 in other models.
        score_mscale: f64,
    },
    /// Gemma 4: only the first pairs of channels have a frequency, which follows from the position
    /// of the pair in the whole head. The others have frequency 0, so their channels do not change.
    Proportional {
        /// The share of pairs that have a frequency.
        share: f64,
        /// The divisor of frequencies.
        factor: f64,
    },
    /// One divisor per frequency, as in `rope_freqs.weight` of GGUF files. In `config.json` this is
    /// `longrope` with the same factors for long and short contexts.
    Divisors(Vec<f32>),
}

impl RopeScaling {
    /// Returns the factor of attention scores in DeepSeek's models, which is 1 except for YaRN.
    pub fn score_gain(&self) -> f64 {
        match *self {
            Self::Yarn { factor, score_mscale, .. } => yarn_gain(factor, score_mscale).powi(2),
            _ => 1.0,
        }
    }

    /// Returns the scaling for a GGUF file's `divisors` of rope frequencies. Returns no scaling or
    /// Llama 3's if these have the same frequencies up to the rounding of f32, in which such files
    /// are computed, and else [`Divisors`](Self::Divisors).
    pub(crate) fn of_divisors(divisors: Vec<f32>, theta: f64) -> Self {
        /// A few units in the last place of an f32.
        const ROUNDING: f64 = 4e-6;
        /// llama.cpp's converter divides the frequencies of pairs without rope by 1e30.
        const NONE: f32 = 1e20;
        let turning = divisors.iter().take_while(|&&divisor| divisor == 1.0).count();
        if turning < divisors.len() && divisors[turning..].iter().all(|&divisor| divisor > NONE) {
            let share = turning as f64 / divisors.len() as f64;
            return Self::Proportional { share, factor: 1.0 };
        }
        let factor = f64::from(divisors.last().copied().unwrap_or(1.0));
        let inv_freq = |scaling: &Self| Rope::new(2 * divisors.len(), theta, scaling).inv_freq;
        let given = inv_freq(&Self::Divisors(divisors.clone()));
        let same = |scaling: &Self| {
            let close =
                |(a, b): (f32, &f32)| (f64::from(a) / f64::from(*b) - 1.0).abs() <= ROUNDING;
            inv_freq(scaling).into_iter().zip(&given).all(close)
        };
        // All published models use these parameters. The factor is the last divisor. The original
        // context length is unknown, so all powers of two up to 2^20 are tried.
        let llama3 = (4..=20).map(|log| Self::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: f64::from(1 << log),
        });
        let known = [Self::Default].into_iter().chain(llama3).find(same);
        known.unwrap_or(Self::Divisors(divisors))
    }
}

/// Returns YaRN's factor of sines and cosines (<https://arxiv.org/abs/2309.00071>).
pub(crate) fn yarn_gain(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

/// A rope: one frequency per pair of channels.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    inv_freq: Vec<f32>,
    /// A number of tokens, and the frequencies in longer contexts.
    long: Option<(usize, Vec<f32>)>,
    attention_factor: f32,
}

impl Rope {
    /// Computes the frequencies for the first `rotary_dim` channels of a head.
    ///
    /// # Panics
    /// Panics if `rotary_dim` is odd, or if `scaling` does not have `rotary_dim / 2` divisors. The
    /// models' configurations check both.
    pub fn new(rotary_dim: usize, theta: f64, scaling: &RopeScaling) -> Self {
        assert!(rotary_dim.is_multiple_of(2), "rotary_dim {rotary_dim} is odd");
        let n = rotary_dim / 2;
        let frequencies = |scaled: &dyn Fn(f64, usize) -> f64| -> Vec<f32> {
            (0..n).map(|i| scaled(frequency(i, rotary_dim, theta), i) as f32).collect()
        };
        let (long, attention_factor) = match scaling {
            RopeScaling::LongRope {
                short_factors,
                long_factors,
                original_max_positions,
                attention_factor,
            } => {
                assert_eq!([short_factors.len(), long_factors.len()], [n, n], "one per frequency");
                let long = frequencies(&|freq, i| freq / f64::from(long_factors[i]));
                (Some((*original_max_positions, long)), *attention_factor as f32)
            }
            RopeScaling::Divisors(divisors) => {
                assert_eq!(divisors.len(), n, "one divisor per frequency");
                (None, 1.0)
            }
            &RopeScaling::Yarn { attention_factor, .. } => (None, attention_factor as f32),
            _ => (None, 1.0),
        };
        let inv_freq = frequencies(&|freq, i| scale(freq, (i, n), theta, scaling));
        Self { inv_freq, long, attention_factor }
    }

    /// Returns the channels of a head that rope covers; the rest are unchanged.
    pub fn rotary_dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Returns the frequencies for up to `context` positions.
    fn inv_freq(&self, context: usize) -> &[f32] {
        match &self.long {
            Some((original, inv_freq)) if context > *original => inv_freq,
            _ => &self.inv_freq,
        }
    }

    /// Returns all numbers that rope depends on for up to `context` positions: the frequencies,
    /// then the factor of sines and cosines.
    pub(crate) fn numbers(&self, context: usize) -> Vec<f32> {
        [self.inv_freq(context), &[self.attention_factor]].concat()
    }

    /// Returns whether the angles of positions up to `positions`, and the factor of sines and
    /// cosines, are finite.
    pub(crate) fn is_finite(&self, positions: usize) -> bool {
        let long = self.long.iter().flat_map(|(_, inv_freq)| inv_freq);
        let mut all = self.inv_freq.iter().chain(long);
        let finite = all.all(|frequency| (frequency * positions as f32).is_finite());
        finite && self.attention_factor.is_finite()
    }

    /// Returns the rows of positions `start..start + seq`, computed once for all layers. `context`
    /// is the largest number of positions and selects the frequencies of [`RopeScaling::LongRope`].
    pub fn rows(&self, start: usize, seq: usize, context: usize, device: &Device) -> RopeRows {
        let rows = RopeRows::range(&self.table(start, seq, context, device), 0, seq);
        RopeRows { from_first: start == 0, ..rows }
    }

    /// Returns the table of positions `start..start + seq`. A cache computes it once for its
    /// capacity.
    ///
    /// Angles are rounded to f32 as in training code; sines and cosines are computed in f64.
    pub(crate) fn table(
        &self,
        start: usize,
        seq: usize,
        context: usize,
        device: &Device,
    ) -> RopeTable {
        let inv_freq = self.inv_freq(context);
        let scale = self.attention_factor;
        let half = self.inv_freq.len();
        let mut table = vec![0.0; seq * 2 * half];
        for (position, row) in (start..).zip(table.chunks_exact_mut(2 * half)) {
            let (cos, sin) = row.split_at_mut(half);
            for ((cos, sin), freq) in cos.iter_mut().zip(sin).zip(inv_freq) {
                let angle = f64::from(position as f32 * freq);
                (*cos, *sin) = (angle.cos() as f32 * scale, angle.sin() as f32 * scale);
            }
        }
        let table = TensorData::new(table, [seq, 2 * half]);
        RopeTable::new(Tensor::from_data(table, (device, DType::F32)))
            .expect("a pass has a token, and a frequency belongs to a pair of channels")
    }
}

/// Returns the pairs of `n` that have a frequency in [`RopeScaling::Proportional`].
fn turning_pairs(share: f64, n: usize) -> usize {
    // A share that was divided by `n` may be rounded down.
    (share * n as f64 + 1e-6) as usize
}

fn frequency(i: usize, rotary_dim: usize, theta: f64) -> f64 {
    theta.powf(-((2 * i) as f64) / rotary_dim as f64)
}

/// Returns the scaled frequency of pair `i` of `n`; for [`RopeScaling::LongRope`], the frequency in
/// short contexts.
fn scale(freq: f64, (i, n): (usize, usize), theta: f64, scaling: &RopeScaling) -> f64 {
    match scaling {
        RopeScaling::Default => freq,
        RopeScaling::Linear { factor } => freq / factor,
        RopeScaling::Divisors(divisors) => freq / f64::from(divisors[i]),
        RopeScaling::LongRope { short_factors, .. } => freq / f64::from(short_factors[i]),
        RopeScaling::Proportional { share, factor } => match i < turning_pairs(*share, n) {
            true => freq / factor,
            false => 0.0,
        },
        &RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_positions,
            truncate,
            ..
        } => {
            // The pair of channels with this number of turns over the original context.
            let pair = |turns: f64| {
                n as f64 * (original_max_positions as f64 / (turns * TAU)).ln() / theta.ln()
            };
            let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min((2 * n - 1) as f64));
            if low == high {
                high += 0.001;
            }
            let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            freq * (1.0 - divided + divided / factor)
        }
        &RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } => {
            let turns = original_max_positions * freq / TAU;
            let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let kept = kept.clamp(0.0, 1.0);
            freq * (kept + (1.0 - kept) / factor)
        }
    }
}

/// The rope rows of the tokens of one pass.
#[derive(Clone, Debug)]
pub struct RopeRows {
    table: RopeTable,
    /// `true` if the table's first row belongs to the first token of a sequence.
    from_first: bool,
    selection: Selection,
    /// Cosines and sines of the tokens, `[1 or batch, 1, seq, rotary_dim / 2]`. They are taken from
    /// the table on first use, once for all layers.
    rows: Arc<OnceLock<[Tensor<4>; 2]>>,
}

/// The rows of a table that a pass uses.
#[derive(Clone, Debug)]
enum Selection {
    /// The first row and the number of rows.
    Range(usize, usize),
    /// Positions on the device, `[n]`, and the tokens per sequence.
    Positions(Box<Tensor<1, Int>>, usize),
    /// No rows of the table, because they were rounded to another type.
    Rounded,
}

impl RopeRows {
    fn new(table: &RopeTable, selection: Selection) -> Self {
        Self { table: table.clone(), from_first: true, selection, rows: Arc::default() }
    }

    /// Returns the rows of `seq` positions from `start` on.
    pub(crate) fn range(table: &RopeTable, start: usize, seq: usize) -> Self {
        Self::new(table, Selection::Range(start, seq))
    }

    /// Returns the rows of positions `[n]` of `seq` tokens, for each sequence or for all. Positions
    /// outside the table are clamped to its first or last.
    pub(crate) fn at(table: &RopeTable, positions: &Tensor<1, Int>, seq: usize) -> Self {
        Self::new(table, Selection::Positions(Box::new(positions.clone()), seq))
    }

    /// Returns the table, from which a cache may apply rope to one token itself, in f32.
    pub(crate) fn table(&self) -> Option<&RopeTable> {
        match self.selection {
            Selection::Range(_, 1) | Selection::Positions(_, 1) => Some(&self.table),
            _ => None,
        }
    }

    /// Returns the table of all positions from the first token of a sequence to the newest one, or
    /// beyond. Entries of compressed tokens have the rope of earlier tokens.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for rows that were computed for later tokens only.
    pub fn all_positions(&self) -> Result<&RopeTable> {
        match self.from_first {
            true => Ok(&self.table),
            false => {
                let why = "a pass on a device with autodiff has the rope of its own tokens only";
                Err(Error::unsupported("compression of tokens in a cache", why))
            }
        }
    }

    fn cos_sin(&self) -> [Tensor<4>; 2] {
        let pick = || {
            let table = self.table.table().clone();
            let half = self.table.rotary_dim() / 2;
            let (rows, shape) = match &self.selection {
                Selection::Range(start, seq) => (table.narrow(0, *start, *seq), [1, 1, *seq, half]),
                Selection::Positions(positions, seq) => {
                    let last = self.table.positions() as i32 - 1;
                    let n = positions.dims()[0];
                    let rows = table.select(0, (**positions).clone().clamp(0, last));
                    (rows, [n / seq, 1, *seq, half])
                }
                Selection::Rounded => unreachable!("rows are picked before they are rounded"),
            };
            [0, half].map(|first| rows.clone().narrow(1, first, half).reshape(shape))
        };
        self.rows.get_or_init(pick).clone()
    }

    /// Returns the rows with cosines and sines rounded to `dtype`, for a model that computes in it.
    #[must_use]
    pub fn to_dtype(&self, dtype: DType) -> Self {
        if dtype == DType::F32 {
            return self.clone();
        }
        let rows = self.cos_sin().map(|table| table.cast(dtype));
        Self { selection: Selection::Rounded, rows: Arc::new(rows.into()), ..self.clone() }
    }

    /// Rotates channel `i` with channel `i + rotary_dim / 2` in the type of x, to which cosines and
    /// sines are rounded.
    ///
    /// # Shapes
    /// - x: `[batch, heads, seq, head_dim]`
    /// - output: `[batch, heads, seq, head_dim]`
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let _span = tracing::trace_span!(target: crate::spans::OPERATION, "rope").entered();
        let head_dim = x.dims()[3];
        let [cos, sin] = self.cos_sin().map(|table| match table.dtype() == x.dtype() {
            true => table,
            false => table.cast(x.dtype()),
        });
        let half = cos.dims()[3];
        let a = x.clone().narrow(3, 0, half);
        let b = x.clone().narrow(3, half, half);
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        let second = b * cos + a * sin;
        let mut parts = vec![first, second];
        if head_dim > 2 * half {
            parts.push(x.narrow(3, 2 * half, head_dim - 2 * half));
        }
        Tensor::cat(parts, 3)
    }

    /// Rotates the last channels in neighboring pairs, as DeepSeek orders them, in f32.
    ///
    /// # Shapes
    /// - x: `[batch, heads, seq, head_dim]`, with at least rotary_dim channels
    /// - output: the same, in the type of x
    pub fn apply_pairs(&self, x: Tensor<4>) -> Tensor<4> {
        self.pairs(x, false)
    }

    /// Undoes [`apply_pairs`](Self::apply_pairs).
    pub fn undo_pairs(&self, x: Tensor<4>) -> Tensor<4> {
        self.pairs(x, true)
    }

    fn pairs(&self, x: Tensor<4>, undo: bool) -> Tensor<4> {
        let _span = tracing::trace_span!(target: crate::spans::OPERATION, "rope").entered();
        let dtype = x.dtype();
        let [cos, sin] = self.cos_sin().map(|table| table.cast(DType::F32));
        let sin = if undo { sin.neg() } else { sin };
        rope_pairs(x.cast(DType::F32), cos, sin).cast(dtype)
    }
}
