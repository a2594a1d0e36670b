//! Tests of this crate in one program, which links Burn once. A test has its own program only if
//! it counts what the whole process does.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod alignment;
mod backends;
mod cli;
mod common;
mod data;
mod devices;
mod experts;
mod failures;
mod folders;
mod hub;
mod latent;
#[cfg(feature = "remote")]
mod lost_workers;
mod packed;
mod recurrent;
#[cfg(feature = "remote")]
mod remote;
mod resume;
mod shared_caches;
mod sparse;
mod stop;
mod training;
mod world_training;
