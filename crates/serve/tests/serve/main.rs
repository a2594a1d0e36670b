//! Tests of the server over loopback, with a small trained model and the kernels of the CPU.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test that cannot go on fails")]

mod chat;
mod client;
mod completions;
mod constraints;
mod faults;
mod identity;
mod limits;
mod page;
