//! Prints and parses the short names of configurations.

use core::{fmt, str::FromStr};

use super::{Flush, KvCacheConfig};
use crate::{
    Error, Result,
    formats::{CacheFloat, KvFormat},
};

impl fmt::Display for KvCacheConfig {
    /// Writes the short name, without capacity and without fields that have their defaults.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::new(self.keys, self.values);
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
            for (part, is_written) in [
                ("after", self.flush.is_after()),
                ("gflush", self.flush.is_by_group()),
                ("hadv", self.hadamard_values),
                ("hadk", self.hadamard_keys),
            ] {
                if is_written {
                    write!(f, "-{part}")?;
                }
            }
        } else {
            write!(f, "float")?;
            // Without a sliding window, sinks do not differ from other float tokens.
            if self.sliding_window.is_some() && self.sink_tokens != 0 {
                write!(f, "-s{}", self.sink_tokens)?;
            }
        }
        if let Some(window) = self.sliding_window {
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
            let expected =
                "expected float, or a format for keys and one for values, as in k4v4-g64".into();
            Error::InvalidCacheName { text: text.to_string(), why, expected }
        })
    }
}

impl KvCacheConfig {
    /// Reads a short name.
    ///
    /// # Errors
    /// Names the part that cannot be read, and why.
    pub(super) fn read(text: &str) -> Result<Self, String> {
        let mut parts = text.split('-');
        let mut config = read_formats(parts.next().unwrap_or_default())?;
        let mut seen = Vec::new();
        for part in parts {
            let field = config.read_part(part)?;
            if seen.contains(&field) {
                return Err(format!("{part:?} is given twice"));
            }
            seen.push(field);
        }
        Ok(config)
    }

    /// Reads the part behind a `-`. Returns a letter or word for the field that it sets.
    fn read_part<'a>(&mut self, part: &'a str) -> Result<&'a str, String> {
        let flush = self.flush;
        match part {
            "before" | "after" => {
                self.flush = Flush::new(part == "after", flush.is_by_group());
                return Ok("flush");
            }
            // `slide` is the former name of `gflush`.
            "gflush" | "slide" => {
                self.flush = flush.with_groups(true);
                return Ok("gflush");
            }
            "hadv" | "hadamard_values" => {
                self.hadamard_values = true;
                return Ok("hadv");
            }
            "hadk" | "hadamard_keys" => {
                self.hadamard_keys = true;
                return Ok("hadk");
            }
            _ => {}
        }
        if let Some(&float) = CacheFloat::ALL.iter().find(|float| float.name() == part) {
            self.float = float;
            return Ok("float");
        }
        match part.as_bytes().first() {
            Some(b'g') => self.group_size = number(part)?,
            Some(b'r') => self.residual_length = number(part)?,
            Some(b's') => self.sink_tokens = number(part)?,
            Some(b'w') => self.sliding_window = Some(number(part)?),
            _ => return Err(format!("{part:?} is unknown")),
        }
        Ok(&part[..1])
    }
}

/// Reads `float`, or the formats of both sides, as in `k4v2`.
fn read_formats(text: &str) -> Result<KvCacheConfig, String> {
    if text == "float" {
        return Ok(KvCacheConfig::float());
    }
    let (keys, values) = text
        .strip_prefix('k')
        .and_then(|rest| rest.split_once('v'))
        .ok_or_else(|| format!("{text:?} is neither float nor of the form kKvV"))?;
    let format = |name: &str| {
        KvFormat::named(name).ok_or_else(|| {
            format!("{name:?} in {text:?} is not a format: must be {}", KvFormat::names())
        })
    };
    Ok(KvCacheConfig::new(format(keys)?, format(values)?))
}

/// Reads the number behind the letter of a part.
fn number(part: &str) -> Result<usize, String> {
    let digits = &part[1..];
    let well_formed = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let number = well_formed.then(|| digits.parse().ok()).flatten();
    number.ok_or_else(|| format!("{part:?} needs a whole number"))
}
