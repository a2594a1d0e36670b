//! A new file of a policy.

use std::path::Path;

use anyhow::{Result, bail};
use kv_cli::OutFile;
use kv_models::ModelCacheConfig;

use crate::json::write_json;

/// A file that a found policy is written to.
pub(crate) struct PolicyFile {
    file: OutFile,
    is_toml: bool,
}

impl PolicyFile {
    /// Checks that `path`, the value of the argument `name`, is a new file of a known type that can
    /// be written.
    pub(crate) fn open(name: &'static str, path: &Path) -> Result<Self> {
        if path.symlink_metadata().is_ok() {
            bail!("{name} {}: already exists; remove it or name another file", path.display());
        }
        let is_toml = match path.extension().and_then(|it| it.to_str()) {
            Some("toml") => true,
            Some("json") => false,
            _ => bail!("{name} {}: must end in .toml or .json", path.display()),
        };
        Ok(Self { file: OutFile::open(name, path)?, is_toml })
    }

    pub(crate) fn write(self, policy: &ModelCacheConfig) -> Result<()> {
        match self.is_toml {
            true => self.file.write(policy.to_toml().as_bytes()),
            false => write_json(self.file, policy),
        }
    }
}
