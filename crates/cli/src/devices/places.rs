//! Devices of other machines by address and index.

use core::{fmt, ops::RangeInclusive, str::FromStr};

use anyhow::{Context, Result, bail};

/// A device of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// `HOST:PORT`, with an IPv6 address in brackets.
    pub(super) address: String,
    /// Index of the device on the worker.
    pub(super) index: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.index)
    }
}

/// Most devices of a list.
pub(super) const MOST: usize = 1024;

/// Reads the index or the number of devices.
pub(super) fn number(text: &str) -> Result<usize> {
    let rule = format!("{text:?} must be a whole number below {MOST}");
    text.parse().ok().filter(|&n: &usize| n < MOST).context(rule)
}

/// Reads `HOST:PORT/0,HOST:PORT/0-1`. Without an index it is the first device.
pub(super) fn places(list: &str) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    for item in list.split(',') {
        let (address, indices) = item.split_once('/').unwrap_or((item, "0"));
        check_address(address)?;
        for index in range(indices)? {
            let place = Place { address: address.to_string(), index };
            if places.contains(&place) {
                bail!("must list devices once, but has {place} twice");
            }
            places.push(place);
        }
    }
    match places.len() {
        n if n > MOST => bail!("must name at most {MOST} devices"),
        _ => Ok(places),
    }
}

fn range(text: &str) -> Result<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = number(first)?..=number(last)?;
    match range.is_empty() {
        true => bail!("{text:?} must name at least one device"),
        false => Ok(range),
    }
}

fn check_address(address: &str) -> Result<()> {
    let rule = || format!("{address:?} must be HOST:PORT, with an IPv6 address in brackets");
    let (host, port) = address.rsplit_once(':').with_context(rule)?;
    let port = u16::from_str(port).ok().filter(|&port| port > 0);
    let name = match host.strip_prefix('[').map(|host| host.strip_suffix(']')) {
        // An address in brackets.
        Some(inner) => inner.is_some_and(|inner| inner.parse::<core::net::Ipv6Addr>().is_ok()),
        None => {
            let allowed = |c: char| c.is_ascii_alphanumeric() || ['.', '-', '_'].contains(&c);
            !host.is_empty() && host.chars().all(allowed)
        }
    };
    match port.is_some() && name {
        true => Ok(()),
        false => bail!(rule()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_mistakes_named() {
        let shown = |list: &str| {
            places(list).map(|places| places.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(shown("a:1").unwrap(), ["a:1/0"]);
        assert_eq!(shown("a:1/0-1,[::1]:2/3").unwrap(), ["a:1/0", "a:1/1", "[::1]:2/3"]);
        for (list, why) in [
            ("", "HOST:PORT"),
            ("a", "HOST:PORT"),
            ("a:0/0", "HOST:PORT"),
            ("a:65536/0", "HOST:PORT"),
            ("::1:3000/0", "IPv6"),
            ("[::1:3000/0", "IPv6"),
            ("me:secret@a:1/0", "HOST:PORT"),
            ("a:1/", "whole number"),
            ("a:1/x", "whole number"),
            ("a:1/2-1", "at least one"),
            ("a:1/0,a:1/0", "once"),
            ("a:1/0,,b:1/0", "HOST:PORT"),
        ] {
            let error = shown(list).unwrap_err().to_string();
            assert!(error.contains(why), "{list}: {error}");
        }
    }
}
