//! Parallel work in parts.
//!
//! A decode step consists of about a hundred operations of 10 to 150 microseconds each. Waking a
//! thread takes 40 to 90. So threads of rayon's pool that have helped stay awake for a while and
//! join the next operation within a microsecond. While they wait, they run other tasks of the pool.

use core::{
    hint, iter,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

/// Time for which an idle thread stays awake, longer than that between two operations of a step.
const AWAKE: Duration = Duration::from_micros(200);
/// Pauses before a waiting thread checks the clock and looks for other tasks.
const PAUSES: usize = 32;

/// Runs `work` once for each part.
///
/// If `parallel`, awake threads of rayon's pool help, and sleeping ones are woken for later calls.
/// If another thread already runs parts in parallel, this thread works alone.
pub fn in_parts<T: Send>(
    parts: impl Iterator<Item = T> + Send,
    parallel: bool,
    work: impl Fn(T) + Sync,
) {
    let threads = if parallel { rayon::current_num_threads() } else { 1 };
    in_parts_with(vec![(); threads], parts, |(), part| work(part));
}

/// Runs `work` once for each part, [as `in_parts`](in_parts) does, on as many threads as `memory`
/// has elements. Each thread keeps one of them for all of its parts.
pub fn in_parts_with<M: Send, T: Send>(
    mut memory: Vec<M>,
    parts: impl Iterator<Item = T> + Send,
    work: impl Fn(&mut M, T) + Sync,
) {
    if let [memory] = &mut memory[..] {
        return parts.for_each(|part| work(memory, part));
    }
    let helpers = memory.len().saturating_sub(1);
    let (memory, parts) = (Mutex::new(memory), Mutex::new(parts));
    let work = || {
        // More threads may come to help than there is memory for.
        let Some(mut memory) = lock(&memory).pop() else { return };
        iter::from_fn(|| lock(&parts).next()).for_each(|part| work(&mut memory, part));
    };
    TEAM.share(&work, helpers);
}

static TEAM: Team = Team {
    job: Mutex::new(None),
    jobs: AtomicUsize::new(0),
    running: AtomicUsize::new(0),
    awake: AtomicUsize::new(0),
};

/// Threads that help each other.
struct Team {
    /// The current job, which any thread may join.
    job: Mutex<Option<Job>>,
    /// Number of jobs started.
    jobs: AtomicUsize,
    /// Number of threads that help with the job.
    running: AtomicUsize,
    /// Number of threads that are awake or waking up.
    awake: AtomicUsize,
}

/// Work that stays valid until [`Close`] is dropped.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: the pointee is `Sync` and outlives the job.
unsafe impl Send for Job {}

impl Team {
    /// Calls `work` on this thread and on helpers, and returns when all calls have returned.
    fn share(&'static self, work: &(dyn Fn() + Sync), helpers: usize) {
        let mut job = lock(&self.job);
        if job.is_some() {
            drop(job);
            return work();
        }
        // SAFETY: only the lifetime changes. Helpers read the job under its lock and are counted
        // before they release it. `Close` removes the job and waits for those that were counted.
        *job = Some(Job(unsafe {
            core::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync)>(work)
        }));
        drop(job);
        let close = Close(self);
        self.jobs.fetch_add(1, Ordering::Release);
        while self.awake.load(Ordering::Relaxed) < helpers {
            self.awake.fetch_add(1, Ordering::Relaxed);
            rayon::spawn(|| self.help());
        }
        work();
        drop(close);
    }

    /// Helps with jobs until there has been none for a while.
    fn help(&self) {
        // `jobs` already counts the job for which this thread was woken.
        let (mut seen, mut since) = (usize::MAX, Instant::now());
        loop {
            let jobs = self.jobs.load(Ordering::Acquire);
            if jobs != seen {
                seen = jobs;
                self.join();
                since = Instant::now();
            }
            for _ in 0..PAUSES {
                hint::spin_loop();
            }
            let worked = rayon::yield_now() == Some(rayon::Yield::Executed);
            if worked {
                since = Instant::now();
            } else if since.elapsed() > AWAKE {
                break;
            }
        }
        self.awake.fetch_sub(1, Ordering::Relaxed);
    }

    /// Helps with the job, if there is one.
    fn join(&self) {
        let (work, running) = {
            let job = lock(&self.job);
            let Some(Job(work)) = *job else { return };
            self.running.fetch_add(1, Ordering::Relaxed);
            (work, Running(self))
        };
        // SAFETY: the job stays valid while this thread is counted.
        unsafe { (*work)() };
        drop(running);
    }
}

/// Counts a helping thread until it is dropped.
struct Running<'a>(&'a Team);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Release);
    }
}

/// Ends the job when it is dropped.
struct Close<'a>(&'a Team);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        *lock(&self.0.job) = None;
        let mut pauses = 0usize;
        while self.0.running.load(Ordering::Acquire) > 0 {
            pauses += 1;
            // The operating system may have preempted a helper.
            if pauses > 4096 { thread::yield_now() } else { hint::spin_loop() }
        }
    }
}

/// Locks a mutex. Poisoning is ignored: no panic leaves the locked data inconsistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn concurrent_and_nested_callers_run_each_part_once() {
        let sum = |n: u64| {
            let done: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
            in_parts(done.iter(), true, |part| {
                part.fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1));
        };
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..3000).for_each(|i| sum(i % 37)));
            }
        });
        in_parts(0..20, true, |_| sum(100));
        rayon::join(|| sum(1000), || sum(1000));
        // Helpers fall asleep and wake again.
        thread::sleep(10 * AWAKE);
        sum(10);
    }
}
