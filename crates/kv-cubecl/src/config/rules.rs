//! The rules for valid configurations.

use super::{KvCacheConfig, default_residual, is_per_token};
use crate::{
    CacheShape, Result,
    error::invalid,
    formats::KvFormat,
    sides::{Side, Sides},
};

/// The most channels of a head that [`hadamard`](crate::hadamard) supports.
const MAX_HADAMARD: usize = 256;

/// Returns whether groups of this size fill whole words, if the format has groups to choose.
const fn fills_words(format: KvFormat, group_size: usize) -> bool {
    !format.is_grouped() || (group_size * format.n_bits() as usize).is_multiple_of(32)
}

impl KvCacheConfig {
    /// Returns whether the residual must hold a token. It may be empty if each token is quantized
    /// by itself.
    const fn needs_residual(&self) -> bool {
        default_residual(self.keys, self.values) > 0
    }

    /// Returns whether the formats allow this group size for some head_dim.
    pub(super) const fn fits_group(&self) -> bool {
        match self.needs_residual() {
            true => {
                self.group_size > 0
                    && fills_words(self.keys, self.group_size)
                    && fills_words(self.values, self.group_size)
                    && !(self.keys.is_grouped()
                        && self.values.is_tiled()
                        && !self.tile.tokens.is_multiple_of(self.group_size))
            }
            false => self.group_size == Self::new(self.keys, self.values).group_size,
        }
    }

    /// Returns whether formats, group size and sliding window allow this residual length.
    pub(super) const fn fits_residual(&self) -> bool {
        let hidden = match self.sliding_window {
            Some(window) => self.is_quantized() && window < self.residual_length,
            None => false,
        };
        let whole = match self.block_tokens() {
            0 => false,
            1 => true,
            block if self.flush.is_by_group() => self.residual_length >= block,
            block => self.residual_length.is_multiple_of(block),
        };
        (self.residual_length > 0 || !self.needs_residual()) && whole && !hidden
    }

    /// Checks every rule that does not depend on a device.
    ///
    /// `head_dim` is the number of channels of a head: one for both sides, or one for each.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field, its value and the
    /// rule.
    pub fn validate(&self, head_dim: impl Into<Sides<usize>>) -> Result<()> {
        let Self { group_size, residual_length, .. } = *self;
        let head_dim = head_dim.into();
        if head_dim.into_array().contains(&0) {
            return Err(invalid("head_dim", 0, "must be at least 1"));
        }
        if self.capacity == 0 {
            return Err(invalid("capacity", self.capacity, "must be at least 1 token"));
        }
        // Kernels address tokens, ring slots and words with u32.
        if self.capacity > 1 << 24 {
            return Err(invalid("capacity", self.capacity, "must be at most 16777216 tokens"));
        }
        // The layout reads these fields for float caches too.
        for (field, value, least) in [
            ("group_size", group_size, 1),
            ("residual_length", residual_length, usize::from(self.needs_residual())),
            ("sink_tokens", self.sink_tokens, 0),
        ] {
            if value < least {
                return Err(invalid(field, value, format!("must be at least {least}")));
            }
            if value > 1 << 20 {
                return Err(invalid(field, value, "must be at most 1048576"));
            }
        }
        self.validate_sliding_window(head_dim)?;
        for side in Side::BOTH {
            self.format(side).validate(side, head_dim[side], self.group_options(side))?;
        }
        self.validate_tiles()?;
        self.validate_groups(head_dim)?;
        self.validate_hadamard(head_dim)
    }

    /// Checks every rule that does not depend on a device, for a cache of this shape.
    ///
    /// # Errors
    /// Fails as [`validate`](Self::validate) does. If values are channels of keys, only the format
    /// of keys matters, and must not need a Hadamard transform, which would mix these channels with
    /// the others.
    pub fn validate_shape(&self, shape: CacheShape) -> Result<()> {
        let Sides { keys: width, values } = shape.head_dim;
        if !shape.shares_values {
            return self.validate(shape.head_dim);
        }
        if values == 0 || values > width {
            let rule = format!("values are channels of keys: must be 1 to {width}");
            return Err(invalid("head_dim", values, rule));
        }
        let keys = self.with_shared_values();
        if keys.uses_hadamard_keys() {
            let rule = "values are channels of keys, which a Hadamard transform would mix with \
                        others; try k4v4 or kint8vint8";
            return Err(match self.hadamard_keys {
                true => invalid("hadamard_keys", true, rule),
                false => invalid("key_format", keys.keys, format!("needs a transform: {rule}")),
            });
        }
        Self { values: KvFormat::Float, ..keys }.validate(width)
    }

    fn validate_sliding_window(&self, head_dim: Sides<usize>) -> Result<()> {
        let Some(window) = self.sliding_window else { return Ok(()) };
        let fail = |rule: String| Err(invalid("sliding_window", window, rule));
        if window == 0 || window > 1 << 24 {
            return fail("must be 1 to 16777216 tokens".to_string());
        }
        if self.is_quantized() && window < self.residual_length {
            // All visible tokens would be in float, and no quantized token would ever be read.
            let (length, remedy) = (self.residual_length, self.within(window, head_dim));
            return fail(format!("must be at least residual_length {length}; try {remedy}"));
        }
        if self.sink_tokens > window {
            let rule = format!("must be at most sliding_window {window}");
            return Err(invalid("sink_tokens", self.sink_tokens, rule));
        }
        Ok(())
    }

    /// Returns the options of a short name that make the residual fit into a sliding window, or the
    /// name of a cache without a residual.
    fn within(&self, window: usize, head_dim: Sides<usize>) -> String {
        let groups = [self.group_size, 64, 32, 16, 8, 4];
        let fitting = groups.into_iter().find_map(|group_size| {
            let cache = self.with_group_size(group_size);
            let length = window - window % cache.block_tokens().max(1);
            cache
                .with_residual_length(length)
                .validate(head_dim)
                .is_ok()
                .then_some((group_size, length))
        });
        match fitting {
            Some((group_size, length)) if group_size == self.group_size => format!("-r{length}"),
            Some((group_size, length)) => format!("-g{group_size}-r{length}"),
            None => "kint8vint8".into(),
        }
    }

    fn validate_tiles(&self) -> Result<()> {
        let Self { tile, group_size, .. } = *self;
        // The layout reads the tile of every cache.
        tile.validate()?;
        if self.stagger && !(self.has_tiles() && self.flush.is_by_group()) {
            let rule = "needs keys or values in tiles that are flushed by group, as in \
                        kvn2vvn2-gflush";
            return Err(invalid("stagger", true, rule));
        }
        if !self.has_tiles() {
            return Ok(());
        }
        self.validate_residual("tile.tokens", tile.tokens)?;
        if self.keys.is_grouped() && !tile.tokens.is_multiple_of(group_size) {
            let rule = format!("must divide the tiles of values, {} tokens", tile.tokens);
            return Err(invalid("group_size", group_size, rule));
        }
        Ok(())
    }

    /// Checks that the residual is a multiple of the group; with flush by group, at least one
    /// group.
    fn validate_residual(&self, groups: &str, tokens: usize) -> Result<()> {
        let length = self.residual_length;
        let rule = match self.flush.is_by_group() {
            true if length < tokens => format!("must be at least {groups} {tokens}"),
            false if !length.is_multiple_of(tokens) => {
                format!("{groups} {tokens} does not divide it; try -gflush or -r{tokens}")
            }
            _ => return Ok(()),
        };
        Err(invalid("residual_length", length, rule))
    }

    fn validate_groups(&self, head_dim: Sides<usize>) -> Result<()> {
        let Self { keys, values, group_size, .. } = *self;
        if keys.is_grouped() {
            self.validate_residual("group_size", group_size)?;
        }
        if values.is_grouped() && !head_dim.values.is_multiple_of(group_size) {
            let rule = format!("does not divide head_dim {}", head_dim.values);
            return Err(invalid("group_size", group_size, rule));
        }
        if !self.needs_residual() && group_size != Self::new(keys, values).group_size {
            let default = Self::new(keys, values).group_size;
            let rule = format!("must stay {default}, as k{keys}v{values} has groups of fixed size");
            return Err(invalid("group_size", group_size, rule));
        }
        if self.flush.is_by_group() && is_per_token(keys) {
            let rule = format!("keys as {keys} leave the residual one by one; try before or after");
            return Err(invalid("flush", "group", rule));
        }
        Ok(())
    }

    fn validate_hadamard(&self, head_dim: Sides<usize>) -> Result<()> {
        if self.uses_hadamard_keys() && self.keys.is_grouped() {
            let rule = format!(
                "keys as {} are quantized per channel, where spreading an outlier channel over \
                 the others only adds error",
                self.keys
            );
            return Err(invalid("hadamard_keys", true, rule));
        }
        for (field, side) in [("hadamard_values", Side::Values), ("hadamard_keys", Side::Keys)] {
            let channels = head_dim[side];
            let misfit = match channels.is_power_of_two() {
                false => "is not a power of two",
                true if channels > MAX_HADAMARD => "is above 256",
                true => continue,
            };
            let format = self.format(side);
            if format.needs_hadamard() {
                let rule =
                    format!("{misfit}, which {side} as {format} need for a Hadamard transform");
                return Err(invalid("head_dim", channels, rule));
            }
            if self.uses_hadamard(side) {
                let rule = format!("head_dim {channels} of {side} {misfit}");
                return Err(invalid(field, true, rule));
            }
        }
        Ok(())
    }
}
