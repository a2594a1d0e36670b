//! Parallel work in parts.
//!
//! A decode step consists of about a hundred operations of 10 to 150 microseconds each, and waking
//! a thread takes 40 to 90 microseconds. So threads of rayon's pool that have helped stay awake for
//! a while and join the next operation within a microsecond. While they wait, they run other tasks
//! of the pool.

use core::{
    cell::Cell,
    hint, iter,
    panic::AssertUnwindSafe,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};
use std::{
    panic,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use burn::{backend::DispatchDevice, tensor::Device};
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Time for which an idle thread stays awake, longer than that between two operations of a step.
const AWAKE: Duration = Duration::from_micros(200);
/// Pauses before a waiting thread checks the clock and looks for other tasks.
const PAUSES: usize = 32;

/// Runs `work` once for each part.
///
/// If `parallel`, awake threads of rayon's pool help, and sleeping ones are woken for later calls.
/// If another thread already runs parts in parallel, this thread works alone.
///
/// # Panics
/// Panics if `work` does, on any thread. Parts may then be left out.
pub fn in_parts<T: Send>(
    parts: impl Iterator<Item = T> + Send,
    parallel: bool,
    work: impl Fn(T) + Sync,
) {
    let threads = if parallel { rayon::current_num_threads() } else { 1 };
    in_parts_with(vec![(); threads], parts, |(), part| work(part));
}

/// Runs `work` once for each part, [as `in_parts`](in_parts) does, on at most as many threads as
/// `scratch` has elements. Each thread keeps one of them for all of its parts.
///
/// # Panics
/// Panics if `scratch` is empty, or if `work` does on any thread. Parts may then be left out.
pub fn in_parts_with<S: Send, T: Send>(
    mut scratch: Vec<S>,
    parts: impl Iterator<Item = T> + Send,
    work: impl Fn(&mut S, T) + Sync,
) {
    let mut own = scratch.pop().expect("the calling thread needs scratch memory");
    let helpers = scratch.len().min(rayon::current_num_threads() - 1);
    if helpers == 0 {
        return parts.for_each(|part| work(&mut own, part));
    }
    let (scratch, parts) = (Mutex::new(scratch), Mutex::new(parts));
    let work_with = |scratch: &mut S| {
        iter::from_fn(|| lock(&parts).next()).for_each(|part| work(scratch, part))
    };
    let help = || {
        // More threads may come to help than there is scratch memory for.
        let scratch = lock(&scratch).pop();
        if let Some(mut scratch) = scratch {
            work_with(&mut scratch);
        }
    };
    TEAM.get().share(&help, helpers, || work_with(&mut own));
}

/// Returns a pool of threads for each device of the CPU if there are several devices, so that they
/// work at the same time: the threads of the current pool are shared out among them, and each gets
/// at least one. `None` means the current pool.
///
/// # Errors
/// Threads that cannot be started.
pub fn pools(devices: &[Device]) -> Result<Vec<Option<ThreadPool>>, ThreadPoolBuildError> {
    let on_cpu = |device: &Device| {
        matches!(device.clone().without_autodiff().as_dispatch(), DispatchDevice::Flex(_))
    };
    let sharing = devices.iter().filter(|device| on_cpu(device)).count();
    if devices.len() < 2 || sharing == 0 {
        return Ok(devices.iter().map(|_| None).collect());
    }
    let all = rayon::current_num_threads();
    let own = |device| on_cpu(device).then(|| pool((all / sharing).max(1), all)).transpose();
    devices.iter().map(own).collect()
}

/// Creates a pool of `threads` of `all`, which help each other with [parts](in_parts), and no other
/// threads.
fn pool(threads: usize, all: usize) -> Result<ThreadPool, ThreadPoolBuildError> {
    // Threads that are awake may still use it when the pool is dropped.
    let team: &'static Team = Box::leak(Box::new(Team::new()));
    let start = move |_| {
        TEAM.set(team);
        ALL_THREADS.set(Some(all));
    };
    ThreadPoolBuilder::new().num_threads(threads).start_handler(start).build()
}

/// Returns the number of threads by which to split a sum: that of all [pools] together, so that
/// results do not depend on the number of devices.
pub fn all_threads() -> usize {
    ALL_THREADS.get().unwrap_or_else(rayon::current_num_threads)
}

/// The team of the threads that are in no [pool].
static SHARED: Team = Team::new();

thread_local! {
    /// The team of the current thread.
    static TEAM: Cell<&'static Team> = Cell::new(&SHARED);

    /// The threads of all pools together, in a pool of several.
    static ALL_THREADS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Threads that help each other.
struct Team {
    /// The current job, which any thread may join.
    job: Mutex<Option<Job>>,
    /// Number of jobs started.
    jobs: AtomicUsize,
    /// Number of threads that are awake or waking up.
    awake: AtomicUsize,
}

/// Work that stays valid until [`Close`] is dropped.
#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn() + Sync),
    /// Number of threads that help. Each job has its own: a helper that runs parts of parts starts
    /// another job if this one has been closed, and must not wait for itself.
    running: *const AtomicUsize,
}

// SAFETY: the pointees are `Sync` and outlive the job.
unsafe impl Send for Job {}

impl Team {
    const fn new() -> Self {
        Self { job: Mutex::new(None), jobs: AtomicUsize::new(0), awake: AtomicUsize::new(0) }
    }

    /// Calls `own` on this thread and `help` on helpers, and returns when all calls have returned.
    fn share(&'static self, help: &(dyn Fn() + Sync), helpers: usize, own: impl FnOnce()) {
        let mut job = lock(&self.job);
        if job.is_some() {
            drop(job);
            return own();
        }
        // A panic in a task of rayon's would end the process. The caller's thread raises it.
        let panic = Mutex::new(None);
        let help = || {
            if let Err(payload) = panic::catch_unwind(AssertUnwindSafe(help)) {
                *lock(&panic) = Some(payload);
            }
        };
        let help: &(dyn Fn() + Sync) = &help;
        let running = AtomicUsize::new(0);
        // SAFETY: only the lifetime changes. Helpers read the job under its lock and are counted
        // before they release it. `Close` removes the job and waits for those that were counted.
        let work = unsafe {
            core::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync)>(help)
        };
        *job = Some(Job { work, running: &raw const running });
        drop(job);
        let close = Close { team: self, running: &running };
        self.jobs.fetch_add(1, Ordering::Release);
        while self.awake.load(Ordering::Relaxed) < helpers {
            self.awake.fetch_add(1, Ordering::Relaxed);
            rayon::spawn(|| self.help());
        }
        own();
        drop(close);
        let panic = lock(&panic).take();
        if let Some(payload) = panic {
            panic::resume_unwind(payload);
        }
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
            let Some(Job { work, running }) = *job else { return };
            // SAFETY: the job is open, and stays valid while this thread is counted.
            let running = unsafe { &*running };
            running.fetch_add(1, Ordering::Relaxed);
            (work, Running(running))
        };
        // SAFETY: as above.
        unsafe { (*work)() };
        drop(running);
    }
}

/// Counts a helping thread until it is dropped.
struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Ends the job when it is dropped.
struct Close<'a> {
    team: &'static Team,
    running: &'a AtomicUsize,
}

impl Drop for Close<'_> {
    fn drop(&mut self) {
        *lock(&self.team.job) = None;
        let mut pauses = 0usize;
        while self.running.load(Ordering::Acquire) > 0 {
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
    use std::sync::mpsc;

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

    /// A helper that still runs a part when all others have ended runs its own parts as a new job.
    #[test]
    fn late_helpers_run_parts_of_parts() {
        let (done, all) = mpsc::channel();
        thread::spawn(move || {
            let caller = thread::current().id();
            for _ in 0..100 {
                in_parts(0..2, true, |_| {
                    let helps = thread::current().id() != caller;
                    thread::sleep(Duration::from_micros(if helps { 1000 } else { 100 }));
                    in_parts(0..4, true, |_| ());
                });
            }
            done.send(())
        });
        all.recv_timeout(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn each_part_gets_scratch_memory_of_one_thread() {
        for threads in 1..6 {
            for n in [0, 1, 7, 1000] {
                let done: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
                let mut scratch = vec![0; threads];
                in_parts_with(scratch.iter_mut().collect(), done.iter(), |mine, part| {
                    **mine += 1;
                    part.fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1));
                assert_eq!(scratch.iter().sum::<usize>(), n, "{threads} threads");
            }
        }
    }

    /// While one pool runs parts, another one does not have to work alone.
    #[test]
    fn pools_work_in_parallel_at_the_same_time() {
        let work = |threads: usize| {
            let seen = Mutex::new(std::collections::BTreeSet::new());
            pool(threads, 7).unwrap().install(|| {
                assert_eq!(all_threads(), 7);
                in_parts(0..40, true, |_| {
                    lock(&seen).insert(rayon::current_thread_index());
                    thread::sleep(Duration::from_millis(2));
                });
            });
            seen.into_inner().unwrap()
        };
        thread::scope(|scope| {
            let pools: Vec<_> = (0..2).map(|_| scope.spawn(|| work(3))).collect();
            for pool in pools {
                assert_eq!(pool.join().unwrap(), [Some(0), Some(1), Some(2)].into());
            }
        });
        assert_eq!(work(1), [Some(0)].into());
    }

    #[test]
    fn devices_of_the_cpu_share_out_its_threads() {
        let threads = rayon::current_num_threads();
        for n in [2, 3, 2 * threads] {
            let pools = pools(&vec![Device::flex(); n]).unwrap();
            assert_eq!(pools.len(), n);
            for pool in pools {
                assert_eq!(pool.unwrap().current_num_threads(), (threads / n).max(1));
            }
        }
        assert!(matches!(pools(&[Device::flex()]).unwrap()[..], [None]));
    }

    /// The panic of a helper reaches the caller, and later calls have helpers again.
    #[test]
    fn a_panic_of_any_thread_reaches_the_caller() {
        for part in [0, 1, 500, 999] {
            let result = panic::catch_unwind(|| {
                in_parts(0..1000, true, |i| {
                    thread::sleep(Duration::from_micros(5));
                    assert!(i != part, "part {part} fails");
                });
            });
            let message = result.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(*message, format!("part {part} fails"));
        }
        let helped = AtomicU32::new(0);
        let caller = thread::current().id();
        in_parts(0..1000, true, |_| {
            thread::sleep(Duration::from_micros(5));
            if thread::current().id() != caller {
                helped.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(rayon::current_num_threads() == 1 || helped.load(Ordering::Relaxed) > 0);
    }
}
