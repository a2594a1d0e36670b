//! Sizes that decide speed, not results.

/// Approximate bytes of weights in the part of one thread: large enough to read in order, small
/// enough that no thread waits long for the last part.
pub(super) const PART: usize = 256 << 10;
/// Multiplications from which a second thread pays off.
pub(super) const PARALLEL: usize = 1 << 17;
/// Bytes of a cache line.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) const LINE: usize = 64;
/// Distance in bytes at which blocks are prefetched. The hardware prefetcher follows sequential
/// reads, but stops at the end of a page.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) const AHEAD: usize = 2048;
