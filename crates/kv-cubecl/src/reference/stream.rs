//! The streaming cache, literally: Algorithm 1 of the KIVI paper and the authors' released code.

use std::collections::VecDeque;

use super::{
    attention::attend_row,
    formats::{fake_quantize_group, row_group},
    hadamard::hadamard,
};
use crate::{CacheFloat, CacheShape, KvCacheConfig, KvFormat, QuantizedCounts, Side, Sides};

/// One token of one (batch, kv head).
#[derive(Clone, Debug)]
struct Token {
    /// Key and value, rounded to the float type of the cache.
    key: Vec<f32>,
    value: Vec<f32>,
    /// Key and value as queries see them: the same numbers, or what the quantizer restores.
    seen_key: Vec<f64>,
    seen_value: Vec<f64>,
    key_quantized: bool,
    value_quantized: bool,
}

/// The cache of one (batch, kv head).
#[derive(Clone, Debug, Default)]
pub struct Lane {
    tokens: Vec<Token>,
    /// Tokens past the sinks whose key is in float; the window fills up and is flushed as a whole,
    /// or by its first group if it slides; or it slides as that of values, where each key is
    /// quantized by itself.
    key_residual: Vec<usize>,
    /// Tokens past the sinks whose value is in float; the window slides.
    value_residual: VecDeque<usize>,
}

impl Lane {
    fn push(&mut self, config: &KvCacheConfig, key: &[f32], value: &[f32]) {
        let transformed = |row: &[f32], side| {
            if uses_hadamard(config, side) { hadamard(row) } else { row.to_vec() }
        };
        let (key, value) = (transformed(key, Side::Keys), transformed(value, Side::Values));
        let (key, value) = (stored(&key, config.float), stored(&value, config.float));
        let new = self.tokens.len();
        self.tokens.push(Token {
            seen_key: seen(&key, config, Side::Keys),
            seen_value: seen(&value, config, Side::Values),
            key,
            value,
            key_quantized: false,
            value_quantized: false,
        });
        if new >= config.sink_tokens {
            self.key_residual.push(new);
            self.value_residual.push_back(new);
        }
    }

    /// Quantizes what has left the windows.
    fn flush(&mut self, config: &KvCacheConfig) {
        let head_dim = self.tokens.last().map_or(1, |token| token.key.len());
        let in_rows = row_group(config.keys, false, head_dim, config.group_size);
        let window = self.key_residual.len();
        match in_rows {
            Some(group) if window > config.residual_length => {
                let token = &mut self.tokens[self.key_residual.remove(0)];
                let key = restored(&token.key, config.keys, group);
                token.seen_key = seen(&key, config, Side::Keys);
                token.key_quantized = true;
            }
            None if config.keys != KvFormat::Float && window == config.residual_length => {
                let leaving = if config.flush.is_by_group() {
                    config.group_size
                } else {
                    config.residual_length
                };
                let residual: Vec<usize> = self.key_residual.drain(..leaving).collect();
                for group in residual.chunks(config.group_size) {
                    self.quantize_keys(group, config.keys);
                }
            }
            _ => {}
        }
        let head_dim = self.tokens.last().map_or(1, |token| token.value.len());
        if let Some(group) = row_group(config.values, true, head_dim, config.group_size)
            && self.value_residual.len() > config.residual_length
            && let Some(oldest) = self.value_residual.pop_front()
        {
            let token = &mut self.tokens[oldest];
            let value = restored(&token.value, config.values, group);
            token.seen_value = seen(&value, config, Side::Values);
            token.value_quantized = true;
        }
    }

    /// Quantizes the keys of the tokens in `group`, each channel a group of its own.
    fn quantize_keys(&mut self, group: &[usize], format: KvFormat) {
        for channel in 0..self.tokens[group[0]].key.len() {
            let column: Vec<f32> = group.iter().map(|&t| self.tokens[t].key[channel]).collect();
            let restored = fake_quantize_group(&column, format);
            for (&token, restored) in group.iter().zip(restored) {
                self.tokens[token].seen_key[channel] = f64::from(restored);
            }
        }
        for &token in group {
            self.tokens[token].key_quantized = true;
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
        tokens.iter().map(|&token| self.tokens[token].seen_key.as_slice()).collect()
    }

    /// Values of some tokens as a query sees them now.
    pub fn values(&self, tokens: &[usize]) -> Vec<&[f64]> {
        tokens.iter().map(|&token| self.tokens[token].seen_value.as_slice()).collect()
    }

    /// Returns whether the key and the value of a token are quantized now.
    pub fn quantized(&self, token: usize) -> (bool, bool) {
        (self.tokens[token].key_quantized, self.tokens[token].value_quantized)
    }

    /// Quantized tokens, counted one by one.
    pub fn counts(&self) -> QuantizedCounts {
        QuantizedCounts {
            keys: self.tokens.iter().filter(|token| token.key_quantized).count(),
            values: self.tokens.iter().filter(|token| token.value_quantized).count(),
        }
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
        Side::Keys => config.hadamard_keys && config.keys != KvFormat::Float,
        Side::Values => config.hadamard_values && config.values != KvFormat::Float,
    }
}

/// Quantizes and restores a row in groups of `group` channels.
pub(super) fn restored(row: &[f32], format: KvFormat, group: usize) -> Vec<f32> {
    row.chunks(group).flat_map(|group| fake_quantize_group(group, format)).collect()
}

/// Returns a stored row as queries see it, in f64, after undoing the Hadamard transform.
fn seen(row: &[f32], config: &KvCacheConfig, side: Side) -> Vec<f64> {
    if uses_hadamard(config, side) { hadamard(&to_f64(row)) } else { to_f64(row) }
}
