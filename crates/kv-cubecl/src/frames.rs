//! What a cache of frames stores and what a frame sees: [`FrameConfig`].

use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    CacheShape, Error, Frames, KvCacheConfig, Result, RunningScale, Side, Sides,
    error::invalid,
    layout::{CacheLayout, MemoryBytes},
};

/// A cache of frames of equally many tokens, as world models and video models have: the tokens of a
/// frame see one another, the frames before it up to a window, and the first frames, if some are
/// kept as sinks.
///
/// The same configuration drives the stream ([`FrameCache`](crate::FrameCache)) and all frames at
/// once ([`frame_attention`](crate::frame_attention)). A frame sees itself in float, as it was
/// computed; frames before it as `format` stores them, which may be in float as well.
///
/// ```
/// use kv_cubecl::{CacheShape, FrameConfig, Frames};
///
/// // 60 frames of 8 x 8 tokens, keys in float and values in 8 bits
/// let config = FrameConfig::new("k16vint8".parse()?, 64, Frames(60));
/// config.validate(CacheShape::new(1, 24, 64))?;
/// # Ok::<(), kv_cubecl::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FrameConfig {
    /// Format of the tokens. Its residual length counts tokens and need not be whole frames. It
    /// must not set `sliding_window` or `sink_tokens`, which this configuration counts in frames;
    /// its capacity is ignored.
    pub format: KvCacheConfig,
    /// Tokens of a frame.
    pub tokens_per_frame: usize,
    /// Number of newest frames that a frame sees, including itself, beside the sinks.
    #[serde(alias = "window")]
    pub sliding_window: Frames,
    /// Number of first frames that every frame sees, stored in float.
    #[serde(default)]
    pub sinks: Frames,
    /// Rules for the running scales, for sides that [take their scales from
    /// frames](crate::KvFormat::FRAME_ONLY).
    #[serde(default, deserialize_with = "one_or_each")]
    pub running: Sides<RunningScale>,
}

/// Reads a rule for both sides, or one for each.
fn one_or_each<'de, D: Deserializer<'de>>(from: D) -> Result<Sides<RunningScale>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Rules {
        Both(RunningScale),
        Each {
            #[serde(default)]
            keys: RunningScale,
            #[serde(default)]
            values: RunningScale,
        },
    }
    Ok(match Rules::deserialize(from)? {
        Rules::Both(rule) => rule.into(),
        Rules::Each { keys, values } => Sides { keys, values },
    })
}

impl FrameConfig {
    /// Describes a cache whose frames see the newest `sliding_window` frames, including themselves.
    pub fn new(format: KvCacheConfig, tokens_per_frame: usize, sliding_window: Frames) -> Self {
        let (sinks, running) = (Frames(0), Sides::default());
        Self { format, tokens_per_frame, sliding_window, sinks, running }
    }

    /// Sets the rules for the running scales: one for both sides, or one for each.
    pub fn with_running(self, running: impl Into<Sides<RunningScale>>) -> Self {
        Self { running: running.into(), ..self }
    }

    /// Sets the number of first frames that stay visible.
    pub const fn with_sinks(mut self, sinks: Frames) -> Self {
        self.sinks = sinks;
        self
    }

    /// Checks every rule that does not depend on a device, for a cache of this shape.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field, its value and the
    /// rule.
    pub fn validate(&self, shape: CacheShape) -> Result<()> {
        self.ring(shape).map(drop)
    }

    /// Returns the bytes that a cache of this shape allocates, by part.
    ///
    /// # Errors
    /// Fails as [`validate`](Self::validate) does.
    pub fn memory_bytes(&self, shape: CacheShape) -> Result<MemoryBytes> {
        Ok(self.ring(shape)?.layout.memory_bytes())
    }

    /// Checks the rules that do not depend on the cache's shape.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { format, tokens_per_frame, sliding_window: window, .. } = self;
        if *tokens_per_frame == 0 {
            return Err(invalid("tokens_per_frame", tokens_per_frame, "must be at least 1"));
        }
        if format.sliding_window.is_some() {
            let value = format.sliding_window.unwrap_or_default();
            return Err(invalid(
                "sliding_window",
                value,
                "of a cache of frames is a number of frames",
            ));
        }
        if format.sink_tokens > 0 {
            let rule = "of a cache of frames are whole frames";
            return Err(invalid("sink_tokens", format.sink_tokens, rule));
        }
        if format.is_quantized() && format.flush.is_after() {
            let rule = "frames are quantized when they are written: must be before";
            return Err(invalid("flush", "after", rule));
        }
        if format.stagger {
            return Err(invalid("stagger", true, "is for tiles, which frames do not have"));
        }
        for side in Side::BOTH {
            let stored = format.format(side);
            if stored.is_tiled() {
                let rule = "is quantized in tiles of tokens, which frames do not have";
                return Err(invalid(side.name(), stored, rule));
            }
            if stored.frame_scale().is_none() {
                continue;
            }
            if format.residual_length > 0 {
                let rule =
                    format!("{side} as {stored} are quantized when their frame is: must be 0");
                return Err(invalid("residual_length", format.residual_length, rule));
            }
            if !tokens_per_frame.is_multiple_of(2) {
                let rule = format!("of {side} as {stored} two tokens share a word: must be even");
                return Err(invalid("tokens_per_frame", tokens_per_frame, rule));
            }
        }
        for side in Side::BOTH {
            self.running[side].validate().map_err(|error| match error {
                Error::InvalidConfig { field, value, rule } => {
                    invalid(field, value, format!("{rule}, for the running scales of {side}"))
                }
                other => other,
            })?;
        }
        match window.0 {
            0 | 1 => Err(invalid(
                "sliding_window",
                window,
                "must be at least 2 frames: itself and another",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the format of tokens: a side that takes its scales from frames is stored like one
    /// with a scale per token.
    pub(crate) fn tokens(&self) -> KvCacheConfig {
        let KvCacheConfig { keys, values, .. } = self.format;
        self.format.with_formats(keys.with_token_scales(), values.with_token_scales())
    }

    /// Returns the token configuration through which a frame sees the frames before it.
    pub(crate) fn history(&self) -> KvCacheConfig {
        // Larger than any cache, small enough that sums do not overflow.
        let tokens = |n| Frames(n).tokens(self.tokens_per_frame).min(1 << 31);
        let [window, sinks] = [self.sliding_window.0 - 1, self.sinks.0].map(tokens);
        self.tokens().with_sliding_window(Some(window)).with_sink_tokens(sinks)
    }

    /// Returns the ring for a cache of this shape.
    pub(crate) fn ring(&self, shape: CacheShape) -> Result<Ring> {
        self.check()?;
        if shape.shares_values {
            return Err(Error::Unsupported {
                what: format!("a cache of frames of {shape}"),
                why: "frames store keys and values separately".to_string(),
            });
        }
        let Self { format, tokens_per_frame, sliding_window: window, sinks, .. } = *self;
        if sinks >= window {
            let rule = format!("must be fewer than the {window} of the window");
            return Err(invalid("sinks", sinks, rule));
        }
        let history = self.history();
        let seen = history.sliding_window.unwrap_or(usize::MAX);
        if seen > MAX_TOKENS {
            let rule = format!("must be at most {MAX_TOKENS} tokens before the newest frame");
            return Err(invalid("sliding_window", window, rule));
        }
        if format.is_quantized() && format.residual_length > seen {
            let rule = format!("must be at most the {seen} tokens before the newest of {window}");
            return Err(invalid("residual_length", format.residual_length, rule));
        }
        // Positions repeat after a number of tokens that all rings and all quantization steps
        // divide.
        let layout = |capacity| {
            let history = history.with_capacity(capacity);
            CacheLayout::with_overwrite(&history, shape, tokens_per_frame)
        };
        let sizes = layout(MAX_TOKENS)?;
        let steps = sizes.schedule().sides;
        let period = Sides::from_fn(|side| {
            let place = sizes.sides()[side];
            let step = place.spec.map_or(1, |_| steps[side].step);
            [place.ring, place.packed_tokens, step]
        });
        let lengths = period.into_array().concat().into_iter().filter(|&n| n > 0);
        let period = lengths.fold(tokens_per_frame, |period, n| {
            (period / greatest_common_divisor(period, n)).saturating_mul(n)
        });
        // From this length on the sliding window hides frames, and everything that gets quantized
        // has been.
        let steady = history.sink_tokens + seen + tokens_per_frame + format.residual_length;
        let steady = steady.next_multiple_of(tokens_per_frame);
        let capacity = steady.saturating_add(period).saturating_add(tokens_per_frame);
        if capacity > MAX_TOKENS {
            let rule = format!(
                "frames of {tokens_per_frame} tokens and residual_length {} lie alike only every \
                 {period} tokens, which must be less than {MAX_TOKENS}; let one divide the other",
                format.residual_length
            );
            return Err(invalid("sliding_window", window, rule));
        }
        Ok(Ring { layout: layout(capacity)?, tokens_per_frame, steady, period })
    }
}

/// Largest number of tokens that kernels can count.
const MAX_TOKENS: usize = 1 << 24;

fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Placement of the frames of an endless stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    pub(crate) layout: CacheLayout,
    tokens_per_frame: usize,
    /// Number of tokens, in whole frames, from which positions repeat.
    steady: usize,
    /// Period of the repetition in tokens, in whole frames.
    period: usize,
}

impl Ring {
    /// Returns the length in tokens at which a cache of this layout is laid out like one of
    /// `frames` frames.
    pub(crate) fn tokens(&self, frames: u64) -> usize {
        let [steady, period] =
            [self.steady, self.period].map(|tokens| (tokens / self.tokens_per_frame) as u64);
        let frames = match frames.checked_sub(steady) {
            Some(since) => steady + since % period,
            None => frames,
        };
        Frames(frames).tokens(self.tokens_per_frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(name: &str, tokens_per_frame: usize, window: u64, sinks: u64) -> Result<Ring> {
        let config = FrameConfig::new(name.parse().unwrap(), tokens_per_frame, Frames(window));
        config.with_sinks(Frames(sinks)).ring(CacheShape::new(1, 1, 16))
    }

    /// Visible frames never share a slot, and a long stream uses the positions of a short one:
    /// every ring and every quantization step divides the period.
    #[test]
    fn positions_repeat() {
        for (name, tokens, window, sinks) in [
            ("float", 7, 5, 0),
            ("float", 64, 60, 2),
            ("k4v4-g8-r8", 16, 6, 0),
            ("k4v4-g8-r24-gflush", 8, 6, 1),
            ("k16v8-g8-r40", 10, 7, 2),
            ("k2v16-g16-r48", 12, 5, 0),
        ] {
            let ring = ring(name, tokens, window, sinks).unwrap();
            let layout = &ring.layout;
            let sinks = layout.config().sink_tokens;
            for frames in [0, 1, 9, 100, 1_000_000, 1 << 40, (1 << 40) + 1] {
                let at = ring.tokens(frames);
                assert!(at + tokens <= layout.config().capacity, "{name}");
                let next = ring.tokens(frames + 1);
                assert!(next == at + tokens || next == ring.steady, "{name}: {at} then {next}");
                // The same positions by counting on:
                let long = usize::try_from(frames).unwrap() * tokens;
                for side in crate::Side::BOTH {
                    let (place, step) = (layout.sides()[side], layout.schedule().sides[side].step);
                    for n in [place.ring, place.packed_tokens, place.spec.map_or(1, |_| step)] {
                        let after = |len: usize| len.saturating_sub(sinks) % n.max(1);
                        assert_eq!(after(at), after(long), "{name}: {frames} frames, {n}");
                    }
                }
            }
        }
    }

    /// The rings of published models fit, whatever is stored.
    #[test]
    fn rings_of_published_models() {
        for (tokens, window, heads, head_dim) in
            [(64, 60, 24, 64), (65, 60, 24, 64), (1560, 21, 12, 128)]
        {
            for name in ["float-bf16", "kint8vint8", "k16vint8", "kint8v4", "k4v4", "k2v2-gflush"] {
                let config = FrameConfig::new(name.parse().unwrap(), tokens, Frames(window));
                config.validate(CacheShape::new(1, heads, head_dim)).unwrap();
            }
        }
    }

    /// owl-wms keeps 60 frames in 24 layers of 24 heads: 566 MB in bf16, and 1.94 times less in 8
    /// bits with a scale of 16 bits for each token and head.
    #[test]
    fn bytes_of_a_world() {
        let bytes = |name: &str| {
            let config = FrameConfig::new(name.parse().unwrap(), 64, Frames(60));
            let ring = config.ring(CacheShape::new(1, 24, 64)).unwrap();
            24 * ring.layout.memory_bytes().total()
        };
        // An unpacked side adds a few words:
        assert!((566_231_040..566_233_000).contains(&bytes("float-bf16")));
        let saved = bytes("float-bf16") as f64 / bytes("kint8vint8") as f64;
        assert!((1.935..1.945).contains(&saved), "{saved}");
    }

    #[test]
    fn rules_name_what_breaks_them() {
        for (name, tokens, window, sinks, wanted) in [
            ("float", 0, 4, 0, "tokens_per_frame 0: must be at least 1"),
            ("float", 8, 1, 0, "sliding_window 1 frame: must be at least 2 frames"),
            ("float", 8, 4, 4, "sinks 4 frames: must be fewer than the 4 frames of the window"),
            ("float-w9", 8, 4, 0, "sliding_window 9: of a cache of frames is a number of frames"),
            ("k4v4-s3", 8, 60, 0, "sink_tokens 3: of a cache of frames are whole frames"),
            ("k4v4-after", 8, 60, 0, "flush after: frames are quantized when they are written"),
            ("k4v4-g8-r32", 8, 4, 0, "residual_length 32: must be at most the 24 tokens before"),
            (
                "float",
                1 << 20,
                1 << 10,
                0,
                "sliding_window 1024 frames: must be at most 16777216 tokens",
            ),
            ("k4v4-g16-r16368", 1021, 60, 0, "lie alike only every"),
        ] {
            let error = ring(name, tokens, window, sinks).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
