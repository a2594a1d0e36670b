//! What the workspace's programs share: where they run, how they start and say what went wrong, how
//! they show progress, and where they get models from. No library depends on it.

mod backend;
mod caches;
mod devices;
mod hub;
mod loading;
mod memory;
mod model;
mod output;
mod overwrite;
mod progress;
mod signals;
pub mod source;
mod speculate;
mod start;
mod threads;

pub use backend::{Backend, Plain, not_built_in};
pub use caches::cache_help;
#[cfg(feature = "remote")]
pub use devices::before_exit;
pub use devices::{DeviceArgs, DeviceList, TokenArgs, WorkerArgs, WorkerToken};
pub use hub::{ModelSource, hub_folder, name_of};
pub use kv_cubecl;
pub use loading::{MemoryBudget, MemoryRequest};
pub use memory::{MemorySize, memory_limit};
pub use model::{ModelArgs, Weights, head_format};
pub use output::{OutFile, Screen, check_folder, note, notes, uninterrupted};
pub use overwrite::NamedFiles;
pub use progress::{count_bar, load_bar, token_bar};
pub use signals::{INTERRUPTED, exit_interrupted, exit_on_interrupt, on_interrupt};
pub use speculate::SpeculateArgs;
pub use start::{command_line, error_line, once, start};
pub use threads::ThreadArgs;
