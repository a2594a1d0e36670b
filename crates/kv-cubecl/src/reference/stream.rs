//! The streaming cache, literally: Algorithm 1 of the KIVI paper and the authors' released code.

use std::collections::VecDeque;

use super::{
    attention::attend_row,
    formats::{fake_quantize_group, row_group},
    hadamard::hadamard,
    lloyd_max,
    tensor::{fake_quantize_side, tile_options},
};
use crate::{
    CacheFloat, CacheShape, GroupRange, KvCacheConfig, KvFormat, QuantizedCounts, Side, Sides,
};

/// One token of one (batch, kv head).
#[derive(Clone, Debug)]
struct Token {
    /// Key and value, rounded to the float type of the cache.
    rows: Sides<Vec<f32>>,
    /// Key and value as queries see them: the same numbers, or what the quantizer restores.
    seen: Sides<Vec<f64>>,
    quantized: Sides<bool>,
}

/// The cache of one (batch, kv head).
#[derive(Clone, Debug, Default)]
pub struct Lane {
    tokens: Vec<Token>,
    /// Tokens past the sinks that are in float. Of a side that is quantized token by token, the
    /// window slides. Otherwise it fills up and is flushed as a whole, or by its first block.
    residual: Sides<VecDeque<usize>>,
}

impl Lane {
    fn push(&mut self, config: &KvCacheConfig, key: &[f32], value: &[f32]) {
        let transformed = |row: &[f32], side| {
            if uses_hadamard(config, side) { hadamard(row) } else { row.to_vec() }
        };
        let given = Sides { keys: key, values: value };
        let rows = Sides::from_fn(|side| stored(&transformed(given[side], side), config.float));
        let seen = Sides::from_fn(|side| seen(&rows[side], config, side));
        let new = self.tokens.len();
        self.tokens.push(Token { rows, seen, quantized: Sides::from(false) });
        if new >= config.sink_tokens {
            Side::BOTH.into_iter().for_each(|side| self.residual[side].push_back(new));
        }
    }

    /// Quantizes what has left the windows.
    fn flush(&mut self, config: &KvCacheConfig) {
        for side in Side::BOTH {
            if config.format(side) == KvFormat::Float {
                continue;
            }
            let (unit, length) = (quantized_together(config, side), config.residual_length);
            let leaving = match self.residual[side].len() {
                n if unit == 1 && n > length => 1,
                n if unit > 1 && n == length && config.flush.is_by_group() => unit,
                n if unit > 1 && n == length => length,
                _ => 0,
            };
            let leaving: Vec<usize> = self.residual[side].drain(..leaving).collect();
            for block in leaving.chunks(unit) {
                self.quantize(block, side, config);
            }
        }
    }

    /// Quantizes the rows of the tokens in `block` together.
    fn quantize(&mut self, block: &[usize], side: Side, config: &KvCacheConfig) {
        let rows = block.iter().flat_map(|&token| self.tokens[token].rows[side].clone());
        let rows: Vec<f32> = rows.collect();
        let head_dim = rows.len() / block.len();
        let shape = [1, 1, block.len(), head_dim];
        let restored = fake_quantize_side(&rows, shape, side, config);
        for (&token, row) in block.iter().zip(restored.chunks(head_dim)) {
            self.tokens[token].seen[side] = seen(row, config, side);
            self.tokens[token].quantized[side] = true;
        }
    }

    /// The tokens that the query of the newest one sees: the sinks and those of the window.
    pub fn seen(&self, config: &KvCacheConfig) -> Vec<usize> {
        let newest = self.tokens.len() - 1;
        let in_window = |t: usize| config.sliding_window.is_none_or(|window| t + window > newest);
        (0..=newest).filter(|&t| t < config.sink_tokens || in_window(t)).collect()
    }

    /// Keys of some tokens as a query sees them now.
    pub fn keys(&self, tokens: &[usize]) -> Vec<&[f64]> {
        tokens.iter().map(|&token| self.tokens[token].seen.keys.as_slice()).collect()
    }

    /// Values of some tokens as a query sees them now.
    pub fn values(&self, tokens: &[usize]) -> Vec<&[f64]> {
        tokens.iter().map(|&token| self.tokens[token].seen.values.as_slice()).collect()
    }

    /// Returns whether the key and the value of a token are quantized now.
    pub fn quantized(&self, token: usize) -> (bool, bool) {
        (self.tokens[token].quantized.keys, self.tokens[token].quantized.values)
    }

    /// Quantized tokens, counted one by one.
    pub fn counts(&self) -> QuantizedCounts {
        Sides::from_fn(|side| self.tokens.iter().filter(|token| token.quantized[side]).count())
    }
}

/// A streaming cache as a list of tokens.
#[derive(Clone, Debug)]
pub struct StreamOracle {
    config: KvCacheConfig,
    shape: CacheShape,
    lanes: Vec<Lane>,
}

impl StreamOracle {
    /// An empty cache; the capacity of `config` is not enforced.
    pub fn new(config: &KvCacheConfig, shape: CacheShape) -> Self {
        let lanes = vec![Lane::default(); shape.batch * shape.n_kv_heads];
        Self { config: *config, shape, lanes }
    }

    /// Appends one token (`key` and `value` are `[batch, n_kv_heads, head_dim]`, each with its
    /// own), calls `see` with the lanes, batch by batch, as the query of this token finds them, and
    /// returns what `see` returns.
    pub fn step_with<T>(
        &mut self,
        key: &[f32],
        value: &[f32],
        see: impl FnOnce(&[Lane]) -> T,
    ) -> T {
        let Sides { keys, values } = self.shape.head_dim;
        let rows = key.chunks(keys).zip(value.chunks(values));
        for (lane, (key, value)) in self.lanes.iter_mut().zip(rows) {
            lane.push(&self.config, key, value);
            if !self.config.flush.is_after() {
                lane.flush(&self.config);
            }
        }
        let seen = see(&self.lanes);
        if self.config.flush.is_after() {
            self.lanes.iter_mut().for_each(|lane| lane.flush(&self.config));
        }
        seen
    }

    /// Appends one token and returns how many its query sees quantized.
    pub fn append(&mut self, key: &[f32], value: &[f32]) -> QuantizedCounts {
        self.step_with(key, value, |lanes| lanes[0].counts())
    }

    /// Appends one token and attends with `query` `[batch, n_heads, head_dim]`; returns the output,
    /// `[batch, n_heads, head_dim]` with the channels of a value, and how many tokens the query saw
    /// quantized.
    pub fn step(
        &mut self,
        query: &[f32],
        key: &[f32],
        value: &[f32],
    ) -> (Vec<f64>, QuantizedCounts) {
        let head_dim = self.shape.head_dim.keys;
        let heads_per_lane = query.len() / head_dim / self.lanes.len();
        let config = self.config;
        self.step_with(key, value, |lanes| {
            let rows = query.chunks(head_dim).enumerate();
            let output = rows.flat_map(|(head, row)| {
                let lane = &lanes[head / heads_per_lane];
                let seen = lane.seen(&config);
                attend_row(&to_f64(row), &lane.keys(&seen), &lane.values(&seen))
            });
            (output.collect(), lanes[0].counts())
        })
    }
}

/// `x` rounded to the float type of a cache.
pub(super) fn stored(x: &[f32], float: CacheFloat) -> Vec<f32> {
    x.iter().map(|&x| float.round(x)).collect()
}

pub(super) fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Returns whether a side is stored after the Hadamard transform.
pub(super) fn uses_hadamard(config: &KvCacheConfig, side: Side) -> bool {
    match side {
        _ if tile_options(config, side, 1).is_some() => true,
        _ if lloyd_max::levels(config.format(side)).is_some() => true,
        Side::Keys => config.hadamard_keys && config.keys != KvFormat::Float,
        Side::Values => config.hadamard_values && config.values != KvFormat::Float,
    }
}

/// Returns the number of tokens that are quantized together.
pub(super) fn quantized_together(config: &KvCacheConfig, side: Side) -> usize {
    let tile = tile_options(config, side, 1).map(|options| options.tile.tokens);
    let rows = row_group(config.format(side), side == Side::Values, 1, 1).map(|_| 1);
    tile.or(rows).unwrap_or(config.group_size)
}

/// Quantizes and restores a row in groups of `group` channels.
pub(super) fn restored(row: &[f32], format: KvFormat, group: usize) -> Vec<f32> {
    let restored = |group| fake_quantize_group(group, format, GroupRange::MinMax);
    row.chunks(group).flat_map(restored).collect()
}

/// Returns a stored row as queries see it, in f64, after undoing the Hadamard transform.
fn seen(row: &[f32], config: &KvCacheConfig, side: Side) -> Vec<f64> {
    if uses_hadamard(config, side) { hadamard(&to_f64(row)) } else { to_f64(row) }
}
