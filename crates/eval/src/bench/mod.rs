//! Benchmarks of attention, caches and whole models.
//!
//! Machines are shared and clock rates vary. So all subjects of a comparison are timed in turn, and
//! rates are compared with the rate of copying memory in the same run.

mod attention;
mod codec;
mod frames;
mod llm;
mod model;
mod size;
mod sparse;

use std::{hint::black_box, time::Instant};

use burn::tensor::Tensor;
use kv_cubecl::{On, Target};
use kv_models::spans::{OPERATION, PHASE};
use rayon::prelude::*;
use serde::Serialize;
use tracing::trace_span;

pub use attention::{
    AppendPoint, AttentionPlan, AttentionPoint, time_append, time_decode_attention,
};
pub use codec::{CodecPoint, codec_bytes, time_codec};
pub use frames::{FramesPlan, FramesPoint, time_frames};
pub use llm::{LlmPlan, LlmPoint, Spread, time_llm};
pub use model::{DecodePoint, DecodeSubject, PrefillPoint, time_decode, time_prefill, timed_steps};
pub use sparse::{RowCodes, SparseFormats, SparsePlan, SparsePoint, time_sparse};

use crate::{Error, Result};

/// Times of one subject in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// The median.
    pub median: f64,
    /// The 10th percentile.
    pub low: f64,
    /// The 90th percentile.
    pub high: f64,
    /// Number of samples taken.
    pub samples: usize,
}

impl Timing {
    /// Computes the statistics of samples in any order.
    ///
    /// # Errors
    /// [`Error::Plan`] without a sample.
    pub fn of(mut seconds: Vec<f64>) -> Result<Self> {
        if seconds.is_empty() {
            return Err(Error::plan("samples", 0, "must be at least 1"));
        }
        let last = seconds.len() - 1;
        let median = median(&mut seconds);
        let at = |tenths: usize| seconds[(last * tenths + 5) / 10];
        Ok(Self { median, low: at(1), high: at(9), samples: seconds.len() })
    }

    /// Returns the times of one of `parts` equal parts.
    #[must_use]
    pub fn divided_by(self, parts: f64) -> Self {
        let Self { median, low, high, samples } = self;
        Self { median: median / parts, low: low / parts, high: high / parts, samples }
    }
}

/// Returns the median and sorts `samples` in place.
pub fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// An operation to time repeatedly.
pub type Subject<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

const WARM_UP: usize = 2;

/// Times each of `subjects` once per round, so other load of the machine affects all of them
/// equally.
///
/// # Errors
/// The errors of the subjects, and [`Error::Plan`] without a round.
pub fn time_in_turn(rounds: usize, mut subjects: Vec<Subject<'_>>) -> Result<Vec<Timing>> {
    size::check_samples("samples", rounds)?;
    let mut seconds = vec![Vec::with_capacity(rounds); subjects.len()];
    for round in 0..WARM_UP + rounds {
        for (subject, seconds) in subjects.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            subject()?;
            if round >= WARM_UP {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    seconds.into_iter().map(Timing::of).collect()
}

/// Bytes of a buffer for [`copy_bandwidth`]: more than processors' caches hold, and within WebGPU's
/// limit of a binding.
pub const COPIED: usize = 128 << 20;

/// Measures the bytes copied per second between two buffers of `bytes` each: on the CPU by all
/// threads, otherwise by the device, whose allocator then releases unused memory.
///
/// # Errors
/// [`Error::Device`].
pub fn copy_bandwidth<T: Target>(device: &On<T>, bytes: usize, rounds: usize) -> Result<f64> {
    let _phase = trace_span!(target: PHASE, "copy").entered();
    let (mut copy, mut round) = (copier(device, bytes), 0);
    let traced: Subject<'_> = Box::new(move || {
        round += 1;
        // The first touch of pages and the compilation of kernels are not a copy's time.
        let _span = (round > WARM_UP)
            .then(|| trace_span!(target: OPERATION, "buffer", bytes = bytes as u64).entered());
        copy()
    });
    let timing = time_in_turn(rounds, vec![traced])?;
    // A device's allocator would keep these buffers, which are large.
    let _ = device.sync();
    device.memory_cleanup();
    Ok(bytes as f64 / timing[0].median)
}

/// Returns the operation that copies `bytes` from one buffer to another: on the CPU by all threads,
/// otherwise by the device.
fn copier<'a, T: Target>(device: &On<T>, bytes: usize) -> Subject<'a> {
    if T::NAME == "flex" {
        let source = vec![1u8; bytes];
        let mut target = vec![0u8; bytes];
        let part = bytes.div_ceil(rayon::current_num_threads());
        return Box::new(move || {
            let parts = target.par_chunks_mut(part).zip(source.par_chunks(part));
            parts.for_each(|(target, source)| target.copy_from_slice(black_box(source)));
            black_box(&target);
            Ok(())
        });
    }
    let source = Tensor::<1>::ones([bytes.div_ceil(size_of::<f32>())], &**device);
    Box::new(move || {
        // Adding 1 copies the data; a clone would share the buffer. An element is read back
        // to wait for the device; it is only read when its value is used.
        let last = source.dims()[0] - 1;
        let copied = source.clone().add_scalar(1.0).narrow(0, last, 1).try_into_data();
        copied.map(|data| _ = black_box(data.iter::<f32>().next())).map_err(|error| Error::Device {
            cache: format!("copy on {}", T::NAME),
            why: format!("{error:?}"),
        })
    })
}

fn no_graph_capture<T: Target>() -> Error {
    Error::plan("graph_capture", true, format!("{} cannot capture launches", T::NAME))
}

/// Waits until the device has completed all work.
pub(crate) fn wait<T: Target>(device: &On<T>) -> Result<()> {
    let _span = trace_span!(target: OPERATION, "wait").entered();
    device.sync().map_err(|error| Error::Device {
        cache: format!("on {}", T::NAME),
        why: format!("{error:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_sorted_samples() {
        let samples = (0..11).rev().map(f64::from).collect();
        let timing = Timing::of(samples).unwrap();
        assert_eq!((timing.low, timing.median, timing.high), (1.0, 5.0, 9.0));
        assert!(Timing::of(vec![]).is_err());
        let one = Timing::of(vec![3.0]).unwrap();
        assert_eq!((one.low, one.median, one.high), (3.0, 3.0, 3.0));
    }

    #[test]
    fn subjects_take_turns_and_warm_up_does_not_count() {
        let order = std::cell::RefCell::new(Vec::new());
        let subject = |name: char| -> Subject<'_> {
            let order = &order;
            Box::new(move || {
                order.borrow_mut().push(name);
                Ok(())
            })
        };
        let timings = time_in_turn(3, vec![subject('a'), subject('b')]).unwrap();
        assert_eq!(timings.iter().map(|t| t.samples).collect::<Vec<_>>(), [3, 3]);
        assert_eq!(order.take(), "ab".repeat(5).chars().collect::<Vec<_>>());
    }
}
