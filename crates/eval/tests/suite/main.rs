//! Tests of this crate in one program, which links Burn once. A test has its own program only if
//! it counts what the whole process does.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod austen;
mod austen_sparse;
mod bench;
mod bos;
mod chat;
mod cli;
mod cli_errors;
mod common;
mod continuation;
mod devices;
mod dtype;
mod files_kept;
mod generate;
mod hub;
mod huge;
mod hybrid;
mod index;
mod installed;
mod narrow_caches;
mod needle;
mod plan;
mod plan_program;
mod policy;
mod profile;
mod profile_device;
mod profile_rates;
mod prompts;
mod real_model;
#[cfg(feature = "remote")]
mod remote;
mod report;
mod retrieval;
mod saved;
mod shared_caches;
mod speculate;
mod stride;
mod tasks;
mod tasks_files;
mod tasks_program;
mod twin;
mod world_inspect;
mod world_play;
