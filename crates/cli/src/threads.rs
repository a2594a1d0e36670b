//! How many threads compute, as a command-line argument.

use anyhow::{Context, Result};

/// The number of threads.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ThreadArgs {
    /// Threads to compute with on the CPU [default: one per core].
    #[arg(long, short = 't', global = true, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl ThreadArgs {
    /// Starts that many threads; without the argument nothing is done, and Rayon starts one per
    /// core. Must be called before anything is computed.
    ///
    /// # Errors
    /// Threads that cannot be started.
    pub fn start(self) -> Result<()> {
        let Some(n) = self.threads else { return Ok(()) };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n.into());
        pool.build_global().with_context(|| format!("threads {n}: cannot start"))
    }
}
