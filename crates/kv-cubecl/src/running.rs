//! How the scales of frames follow one another: [`RunningScale`].

use core::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Frames, Result, error::invalid};

/// Rule for the running amax of a head, which gives the scale of a frame in [frame
/// formats](crate::KvFormat::FRAME_ONLY).
///
/// Let `a_n` be the largest magnitude of frame n of a head, or the percentile of its magnitudes.
/// The running amax is `r_0 = a_0`, then `r_n = max(r_(n-1), a_n)` in the first `warm_up` frames,
/// and `r_n = min(momentum r_(n-1) + (1 - momentum) a_n, growth r_(n-1))` after them; it is never
/// below `floor` and never above `ceiling`. The frame's tokens keep the scale `f16(r_n / 127)`, and
/// numbers beyond `r_n` saturate. Sink frames stay in float and are not counted. A NaN counts as 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct RunningScale {
    /// The share of the frame before in a running amax, at least 0 and below 1.
    pub momentum: f32,
    /// First frames in which the running amax is the largest so far.
    pub warm_up: Frames,
    /// The most by which it grows from a frame to the next after that, at least 1.
    pub growth: f32,
    /// The least that it is, above 0.
    pub floor: f32,
    /// Upper limit of the running amax, at least `floor`. Above 127 * 65504 it has no effect:
    /// larger scales do not fit f16.
    pub ceiling: f32,
    /// Percentile of a frame's magnitudes that is taken, above 0 and at most 100: the smallest
    /// magnitude that this percentage of them does not exceed (nearest rank).
    pub percentile: f32,
}

impl Default for RunningScale {
    /// Momentum 0.9, a warm-up of 4 frames, growth of 2, a floor of 1e-3, no ceiling, and the
    /// percentile 99.5.
    fn default() -> Self {
        let (momentum, growth, floor) = (0.9, 2.0, 1e-3);
        let ceiling = f32::MAX;
        Self { momentum, warm_up: Frames(4), growth, floor, ceiling, percentile: 99.5 }
    }
}

impl FromStr for RunningScale {
    type Err = Error;

    /// Parses settings such as `momentum=0.95,warm-up=8`; the others keep their defaults.
    fn from_str(text: &str) -> Result<Self> {
        let mut rule = Self::default();
        let mut seen = vec![];
        for setting in text.split(',') {
            let wrong = |why: &str| invalid("running", setting, format!("{why}: {SETTINGS}"));
            let (name, number) =
                setting.split_once('=').ok_or_else(|| wrong("must be name=number"))?;
            if seen.contains(&name) {
                return Err(wrong("is set twice"));
            }
            seen.push(name);
            if name == "warm-up" {
                rule.warm_up = Frames(number.parse().map_err(|_| wrong("must be a whole number"))?);
                continue;
            }
            let of = match name {
                "momentum" => &mut rule.momentum,
                "growth" => &mut rule.growth,
                "floor" => &mut rule.floor,
                "ceiling" => &mut rule.ceiling,
                "percentile" => &mut rule.percentile,
                _ => return Err(wrong("is unknown")),
            };
            *of = number.parse().map_err(|_| wrong("must be a number"))?;
        }
        rule.validate().map(|()| rule)
    }
}

/// The settings of a [`RunningScale`] as text.
const SETTINGS: &str = "must set momentum, warm-up, growth, floor, ceiling or percentile, as in \
                        momentum=0.9,floor=1e-3";

impl RunningScale {
    /// Checks the range of every number.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) naming the field, its value and the
    /// rule.
    pub fn validate(&self) -> Result<()> {
        let Self { momentum, growth, floor, ceiling, percentile, .. } = *self;
        for (field, value, fits, rule) in [
            (
                "momentum",
                momentum,
                (0.0..1.0).contains(&momentum),
                "must be at least 0 and below 1",
            ),
            (
                "growth",
                growth,
                growth >= 1.0 && growth.is_finite(),
                "must be finite and at least 1",
            ),
            // From 0 no growth would lead away.
            ("floor", floor, floor > 0.0 && floor.is_finite(), "must be finite and above 0"),
            (
                "ceiling",
                ceiling,
                ceiling >= floor && ceiling.is_finite(),
                "must be finite and at least the floor",
            ),
            (
                "percentile",
                percentile,
                percentile > 0.0 && percentile <= 100.0,
                "must be above 0 and at most 100",
            ),
        ] {
            if !fits {
                return Err(invalid(field, value, rule));
            }
        }
        Ok(())
    }

    /// Returns how many of `n` sorted magnitudes come after the one at the percentile.
    pub(crate) fn above(&self, n: usize) -> usize {
        let rank = (f64::from(self.percentile) * n as f64 / 100.0).ceil() as usize;
        n - rank.clamp(1, n)
    }
}

/// Statistics of the running scales of a side.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RunningCounters {
    /// The smallest scale of a head.
    pub scale_min: f32,
    /// The mean of the scales of all heads.
    pub scale_mean: f64,
    /// The largest of them.
    pub scale_max: f32,
    /// The most by which the newest frame has changed a scale, over what it was before; 0 while
    /// there is one frame alone.
    pub change: f32,
    /// The share of the newest frame's numbers that saturate, by head, `[batch, n_kv_heads]`.
    pub saturated: Vec<f32>,
}
