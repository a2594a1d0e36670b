//! [`Versions`]: what computed the numbers of a report.

use core::fmt;

use serde::Serialize;

/// Versions of the software that computed the numbers.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Versions {
    /// This crate.
    #[serde(rename = "kv-eval")]
    pub kv_eval: &'static str,
    /// Burn.
    pub burn: &'static str,
    /// CubeCL.
    pub cubecl: &'static str,
}

impl Versions {
    /// The versions this crate is built with.
    pub const BUILT: Self =
        Self { kv_eval: env!("CARGO_PKG_VERSION"), burn: "0.22.1", cubecl: "0.11.3" };
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kv_eval, burn, cubecl } = self;
        write!(f, "kv-eval {kv_eval}, burn {burn}, cubecl {cubecl}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_the_lock_file() {
        let lock = include_str!("../../../Cargo.lock");
        for (name, version) in [("burn", Versions::BUILT.burn), ("cubecl", Versions::BUILT.cubecl)]
        {
            let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
            assert!(lock.contains(&entry), "Cargo.lock has another version of {name}");
        }
    }
}
