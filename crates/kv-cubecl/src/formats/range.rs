//! [`GroupRange`]: the range of numbers that the codes of a group cover.

use core::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The range of numbers that the codes of a group cover. Numbers outside of it are clipped.
///
/// Codes are evenly spaced. A narrower range makes steps smaller for most numbers, and clips a few.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupRange {
    /// From the least number to the greatest.
    #[default]
    MinMax,
    /// At most this many hundredths of the group's sample standard deviation around its mean.
    Sigma(u16),
    /// The range with the least squared error among eight: the whole range, and 95%, 90%, 85%, 80%,
    /// 75%, 70% and 65% of it around its middle. Of equal errors, the wider range wins.
    LeastError,
}

impl GroupRange {
    /// The parts of the whole range that [`LeastError`](Self::LeastError) tries.
    pub const PARTS: [f32; 8] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65];

    /// The number of standard deviations of [`Sigma`](Self::Sigma); `None` for other ranges.
    pub const fn sigmas(self) -> Option<f32> {
        match self {
            Self::Sigma(hundredths) => Some(hundredths as f32 / 100.0),
            _ => None,
        }
    }
}

impl fmt::Display for GroupRange {
    /// Writes `c0` for min to max, `clip` for the least error, or `c` and hundredths of a standard
    /// deviation, as in `c195`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MinMax => f.write_str("c0"),
            Self::LeastError => f.write_str("clip"),
            Self::Sigma(hundredths) => write!(f, "c{hundredths}"),
        }
    }
}

impl FromStr for GroupRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = match text {
            "clip" => return Ok(Self::LeastError),
            _ => text.strip_prefix('c').filter(|text| text.bytes().all(|b| b.is_ascii_digit())),
        };
        match digits.and_then(|digits| digits.parse().ok()) {
            Some(0) => Ok(Self::MinMax),
            Some(hundredths) => Ok(Self::Sigma(hundredths)),
            None => {
                let rule = "must be c0, clip, or c and hundredths of a standard deviation";
                Err(format!("range {text:?} is unknown: {rule}, as in c195"))
            }
        }
    }
}

impl Serialize for GroupRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GroupRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}
