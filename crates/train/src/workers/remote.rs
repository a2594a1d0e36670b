//! A step on devices of other machines: none of them can hold it up forever.
//!
//! A read from a device that does not answer blocks its thread, and nothing ends such a thread. So
//! all work on the devices runs on threads that a step can leave behind.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use burn::tensor::Device;
use burn_optim::{GradientsAccumulator, GradientsParams};

use super::{Moved, Share, Worker, Workers, collected, lost, replica};
use crate::{Error, Result, Trainee, step::BatchLoss};

/// The time between two looks at whether the run was asked to stop.
const POLL: Duration = Duration::from_millis(20);

/// The longest deadline, which the clock can count: a year.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// The result of a worker's thread.
struct Done {
    /// The number of the worker.
    worker: usize,
    share: Result<Share>,
    /// The model on the worker's device and the bytes that moved there, if they came that far.
    replica: Option<(Trainee, usize)>,
}

impl Workers {
    /// Computes a step like [`step`](Self::step), but fails after the deadline.
    pub(super) fn step_within_deadline(
        &mut self,
        model: &Trainee,
        stop: &(dyn Fn() -> bool + Sync),
        record: &mut dyn FnMut(&BatchLoss),
        n_items: usize,
    ) -> Result<Option<GradientsParams>> {
        let devices: Vec<Device> =
            self.workers.iter().map(|worker| worker.device.clone()).collect();
        let end = Instant::now() + self.deadline.min(LONGEST);
        let main = devices[0].clone();
        let mut shares = Vec::new();
        for (worker, share) in self.shares_within(end, model, stop)?.into_iter().enumerate() {
            let share = share?;
            share.losses.iter().for_each(&mut *record);
            shares.push((devices[worker].clone(), share));
        }
        let sequences: usize = shares.iter().map(|(_, share)| share.sequences()).sum();
        let model = model.clone();
        let (sum, bytes) = within(end, self.deadline, &main.clone(), move || {
            let (mut sum, mut bytes) = (GradientsAccumulator::new(), Vec::new());
            for (device, share) in shares {
                let (gradients, moved) = collected(share.gradients, &model, &device, &main);
                sum.accumulate(&model, gradients);
                bytes.push(moved);
            }
            // A gradient that did not arrive fails here and not in the optimizer.
            let synced =
                main.sync().map_err(|error| lost::failed(&main, &error.reason().to_string()));
            synced.map(|()| (sum.grads(), bytes))
        })?;
        for (worker, bytes) in self.workers.iter_mut().zip(bytes) {
            worker.moved.gradients = bytes;
        }
        Ok((sequences == n_items).then_some(sum))
    }

    /// Computes the shares of all workers, each on a thread of its own.
    fn shares_within(
        &mut self,
        end: Instant,
        model: &Trainee,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Result<Share>>> {
        let stopped = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = channel();
        let main = self.workers[0].device.clone();
        for (i, worker) in self.workers.iter_mut().enumerate() {
            let (old, own) = (worker.replica.take(), worker.detached());
            let (model, main) = (model.clone(), main.clone());
            let (stopped, sender) = (stopped.clone(), sender.clone());
            thread::spawn(move || {
                let replica = panic::catch_unwind(AssertUnwindSafe(|| {
                    replica(old, &model, &own.device, &main)
                }));
                drop(model);
                let (share, replica) = match replica {
                    Ok((replica, bytes)) => {
                        let stop = || stopped.load(Ordering::Relaxed);
                        let share = own.compute(&replica, None, &stop);
                        (share, (own.device != main).then_some((replica, bytes)))
                    }
                    Err(panic) => (Err(lost::failed(&own.device, &*panic)), None),
                };
                stopped.fetch_or(share.is_err(), Ordering::Relaxed);
                // Nobody receives after the deadline.
                let _ = sender.send(Done { worker: i, share, replica });
            });
        }
        drop(sender);
        let done = self.wait(&receiver, end, || {
            stopped.fetch_or(stop(), Ordering::Relaxed);
        });
        // Workers that are late must not start another batch.
        stopped.fetch_or(done.is_err(), Ordering::Relaxed);
        let mut shares = Vec::new();
        for Done { worker, share, replica } in done? {
            let worker = &mut self.workers[worker];
            worker.moved = Moved::default();
            if let Some((replica, bytes)) = replica {
                worker.moved.weights = bytes;
                worker.replica = Some(replica);
            }
            shares.push(share);
        }
        Ok(shares)
    }

    /// Waits until all workers are done, and returns what they did in the order of the workers. A
    /// worker that failed ends the wait.
    fn wait(&self, receiver: &Receiver<Done>, end: Instant, poll: impl Fn()) -> Result<Vec<Done>> {
        let mut all: Vec<Option<Done>> = self.workers.iter().map(|_| None).collect();
        while all.iter().any(Option::is_none) {
            poll();
            let left = end.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(POLL.min(left)) {
                // The others may wait for the one that failed.
                Ok(Done { share: Err(error), .. }) => return Err(error),
                Ok(done) => {
                    let worker = done.worker;
                    all[worker] = Some(done);
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(_) => {
                    let late = all.iter().position(Option::is_none).unwrap_or_default();
                    return Err(late_error(&self.workers[late].device, self.deadline));
                }
            }
        }
        Ok(all.into_iter().flatten().collect())
    }
}

impl Worker {
    /// Returns the same worker for a thread of its own, without the model.
    fn detached(&self) -> Self {
        let Self { device, loader, pool, .. } = self;
        let (device, loader, pool) = (device.clone(), loader.clone(), pool.clone());
        Self { device, loader, replica: None, pool, moved: Moved::default() }
    }
}

/// Runs `work`, which uses `device`, on a thread of its own until `end`.
///
/// # Errors
/// The error of `work`, or of a device that fails or is late.
fn within<T: Send + 'static>(
    end: Instant,
    deadline: Duration,
    device: &Device,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let _ = sender.send(panic::catch_unwind(AssertUnwindSafe(work)));
    });
    match receiver.recv_timeout(end.saturating_duration_since(Instant::now())) {
        Ok(Ok(done)) => done,
        Ok(Err(panic)) => Err(lost::failed(device, &*panic)),
        Err(_) => Err(late_error(device, deadline)),
    }
}

fn late_error(device: &Device, deadline: Duration) -> Error {
    Error::Worker {
        device: lost::place(device).unwrap_or_else(|| format!("{device:?}")),
        why: format!(
            "its share of the step took longer than --worker-deadline {}",
            deadline.as_secs()
        ),
    }
}
