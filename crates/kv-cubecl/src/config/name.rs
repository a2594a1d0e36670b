//! Prints and parses the short names of configurations.

use core::{fmt, str::FromStr};

use super::{Flush, KvCacheConfig};
use crate::{
    Error, Result,
    formats::{CacheFloat, KvFormat},
    sides::Side,
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
                ("stagger", self.stagger),
                ("hadv", self.hadamard_values),
                ("hadk", self.hadamard_keys),
            ] {
                if is_written {
                    write!(f, "-{part}")?;
                }
            }
            if self.tile.tokens != default.tile.tokens {
                write!(f, "-t{}", self.tile.tokens)?;
            }
            if self.tile.iterations != default.tile.iterations {
                write!(f, "-i{}", self.tile.iterations)?;
            }
            let other = Side::BOTH.map(|side| self.range(side) != default.range(side));
            match other {
                [true, true] if self.key_range == self.value_range => {
                    write!(f, "-{}", self.key_range)?;
                }
                [keys, values] => {
                    if keys {
                        write!(f, "-k{}", self.key_range)?;
                    }
                    if values {
                        write!(f, "-v{}", self.value_range)?;
                    }
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
            "stagger" => {
                self.stagger = true;
                self.flush = flush.with_groups(true);
                return Ok("stagger");
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
        let (sides, range) = match part.as_bytes().first() {
            Some(b'k') => ("k", &part[1..]),
            Some(b'v') => ("v", &part[1..]),
            _ => ("c", part),
        };
        if range.starts_with('c') {
            let range = range.parse()?;
            if sides != "v" {
                self.key_range = range;
            }
            if sides != "k" {
                self.value_range = range;
            }
            return Ok(sides);
        }
        match part.as_bytes().first() {
            Some(b't') => self.tile.tokens = number(part)?,
            Some(b'i') => {
                self.tile.iterations = number(part)?.try_into().unwrap_or(u32::MAX);
            }
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
    let rest = text.strip_prefix('k').unwrap_or_default();
    // The name of a format may begin with a v, too.
    let splits = rest.match_indices('v').map(|(at, _)| (&rest[..at], &rest[at + 1..]));
    let found = splits
        .clone()
        .find_map(|(keys, values)| Some((KvFormat::named(keys)?, KvFormat::named(values)?)));
    if let Some((keys, values)) = found {
        return Ok(KvCacheConfig::new(keys, values));
    }
    let Some((keys, values)) = splits.clone().next() else {
        return Err(format!("{text:?} is neither float nor of the form kKvV"));
    };
    let wrong = if KvFormat::named(keys).is_some() { values } else { keys };
    Err(format!("{wrong:?} in {text:?} is not a format: must be {}", KvFormat::names()))
}

/// Reads the number behind the letter of a part.
fn number(part: &str) -> Result<usize, String> {
    let digits = &part[1..];
    let well_formed = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let number = well_formed.then(|| digits.parse().ok()).flatten();
    number.ok_or_else(|| format!("{part:?} needs a whole number"))
}
