//! What a cache stores and when it quantizes: [`KvCacheConfig`].

use core::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    Bits, CacheFloat, Error, Result, Side, SideFormat, Sides, error::invalid, nearest::nearest,
};

/// When tokens that leave the residual window are quantized, relative to the query at that step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// Algorithm 1 of the KIVI paper: quantization comes first, so a token's query already sees in
    /// quantized form what its own token pushed out of the window.
    #[default]
    #[serde(rename = "before")]
    BeforeAttention,
    /// The KIVI authors' released code: attention comes first, so a token's query still sees in
    /// float what its own token pushes out of the window.
    #[serde(rename = "after")]
    AfterAttention,
}

/// What a cache stores: a format for the keys and one for the values, and recent tokens in float.
///
/// [`kivi`](Self::kivi) is the cache of KIVI (Liu et al., 2024, <https://arxiv.org/abs/2402.02750>): keys quantized
/// per channel in groups of tokens, values per token in groups of channels, and a window of recent tokens in float.
/// [Other formats](SideFormat) quantize each token by itself and need no window.
///
/// The same configuration drives streaming inference ([`KvCache`](crate::KvCache)) and the parallel
/// closed form used for evaluation and training
/// ([`streaming_attention`](crate::streaming_attention)).
///
/// It is parsed from and printed as a short name: `float`, `k4v4`, `k4v2-g64-r32-s4`,
/// `k2v2-after-slide-f16`, `kint8vint8`, `k16vint8-r64`.
///
/// ```
/// use kv_cubecl::{Flush, KvCacheConfig, SideFormat};
///
/// let config: KvCacheConfig = "k4v2-g64-r64-s4-after".parse()?;
/// assert_eq!(config.keys, SideFormat::Affine4);
/// assert_eq!(config.flush, Flush::AfterAttention);
/// assert!(config.validate(96).is_err()); // 64 does not divide head_dim 96
/// # Ok::<(), kv_cubecl::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct KvCacheConfig {
    /// How keys are stored. In files it is `key_bits`, a number of bits or a name.
    #[serde(rename = "key_bits")]
    pub keys: SideFormat,
    /// How values are stored. In files it is `value_bits`.
    #[serde(rename = "value_bits")]
    pub values: SideFormat,
    /// Elements that share one scale and minimum in KIVI's formats: tokens for keys, channels for values.
    pub group_size: usize,
    /// Length of the float residual window in tokens; 0 where both sides are quantized token by token.
    pub residual_length: usize,
    /// When tokens leaving the window are quantized.
    pub flush: Flush,
    /// Number of first tokens that stay in float for good and never enter the window.
    pub sink_tokens: usize,
    /// Tokens a streaming cache is allocated for. The closed form does not read it.
    pub capacity: usize,
    /// Storage type of what stays in float.
    pub float: CacheFloat,
    /// Whether keys leave the window a group at a time, as soon as it is full, instead of all at once:
    /// `residual_length - group_size` to `residual_length - 1` of them stay in float, in the same memory.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sliding: bool,
    /// Whether values are multiplied by a Hadamard matrix over head_dim before they are quantized, which
    /// spreads outliers of a channel over all; outputs are turned back. Without effect on float values.
    #[serde(default, skip_serializing_if = "is_false")]
    pub rotate_values: bool,
    /// Whether keys, and queries as they attend, are multiplied by a Hadamard matrix over head_dim before keys are
    /// quantized, which spreads outliers of a channel over all and leaves scores as they are. For formats that quantize
    /// each key by itself; without effect on float keys.
    #[serde(default, skip_serializing_if = "is_false")]
    pub rotate_keys: bool,
    /// Recent tokens that a query sees, its own among them, beside the sinks: of a window of W tokens the query of
    /// token t sees tokens `t - W + 1` to `t`. A cache keeps no others, so that its memory is that of the window,
    /// whatever the capacity. `None` for all tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl KvCacheConfig {
    /// KIVI with the paper's group size 32 and residual length 128, capacity 4096, f32 window.
    pub const fn kivi(key_bits: Bits, value_bits: Bits) -> Self {
        Self::stored(SideFormat::of(key_bits), SideFormat::of(value_bits))
    }

    /// A cache of keys and values in these formats, capacity 4096, with what is in float in f32. With a format of
    /// KIVI's on either side it has the paper's group size 32 and residual length 128; where each token is
    /// quantized by itself, no residual window.
    pub const fn stored(keys: SideFormat, values: SideFormat) -> Self {
        Self {
            keys,
            values,
            group_size: 32,
            residual_length: default_residual(keys, values),
            flush: Flush::BeforeAttention,
            sink_tokens: 0,
            capacity: 4096,
            float: CacheFloat::F32,
            sliding: false,
            rotate_values: false,
            rotate_keys: false,
            window: None,
        }
    }

    /// A cache that quantizes nothing.
    pub const fn float() -> Self {
        Self::kivi(Bits::Float, Bits::Float)
    }

    /// Sets the bits of keys and of values, in KIVI's formats.
    pub const fn with_bits(self, key_bits: Bits, value_bits: Bits) -> Self {
        self.with_formats(SideFormat::of(key_bits), SideFormat::of(value_bits))
    }

    /// Sets the formats of keys and of values. What suited the formats before and not these is set anew, so that a
    /// configuration that is valid stays so, where head_dim allows it and a window has room for a group: keys that become
    /// KIVI's are not rotated any more, and keys that are then quantized one by one do not slide; the group size becomes
    /// that of [`stored`](Self::stored), and so does the residual length, or as much of it as whole groups and the window
    /// allow. What was wrong before is left as it is.
    pub const fn with_formats(mut self, keys: SideFormat, values: SideFormat) -> Self {
        let (before, own) = (self, Self::stored(keys, values));
        self.keys = keys;
        self.values = values;
        if keys.is_grouped() && !before.keys.is_grouped() {
            self.rotate_keys = false;
        }
        if by_token(keys) && !by_token(before.keys) {
            self.sliding = false;
        }
        if before.fits_group() && !self.fits_group() {
            self.group_size = own.group_size;
        }
        if before.fits_residual() && !self.fits_residual() {
            let most = match self.window {
                Some(window) if window < own.residual_length => window,
                _ => own.residual_length,
            };
            let group = self.group_size;
            self.residual_length = match keys.is_grouped() {
                true if group > 0 && most >= group => most - most % group,
                true => group,
                false => most,
            };
        }
        self
    }

    /// The format of a side.
    pub const fn format(&self, side: Side) -> SideFormat {
        match side {
            Side::Keys => self.keys,
            Side::Values => self.values,
        }
    }

    /// Sets the group size.
    pub const fn with_group_size(mut self, group_size: usize) -> Self {
        self.group_size = group_size;
        self
    }

    /// Sets the residual length in tokens.
    pub const fn with_residual_length(mut self, residual_length: usize) -> Self {
        self.residual_length = residual_length;
        self
    }

    /// Sets the flush order.
    pub const fn with_flush(mut self, flush: Flush) -> Self {
        self.flush = flush;
        self
    }

    /// Sets the number of sink tokens.
    pub const fn with_sink_tokens(mut self, sink_tokens: usize) -> Self {
        self.sink_tokens = sink_tokens;
        self
    }

    /// Sets the capacity in tokens.
    pub const fn with_capacity(mut self, capacity: usize) -> Self {
        self.capacity = capacity;
        self
    }

    /// Sets the storage type of what stays in float.
    pub const fn with_float(mut self, float: CacheFloat) -> Self {
        self.float = float;
        self
    }

    /// Sets whether keys leave the window a group at a time.
    pub const fn with_sliding(mut self, sliding: bool) -> Self {
        self.sliding = sliding;
        self
    }

    /// Sets whether values are rotated before they are quantized.
    pub const fn with_rotate_values(mut self, rotate_values: bool) -> Self {
        self.rotate_values = rotate_values;
        self
    }

    /// Sets whether keys are rotated before they are quantized.
    pub const fn with_rotate_keys(mut self, rotate_keys: bool) -> Self {
        self.rotate_keys = rotate_keys;
        self
    }

    /// Sets how many recent tokens a query sees; `None` for all.
    pub const fn with_window(mut self, window: Option<usize>) -> Self {
        self.window = window;
        self
    }

    /// Whether values are stored rotated.
    pub const fn rotates_values(&self) -> bool {
        self.rotate_values && self.values.is_quantized()
    }

    /// Whether keys are stored rotated.
    pub const fn rotates_keys(&self) -> bool {
        self.rotate_keys && self.keys.is_quantized()
    }

    /// Whether a side is stored rotated.
    pub const fn rotates(&self, side: Side) -> bool {
        match side {
            Side::Keys => self.rotates_keys(),
            Side::Values => self.rotates_values(),
        }
    }

    /// Whether either side is quantized.
    pub const fn is_quantized(&self) -> bool {
        self.keys.is_quantized() || self.values.is_quantized()
    }

    /// Whether a side has groups of the group size.
    pub const fn is_grouped(&self) -> bool {
        self.keys.is_grouped() || self.values.is_grouped()
    }

    /// Whether recent tokens stay in float in any case: unless each token is quantized by itself.
    const fn needs_residual(&self) -> bool {
        default_residual(self.keys, self.values) > 0
    }

    /// Whether the formats may have groups of this size, whatever the head_dim.
    const fn fits_group(&self) -> bool {
        match self.needs_residual() {
            true => {
                self.group_size > 0
                    && fills_words(self.keys, self.group_size)
                    && fills_words(self.values, self.group_size)
            }
            false => self.group_size == Self::stored(self.keys, self.values).group_size,
        }
    }

    /// Whether the formats may have a residual window of this length, in groups and a window of these sizes.
    const fn fits_residual(&self) -> bool {
        let hidden = match self.window {
            Some(window) => self.is_quantized() && window < self.residual_length,
            None => false,
        };
        let whole = !self.keys.is_grouped() || self.residual_length.is_multiple_of(self.group_size);
        (self.residual_length > 0 || !self.needs_residual()) && whole && !hidden
    }

    /// Checks every rule that does not depend on a device, for heads of so many channels: one number, or
    /// one for keys and one for values.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field, its value and the rule.
    pub fn validate(&self, head_dim: impl Into<Sides<usize>>) -> Result<()> {
        let Self { group_size, residual_length, .. } = *self;
        let head_dim = head_dim.into();
        if head_dim.into_array().contains(&0) {
            return Err(invalid("head_dim", 0, "must be at least 1"));
        }
        if self.capacity == 0 {
            return Err(invalid("capacity", self.capacity, "must be at least 1 token"));
        }
        // A bound for kernels that address tokens, ring slots and words with u32.
        if self.capacity > 1 << 24 {
            return Err(invalid("capacity", self.capacity, "must be at most 16777216 tokens"));
        }
        // Float caches are checked as well, because their layout reads these fields too.
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
        self.validate_window()?;
        for side in Side::BOTH {
            self.format(side).validate(side, head_dim[side], group_size)?;
        }
        self.validate_groups(head_dim)?;
        if self.rotates_keys() && self.keys.is_grouped() {
            let rule = format!(
                "keys as {} are quantized per channel, where one that stands out costs nothing until it is spread",
                self.keys
            );
            return Err(invalid("rotate_keys", true, rule));
        }
        for (field, side) in [("rotate_values", Side::Values), ("rotate_keys", Side::Keys)] {
            let channels = head_dim[side];
            if self.rotates(side) && !channels.is_power_of_two() {
                let rule = format!("head_dim {channels} of {side} is not a power of two");
                return Err(invalid(field, true, rule));
            }
            if self.rotates(side) && channels > MOST_ROTATED {
                let rule = format!(
                    "head_dim {channels} of {side} is above {MOST_ROTATED}, the most that is rotated"
                );
                return Err(invalid(field, true, rule));
            }
        }
        Ok(())
    }
}

/// The most channels of a head that [`rotate`](crate::rotate) takes.
const MOST_ROTATED: usize = 256;

/// Whether tokens of a side are quantized, each by itself even as keys.
const fn by_token(format: SideFormat) -> bool {
    format.is_quantized() && !format.is_grouped()
}

/// Whether groups of this size fill whole words of codes, where a format has such groups.
const fn fills_words(format: SideFormat, group_size: usize) -> bool {
    !format.is_grouped() || group_size.is_multiple_of(32 / format.n_bits() as usize)
}

/// The residual length of a cache that says none: KIVI's, or none where each token is quantized by itself.
const fn default_residual(keys: SideFormat, values: SideFormat) -> usize {
    let quantized = keys.is_quantized() || values.is_quantized();
    if quantized && !keys.is_grouped() && !values.is_grouped() { 0 } else { 128 }
}

impl KvCacheConfig {
    /// The rules of groups of the configuration's size.
    fn validate_groups(&self, head_dim: Sides<usize>) -> Result<()> {
        let Self { group_size, residual_length, .. } = *self;
        if self.keys.is_grouped() && !residual_length.is_multiple_of(group_size) {
            let rule = format!("group_size {group_size} does not divide residual_length");
            return Err(invalid("residual_length", residual_length, rule));
        }
        if self.values.is_grouped() && !head_dim.values.is_multiple_of(group_size) {
            let rule = format!("does not divide head_dim {}", head_dim.values);
            return Err(invalid("group_size", group_size, rule));
        }
        if !self.needs_residual() && group_size != Self::stored(self.keys, self.values).group_size {
            let rule = format!("k{}v{} has no groups of a size to choose", self.keys, self.values);
            return Err(invalid("group_size", group_size, rule));
        }
        if self.sliding && self.keys.is_quantized() && !self.keys.is_grouped() {
            let rule = format!("keys as {} leave the window one by one in any case", self.keys);
            return Err(invalid("sliding", true, rule));
        }
        Ok(())
    }

    fn validate_window(&self) -> Result<()> {
        let Some(window) = self.window else { return Ok(()) };
        let fail = |rule: String| Err(invalid("window", window, rule));
        if window == 0 || window > 1 << 24 {
            return fail("must be 1 to 16777216 tokens".to_string());
        }
        if self.is_quantized() && window < self.residual_length {
            // All that is seen would be in float, and what is quantized never seen.
            return fail(format!("must be at least residual_length {}", self.residual_length));
        }
        if self.sink_tokens > window {
            let rule = format!("must be at most window {window}");
            return Err(invalid("sink_tokens", self.sink_tokens, rule));
        }
        Ok(())
    }
}

impl fmt::Display for KvCacheConfig {
    /// The short name. It leaves out fields at their defaults, and the capacity always.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::stored(self.keys, self.values);
        if self.is_quantized() {
            write!(f, "k{}v{}", self.keys, self.values)?;
            if self.group_size != default.group_size {
                write!(f, "-g{}", self.group_size)?;
            }
            if self.residual_length != default.residual_length {
                write!(f, "-r{}", self.residual_length)?;
            }
            if self.sink_tokens != 0 {
                write!(f, "-s{}", self.sink_tokens)?;
            }
            if self.flush == Flush::AfterAttention {
                write!(f, "-after")?;
            }
            if self.sliding {
                write!(f, "-slide")?;
            }
            if self.rotate_values {
                write!(f, "-hadv")?;
            }
            if self.rotate_keys {
                write!(f, "-hadk")?;
            }
        } else {
            write!(f, "float")?;
            // Without a window, sinks are float tokens like all others.
            if self.window.is_some() && self.sink_tokens != 0 {
                write!(f, "-s{}", self.sink_tokens)?;
            }
        }
        if let Some(window) = self.window {
            write!(f, "-w{window}")?;
        }
        match self.float {
            CacheFloat::F32 => Ok(()),
            float => write!(f, "-{}", float.name()),
        }
    }
}

impl FromStr for KvCacheConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::read(text).map_err(|why| {
            let expected = match nearest(text) {
                Some(name) => format!("did you mean {name}?"),
                None => {
                    "expected float, or a format for keys and one for values, as in k4v4-g64".into()
                }
            };
            Error::InvalidCacheName { text: text.to_string(), why, expected }
        })
    }
}

impl KvCacheConfig {
    /// The configuration of a short name, or the part of it that cannot be read and why.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let number = |part: &str, digits: &str| {
            let well_formed = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            well_formed
                .then(|| digits.parse::<usize>().ok())
                .flatten()
                .ok_or_else(|| format!("{part:?} needs a whole number"))
        };
        let mut parts = text.split('-');
        let bits = parts.next().unwrap_or_default();
        let mut config = if bits == "float" {
            Self::float()
        } else {
            let (keys, values) = bits
                .strip_prefix('k')
                .and_then(|rest| rest.split_once('v'))
                .ok_or_else(|| format!("{bits:?} is neither float nor kKvV"))?;
            let side = |name: &str| {
                SideFormat::named(name).ok_or_else(|| {
                    format!("{name:?} in {bits:?} is no format: must be {}", SideFormat::names())
                })
            };
            Self::stored(side(keys)?, side(values)?)
        };
        let mut seen = Vec::new();
        for part in parts {
            let kind = match part {
                "before" => {
                    config.flush = Flush::BeforeAttention;
                    "flush"
                }
                "after" => {
                    config.flush = Flush::AfterAttention;
                    "flush"
                }
                "hadv" => {
                    config.rotate_values = true;
                    "hadv"
                }
                "hadk" => {
                    config.rotate_keys = true;
                    "hadk"
                }
                "slide" => {
                    config.sliding = true;
                    "slide"
                }
                _ if let Some(&float) = CacheFloat::ALL.iter().find(|f| f.name() == part) => {
                    config.float = float;
                    "float"
                }
                _ if part.starts_with('g') => {
                    config.group_size = number(part, &part[1..])?;
                    "group"
                }
                _ if part.starts_with('r') => {
                    config.residual_length = number(part, &part[1..])?;
                    "residual"
                }
                _ if part.starts_with('s') => {
                    config.sink_tokens = number(part, &part[1..])?;
                    "sinks"
                }
                _ if part.starts_with('w') => {
                    config.window = Some(number(part, &part[1..])?);
                    "window"
                }
                _ => return Err(format!("{part:?} is unknown")),
            };
            if seen.contains(&kind) {
                return Err(format!("{part:?} is given twice"));
            }
            seen.push(kind);
        }
        Ok(config)
    }
}
