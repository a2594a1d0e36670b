//! The devices that share each optimizer step.

mod lost;
#[cfg(feature = "remote")]
mod remote;

use core::{fmt, mem, str::FromStr};
use std::{
    panic::{self, AssertUnwindSafe},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{
        Device, Tensor,
        distributed::{ReduceOperation, all_reduce},
    },
};
use burn_optim::{GradientsAccumulator, GradientsParams};
use burn_train::TrainLoader;
use kv_eval::thread_pools;
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};

pub(crate) use self::lost::{blame, lost};
use crate::{
    Error, Result, Trainee,
    step::{BatchLoss, TrainedBatch},
};

/// The devices of a run. Each computes its share of the sequences of an optimizer step, and their
/// gradients are added up on the first one, which holds the optimizer.
///
/// burn-train's own workers deliver gradients in the order in which they finish, so that sums
/// differ from run to run, and copy all weights in each step, frozen ones as well.
pub(crate) struct Workers {
    /// At least one.
    workers: Vec<Worker>,
    /// True if the devices add up gradients by an all-reduce.
    all_reduces: bool,
    /// The time that devices of other machines may take for a step.
    #[cfg_attr(not(feature = "remote"), allow(dead_code, reason = "no other device has one"))]
    deadline: Duration,
}

struct Worker {
    device: Device,
    /// The worker's share of the training data.
    loader: TrainLoader<Trainee>,
    /// The model of the last step, on a device other than the first.
    replica: Option<Trainee>,
    /// The threads of a CPU device that is not alone.
    pool: Option<Arc<ThreadPool>>,
    /// The bytes moved in the last step.
    moved: Moved,
}

/// The bytes that a step moves between the first device and another one. Frozen weights and the
/// teacher move once, at the first step, and are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Trained weights, from the first device.
    pub(crate) weights: usize,
    /// Gradients, to the first device.
    pub(crate) gradients: usize,
}

/// The way in which the gradients of several devices are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// `Ddp` if the devices can, otherwise `Multi`.
    #[default]
    Auto,
    /// On the first device, which holds the optimizer and sends the new weights to the others.
    Multi,
    /// On all devices at once, by an all-reduce of NCCL between CUDA devices; the new weights come
    /// from the first device.
    Ddp,
}

impl Strategy {
    /// Returns whether `devices` add up gradients by an all-reduce.
    ///
    /// # Errors
    /// [`Error::Setting`] for `Ddp` with devices that have no all-reduce.
    pub fn all_reduces(self, devices: &[Device]) -> Result<bool> {
        let can = devices.len() > 1 && devices.iter().all(has_all_reduce);
        match self {
            Self::Auto => Ok(can),
            Self::Multi => Ok(false),
            Self::Ddp if can => Ok(true),
            Self::Ddp => {
                let rule = "only several CUDA devices with NCCL have an all-reduce; use multi";
                Err(Error::setting("strategy", self, rule))
            }
        }
    }
}

/// Returns whether the runtime of `device` has a transport between its devices.
fn has_all_reduce(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return {
        use kv_models::kv_cubecl::{Cuda, Target};
        let plain = device.clone().without_autodiff();
        Cuda::hosts(&plain)
            && kv_device::client(&plain).is_some_and(|client| client.has_device_transport())
    };
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        false
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Multi => "multi",
            Self::Ddp => "ddp",
        })
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::Auto, Self::Multi, Self::Ddp];
        let found = all.into_iter().find(|strategy| strategy.to_string() == text);
        found.ok_or_else(|| Error::setting("strategy", text, "must be auto, multi or ddp"))
    }
}

impl Workers {
    /// Shares out the items of each epoch of `loader`, as evenly as possible.
    pub(crate) fn new(
        devices: &[Device],
        strategy: Strategy,
        loader: &TrainLoader<Trainee>,
        deadline: Duration,
    ) -> Result<Self> {
        let (n, items) = (devices.len(), loader.num_items());
        let pools = thread_pools(devices)?;
        let worker = |(i, (device, pool)): (usize, (&Device, Option<ThreadPool>))| {
            let share = loader.slice(items * i / n, items * (i + 1) / n);
            let (device, loader) = (device.clone(), share.to_device(device));
            let (pool, moved) = (pool.map(Arc::new), Moved::default());
            Worker { device, loader, replica: None, pool, moved }
        };
        let all_reduces = strategy.all_reduces(devices)?;
        Ok(Self {
            workers: devices.iter().zip(pools).enumerate().map(worker).collect(),
            all_reduces,
            deadline,
        })
    }

    /// Returns the bytes that the last step moved for each device.
    pub(crate) fn moved(&self) -> Vec<Moved> {
        self.workers.iter().map(|worker| worker.moved).collect()
    }

    /// Computes the gradients of the next optimizer step of `model`, whose weights are on the first
    /// device. Calls `record` with the losses of its batches in their order. Workers start no more
    /// batches once `stop` returns true or one of them failed; `None` is a step that is not
    /// complete.
    ///
    /// # Errors
    /// The error of the first device that failed.
    pub(crate) fn step(
        &mut self,
        model: &Trainee,
        stop: &(dyn Fn() -> bool + Sync),
        record: &mut dyn FnMut(&BatchLoss),
    ) -> Result<Option<GradientsParams>> {
        let n_items: usize = self.workers.iter().map(|worker| worker.loader.num_items()).sum();
        #[cfg(feature = "remote")]
        if self.workers.iter().any(|worker| kv_device::is_remote(&worker.device)) {
            return self.step_within_deadline(model, stop, record, n_items);
        }
        if let [worker] = &*self.workers {
            let share = share(&worker.loader, model, stop, record)?;
            return Ok((share.sequences() == n_items).then_some(share.gradients));
        }
        let (mut sum, mut sequences) = (GradientsAccumulator::new(), 0);
        let main = self.workers[0].device.clone();
        for (i, share) in self.shares(model, stop).into_iter().enumerate() {
            let share = share?;
            sequences += share.sequences();
            share.losses.iter().for_each(&mut *record);
            // After an all-reduce, each device has the sum.
            if i == 0 || !self.all_reduces {
                let worker = &mut self.workers[i];
                let (gradients, bytes) = collected(share.gradients, model, &worker.device, &main);
                worker.moved.gradients = bytes;
                sum.accumulate(model, gradients);
            }
        }
        Ok((sequences == n_items).then(|| sum.grads()))
    }

    /// Computes the shares of all workers, each on a thread of its own.
    fn shares(&mut self, model: &Trainee, stop: &(dyn Fn() -> bool + Sync)) -> Vec<Result<Share>> {
        let main = self.workers[0].device.clone();
        // All copies start before an all-reduce, which could otherwise wait for one in a circle.
        let replica = |worker: &mut Worker| {
            let (replica, bytes) = replica(worker.replica.take(), model, &worker.device, &main);
            worker.moved = Moved { weights: bytes, gradients: 0 };
            replica
        };
        let replicas: Vec<Trainee> = self.workers.iter_mut().map(replica).collect();
        let failed = AtomicBool::new(false);
        let stop = || stop() || failed.load(Ordering::Relaxed);
        let devices: Vec<Device> =
            self.workers.iter().map(|worker| worker.device.clone()).collect();
        let reduces = self.all_reduces.then_some(&*devices);
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for (worker, replica) in self.workers.iter_mut().zip(replicas) {
                // A copy that is kept on the first device would hold the old weights in memory.
                let keep = worker.device != main;
                let (stop, failed) = (&stop, &failed);
                threads.push(scope.spawn(move || {
                    let share = worker.compute(&replica, reduces, stop);
                    failed.fetch_or(share.is_err(), Ordering::Relaxed);
                    worker.replica = keep.then_some(replica);
                    share
                }));
            }
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        })
    }
}

/// A worker's part of an optimizer step.
struct Share {
    gradients: GradientsParams,
    losses: Vec<BatchLoss>,
}

impl Share {
    fn sequences(&self) -> usize {
        self.losses.iter().map(|loss| loss.sequences).sum()
    }
}

impl Worker {
    /// Computes this worker's share with `model` on its threads. `reduces` are the devices whose
    /// gradients are added up by an all-reduce.
    fn compute(
        &self,
        model: &Trainee,
        reduces: Option<&[Device]>,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Share> {
        let share = || share(&self.loader, model, stop, &mut |_| ());
        let share = || match &self.pool {
            Some(pool) => pool.install(share),
            None => share(),
        };
        // The other devices would wait in an all-reduce for one that panicked.
        let mut share = panic::catch_unwind(AssertUnwindSafe(share))
            .unwrap_or_else(|panic| Err(lost::failed(&self.device, &*panic)));
        if let Some(devices) = reduces {
            // A device that failed takes part, too.
            let own = share.as_mut().map(|share| mem::take(&mut share.gradients));
            let sum = sum_on_all(own.unwrap_or_default(), model, &self.device, devices);
            share = share.map(|share| Share { gradients: sum, ..share });
        }
        share
    }
}

/// Computes the batches of a worker's share, and calls `each` after each of them.
fn share(
    loader: &TrainLoader<Trainee>,
    model: &Trainee,
    stop: &(dyn Fn() -> bool + Sync),
    each: &mut dyn FnMut(&BatchLoss),
) -> Result<Share> {
    let (mut sum, mut losses) = (GradientsAccumulator::new(), Vec::new());
    for batch in loader.iter() {
        // A run that resumes computes the whole step again.
        if stop() {
            break;
        }
        let batch = batch.map_err(|error| Error::Stopped(error.to_string()))?;
        let TrainedBatch { gradients, loss } = model.train_batch(batch)?;
        sum.accumulate(model, gradients);
        each(&loss);
        losses.push(loss);
    }
    Ok(Share { gradients: sum.grads(), losses })
}

/// Returns the model on `device`, and the bytes of trained weights that were moved there. `old` is
/// the copy of the last step.
fn replica(
    old: Option<Trainee>,
    model: &Trainee,
    device: &Device,
    main: &Device,
) -> (Trainee, usize) {
    let (replica, bytes) = match old {
        Some(old) => updated(old, model, device),
        None => (model.clone().replica(device), trained_bytes(model)),
    };
    (replica, if device == main { 0 } else { bytes })
}

/// Returns gradients of `device` on the first device, and the bytes that were moved there.
fn collected(
    gradients: GradientsParams,
    model: &Trainee,
    device: &Device,
    main: &Device,
) -> (GradientsParams, usize) {
    if device == main {
        return (gradients, 0);
    }
    let bytes = bytes_of(&gradients, model);
    (gradients.to_device(main, model), bytes)
}

/// Returns the bytes of the trained weights of a model.
fn trained_bytes(model: &Trainee) -> usize {
    let mut count = Count { among: None, bytes: 0 };
    model.visit(&mut count);
    count.bytes
}

/// Returns the bytes of gradients.
fn bytes_of(gradients: &GradientsParams, model: &Trainee) -> usize {
    let mut count = Count { among: Some(gradients), bytes: 0 };
    model.visit(&mut count);
    count.bytes
}

/// Counts the bytes of trained weights, all or those that have a gradient.
struct Count<'a> {
    among: Option<&'a GradientsParams>,
    bytes: usize,
}

impl ModuleVisitor for Count<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let counts = match self.among {
            Some(gradients) => gradients.get::<D>(param.id).is_some(),
            None => param.is_require_grad(),
        };
        if counts {
            let weight = param.val();
            self.bytes += weight.shape().num_elements() * weight.dtype().size();
        }
    }
}

/// Copies the trained weights of `model` into its replica on `device`, and returns their bytes.
/// Frozen weights stay there.
fn updated(replica: Trainee, model: &Trainee, device: &Device) -> (Trainee, usize) {
    struct Trained<'a>(GradientsParams, &'a Device);
    impl ModuleVisitor for Trained<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0.register(param.id, param.val());
            }
        }
    }
    impl ModuleMapper for Trained<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match self.0.remove::<D>(param.id) {
                Some(new) => param.map(|_| new.to_device(self.1).detach().require_grad()),
                None => param,
            }
        }
    }
    let mut trained = Trained(GradientsParams::new(), device);
    model.visit(&mut trained);
    let bytes = trained_bytes(model);
    (replica.map(&mut trained), bytes)
}

/// Adds up the gradients of `devices` on each of them by an all-reduce, which all of them must call
/// once in a step. A weight without a gradient counts as 0.
fn sum_on_all(
    gradients: GradientsParams,
    model: &Trainee,
    device: &Device,
    devices: &[Device],
) -> GradientsParams {
    struct Sum {
        gradients: GradientsParams,
        device: Device,
        devices: Vec<Device>,
    }
    impl ModuleVisitor for Sum {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                let own = self.gradients.remove::<D>(param.id);
                let own = own.unwrap_or_else(|| Tensor::zeros(param.shape(), &self.device));
                let sum = all_reduce(own, ReduceOperation::Sum, self.devices.clone());
                self.gradients.register(param.id, sum.resolve());
            }
        }
    }
    let plain = |device: &Device| device.clone().without_autodiff();
    let devices = devices.iter().map(plain).collect();
    let mut sum = Sum { gradients, device: plain(device), devices };
    // The other devices would wait forever for one that fails here.
    let visited = panic::catch_unwind(AssertUnwindSafe(|| model.visit(&mut sum)));
    if visited.is_err() {
        process::abort();
    }
    sum.gradients
}

#[cfg(all(test, feature = "flex"))]
mod tests;
