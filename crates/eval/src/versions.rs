//! [`Versions`]: what computed the numbers of a report.

use core::fmt;

use git_version::git_version;
use serde::Serialize;

/// Versions of the software that computed the numbers.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Versions {
    /// This crate.
    #[serde(rename = "kv-eval")]
    pub kv_eval: &'static str,
    /// The commit that this crate was built from, with `-modified` if files differed; empty outside
    /// a Git repository.
    pub commit: &'static str,
    /// Burn.
    pub burn: &'static str,
    /// CubeCL.
    pub cubecl: &'static str,
}

impl Versions {
    /// The versions this crate is built with.
    pub const BUILT: Self = Self {
        kv_eval: env!("CARGO_PKG_VERSION"),
        commit: git_version!(
            args = ["--always", "--exclude=*", "--abbrev=12", "--dirty=-modified"],
            fallback = ""
        ),
        burn: "0.22.1",
        cubecl: "0.11.3",
    };

    /// Returns the version of this crate and its commit.
    pub fn own(&self) -> String {
        match self.commit {
            "" => self.kv_eval.into(),
            commit => format!("{} ({commit})", self.kv_eval),
        }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { burn, cubecl, .. } = self;
        write!(f, "kv-eval {}, burn {burn}, cubecl {cubecl}", self.own())
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
