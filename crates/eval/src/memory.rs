//! The memory of a device ([`DeviceUse`]), and an allocator that counts allocations of the host
//! ([`Tracking`]).

use std::{
    alloc::{GlobalAlloc, Layout},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

pub use kv_models::DeviceUse;

/// Counts allocations, as a program's `#[global_allocator]`.
///
/// The process's resident memory would not show a cache that fits into memory freed after loading
/// the model, because allocators keep what was freed.
#[derive(Debug)]
pub struct Tracking<A> {
    inner: A,
    allocations: AtomicUsize,
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl<A> Tracking<A> {
    /// Wraps `inner`, which does the allocation.
    pub const fn new(inner: A) -> Self {
        let (allocations, live) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { inner, allocations, live, peak: AtomicUsize::new(0) }
    }

    /// Returns the number of blocks allocated so far, reallocations included.
    pub fn allocations(&self) -> usize {
        self.allocations.load(Relaxed)
    }

    /// Runs `work` and returns its result and the peak of bytes that all threads allocated beyond
    /// those allocated before.
    pub fn peak_of<T>(&self, work: impl FnOnce() -> T) -> (T, usize) {
        let before = self.live.load(Relaxed);
        self.peak.store(before, Relaxed);
        let result = work();
        (result, self.peak.load(Relaxed) - before)
    }

    fn add(&self, bytes: usize) {
        self.allocations.fetch_add(1, Relaxed);
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(live, Relaxed);
    }
}

// SAFETY: every call is passed on unchanged.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Tracking<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller upholds the contract of this method.
        unsafe { self.inner.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller upholds the contract of this method.
        unsafe { self.inner.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.add(size);
        self.live.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract of this method.
        unsafe { self.inner.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract of this method.
        unsafe { self.inner.dealloc(memory, layout) }
    }
}
