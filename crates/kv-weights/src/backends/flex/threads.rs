//! Work in parts, on all threads.

use core::{
    hint, iter,
    sync::atomic::{AtomicUsize, Ordering},
};
use std::sync::{Mutex, PoisonError};

/// Does each part once, on all threads if it is worth waking them. This one starts at once, while the others wake up,
/// and does not sleep until they have ended: that takes longer than most products.
pub(crate) fn in_parts<T: Send>(
    parts: impl Iterator<Item = T> + Send,
    parallel: bool,
    work: impl Fn(T) + Sync,
) {
    /// Most pauses to wait for the last parts of the others.
    const LONGEST: usize = 4096;
    let others = if parallel { rayon::current_num_threads() - 1 } else { 0 };
    let (parts, running) = (&Mutex::new(parts), &AtomicUsize::new(others));
    let work = &|| {
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        iter::from_fn(next).for_each(&work);
    };
    rayon::in_place_scope(|scope| {
        for _ in 0..others {
            scope.spawn(move |_| {
                work();
                running.fetch_sub(1, Ordering::Release);
            });
        }
        work();
        let busy = || running.load(Ordering::Acquire) > 0;
        (0..LONGEST).take_while(|_| busy()).for_each(|_| hint::spin_loop());
    });
}
