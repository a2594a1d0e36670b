//! One conformance suite for every target: each case is a function generic over the target, from
//! which `stamp!` makes a test for each of Flex, WGPU and CUDA whose feature is on.
//!
//! A target whose device cannot be opened fails its tests, unless `KV_ALLOW_NO_DEVICE=1`; then they
//! say `SKIPPED` on standard error. Random inputs come from fixed seeds, which failures print.
#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

mod attention;
mod batch;
mod cache;
mod chunks;
mod common;
mod config;
mod counters;
mod delta;
#[cfg(feature = "autodiff")]
mod delta_gradients;
mod delta_inputs;
mod envelope;
mod errors;
mod extremes;
mod formats;
mod frames;
mod golden;
#[cfg(feature = "autodiff")]
mod gradients;
mod layout;
mod limits;
mod low_bits;
mod memory;
mod nonfinite;
mod operations;
mod options;
mod pairs;
mod poison;
mod quantize;
mod ragged;
#[cfg(all(feature = "remote", feature = "flex"))]
mod remote;
mod resize;
mod rope;
mod running;
mod shared;
mod shared_values;
mod slots;
mod small;
mod sparse;
mod sparse_bugs;
mod sparse_cache;
mod sparse_errors;
#[cfg(feature = "autodiff")]
mod sparse_gradients;
#[cfg(feature = "autodiff")]
mod sparse_index_loss;
mod sparse_inputs;
mod sparse_long;
mod sparse_memory;
mod sparse_recall;
mod sparse_select;
mod sparse_ties;
mod step;
#[cfg(feature = "autodiff")]
mod training;
mod truncate;
mod views;
