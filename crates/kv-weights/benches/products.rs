//! Benchmarks, for development: `cargo bench -p kv-weights --features flex`.
#![allow(missing_docs, reason = "a program")]

fn main() {
    divan::main();
}
