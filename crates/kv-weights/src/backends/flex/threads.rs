//! Work in parts, on all threads.
//!
//! A decode step is a hundred products of 10 to 50 microseconds each, and a sleeping thread takes as long to wake. So
//! threads of rayon's pool that have helped stay awake for a while, and join the next product within a microsecond.
//! While they wait they do what else the pool has to do.

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

/// How long a thread that has nothing to help with stays awake: longer than what is between two products of a step.
const AWAKE: Duration = Duration::from_micros(200);
/// Pauses after which a waiting thread looks at the clock and for other work.
const PAUSES: usize = 32;

/// Does each part once: alone, or if it is worth it (`parallel`) with the threads of rayon's pool that are awake. Those
/// that sleep are woken for the products that follow. If another thread is at work in parts already, this one does its
/// own alone.
pub fn in_parts<T: Send>(
    parts: impl Iterator<Item = T> + Send,
    parallel: bool,
    work: impl Fn(T) + Sync,
) {
    let helpers = if parallel { rayon::current_num_threads() - 1 } else { 0 };
    if helpers == 0 {
        return parts.for_each(work);
    }
    let parts = Mutex::new(parts);
    let next = || lock(&parts).next();
    TEAM.share(&|| iter::from_fn(next).for_each(&work), helpers);
}

static TEAM: Team = Team {
    job: Mutex::new(None),
    jobs: AtomicUsize::new(0),
    running: AtomicUsize::new(0),
    awake: AtomicUsize::new(0),
};

/// Threads that help one another.
struct Team {
    /// What is to be done now, by as many threads as will.
    job: Mutex<Option<Job>>,
    /// How many jobs there were.
    jobs: AtomicUsize,
    /// Threads that help with the job.
    running: AtomicUsize,
    /// Threads that are awake, or are waking up.
    awake: AtomicUsize,
}

/// Work that lasts until [`Close`] is dropped.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: what it points to may be shared by threads, and is there as long as the job is.
unsafe impl Send for Job {}

impl Team {
    /// Calls `work` on this thread and on helpers, and returns when all have ended.
    fn share(&'static self, work: &(dyn Fn() + Sync), helpers: usize) {
        let mut job = lock(&self.job);
        if job.is_some() {
            drop(job);
            return work();
        }
        // SAFETY: only the lifetime changes. Helpers read the job under its lock while it is there, and are counted
        // before they unlock it; `Close` takes the job away and waits for those that were counted.
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
        // The job for which this thread was woken has been counted already.
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
        // SAFETY: the job is not over before this thread is no longer counted.
        unsafe { (*work)() };
        drop(running);
    }
}

/// A thread that is counted as helping.
struct Running<'a>(&'a Team);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Release);
    }
}

/// Ends the job.
struct Close<'a>(&'a Team);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        *lock(&self.0.job) = None;
        let mut pauses = 0usize;
        while self.0.running.load(Ordering::Acquire) > 0 {
            pauses += 1;
            // A helper may have lost its processor to another program.
            if pauses > 4096 { thread::yield_now() } else { hint::spin_loop() }
        }
    }
}

/// No panic leaves what is locked here half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn each_part_is_done_once_by_callers_side_by_side_and_within_one_another() {
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
        // Helpers go to sleep in the end, and wake again.
        thread::sleep(10 * AWAKE);
        sum(10);
    }
}
