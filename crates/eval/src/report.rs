//! Results, as a table and as JSON.

use core::fmt;

use serde::Serialize;

use crate::Mode;

/// One cache over the whole text.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// The cache's short name.
    pub cache: String,
    /// How tokens passed through the model.
    pub mode: Mode,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// Standard error of `nll`, taking tokens as independent.
    pub nll_stderr: f64,
    /// Mean divergence of the next-token distribution from the float run's, nats.
    pub kl_mean: f64,
    /// The divergence that 99.9% of tokens do not exceed, nats.
    pub kl_p999: f64,
    /// Tokens scored.
    pub tokens: usize,
    /// Seconds in the model and its head, without the divergence.
    pub seconds: f64,
    /// Bytes the cache of one window allocates, all layers.
    pub cache_bytes: usize,
    /// Bytes a cache that quantizes nothing allocates with the same capacity and float type.
    pub float_cache_bytes: usize,
}

impl Run {
    /// Scored tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// Versions of what computed the numbers.
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

/// An evaluation and how to repeat it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The command line.
    pub command: Vec<String>,
    /// Versions.
    pub versions: Versions,
    /// The target's name.
    pub backend: &'static str,
    /// The device, as the backend names it.
    pub device: String,
    /// The model's name.
    pub model: String,
    /// Tokens of the text that were used.
    pub text_tokens: usize,
    /// Tokens per window.
    pub window: usize,
    /// The runs, `float` first.
    pub runs: Vec<Run>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} on {} ({}), {} tokens in windows of {}",
            self.model, self.backend, self.device, self.text_tokens, self.window
        )?;
        writeln!(
            f,
            "{:<20} {:<9} {:>10} {:>8} {:>8} {:>10} {:>10} {:>10} {:>8} {:>9}",
            "cache",
            "mode",
            "perplexity",
            "nll",
            "+-",
            "kl mean",
            "kl 99.9%",
            "cache MiB",
            "of float",
            "tokens/s"
        )?;
        for run in &self.runs {
            writeln!(
                f,
                "{:<20} {:<9} {:>10.4} {:>8.4} {:>8.4} {:>10.6} {:>10.4} {:>10.2} {:>7.1}% {:>9.1}",
                run.cache,
                run.mode.to_string(),
                run.perplexity,
                run.nll,
                run.nll_stderr,
                run.kl_mean,
                run.kl_p999,
                run.cache_bytes as f64 / (1 << 20) as f64,
                100.0 * run.cache_bytes as f64 / run.float_cache_bytes as f64,
                run.tokens_per_second(),
            )?;
        }
        Ok(())
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
