//! Benchmarks of a frame's attention over a full ring of frames in one layer.

use burn::tensor::{Distribution, Tensor};
use kv_cubecl::{
    CacheShape, FrameCache, FrameConfig, Frames, KvCacheConfig, On, RunningScale, Sides, Target,
};
use kv_models::spans::PHASE;
use serde::Serialize;
use tracing::trace_span;

use super::{Subject, Timing, size, time_in_turn, wait};
use crate::{Error, Result};

/// The shape of an attention layer over frames, and the settings of its benchmark.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FramesPlan {
    /// Streams.
    pub batch: usize,
    /// Heads.
    pub n_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Tokens of a frame.
    pub tokens_per_frame: usize,
    /// Frames of the ring, including the one that attends.
    pub window: Frames,
    /// Rules for the running scales, for sides that take their scales from frames.
    pub running: Sides<RunningScale>,
    /// Number of samples; the median is reported.
    pub samples: usize,
}

impl FramesPlan {
    fn check(&self) -> Result<()> {
        size::check_samples("samples", self.samples)?;
        let fields = [("batch", self.batch), ("heads", self.n_heads), ("head_dim", self.head_dim)];
        match fields.into_iter().find(|(_, value)| *value == 0) {
            Some((field, value)) => Err(Error::plan(field, value, "must be at least 1")),
            None => Ok(()),
        }
    }

    /// Returns the bytes that [`time_frames`] takes with rings of all of `formats`.
    ///
    /// # Errors
    /// Returns the errors that [`time_frames`] finds before it allocates.
    pub fn bytes(&self, formats: &[KvCacheConfig]) -> Result<u64> {
        self.check()?;
        let shape = CacheShape::new(self.batch, self.n_heads, self.head_dim);
        let Self { batch, n_heads, tokens_per_frame, head_dim, .. } = *self;
        // Queries, keys and values of a frame, and a copy of each.
        let frame = size::tensor_bytes([batch, n_heads, tokens_per_frame, head_dim])?;
        formats.iter().try_fold(6 * frame, |sum, &format| {
            let ring = self.ring(format);
            Ok(sum.saturating_add(ring.memory_bytes(shape)?.total() as u64))
        })
    }

    fn ring(&self, format: KvCacheConfig) -> FrameConfig {
        let ring = FrameConfig::new(format, self.tokens_per_frame, self.window);
        ring.with_running(self.running)
    }

    fn random<T: Target>(&self, device: &On<T>) -> Tensor<4> {
        let shape = [self.batch, self.n_heads, self.tokens_per_frame, self.head_dim];
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &**device)
    }
}

/// The times of a frame with one cache.
#[derive(Clone, Debug, Serialize)]
pub struct FramesPoint {
    /// The cache's short name.
    pub cache: String,
    /// Seconds to peek at a frame, one layer.
    pub peek: Timing,
    /// Seconds to attend and to store the frame.
    pub update: Timing,
    /// Bytes of the ring that a frame reads.
    pub bytes_read: usize,
    /// Bytes of the ring.
    pub bytes: usize,
}

/// Times a frame over full rings of each of `formats`, in turn.
///
/// # Errors
/// [`Error::Plan`] naming the field, the errors of the caches, and [`Error::Device`].
pub fn time_frames<T: Target>(
    device: &On<T>,
    plan: &FramesPlan,
    formats: &[KvCacheConfig],
) -> Result<Vec<FramesPoint>> {
    plan.bytes(formats)?;
    let shape = CacheShape::new(plan.batch, plan.n_heads, plan.head_dim);
    let mut rings = Vec::with_capacity(formats.len());
    for &format in formats {
        let mut ring = FrameCache::new(&plan.ring(format), shape, device)?;
        for _ in 0..plan.window.0 {
            ring.append(plan.random(device), plan.random(device))?;
        }
        rings.push(ring);
    }
    let sizes: Vec<_> =
        rings.iter().map(|ring| (ring.bytes_read(), ring.memory_bytes().total())).collect();
    let qkv = [(); 3].map(|()| plan.random(device));
    let timed = |rings: &mut [FrameCache], stores: bool| {
        let what = if stores { "update" } else { "peek" };
        let subjects = rings.iter_mut().zip(formats).map(|(ring, format)| -> Subject<'_> {
            let qkv = qkv.clone();
            Box::new(move || {
                let _phase = trace_span!(target: PHASE, "frame", what, cache = %format).entered();
                let [query, key, value] = qkv.clone();
                match stores {
                    true => ring.update(query, key, value)?,
                    false => ring.peek(query, key, value)?,
                };
                wait(device)
            })
        });
        time_in_turn(plan.samples, subjects.collect())
    };
    let (peeks, updates) = (timed(&mut rings, false)?, timed(&mut rings, true)?);
    let points = formats.iter().zip(peeks).zip(updates).zip(sizes);
    Ok(points
        .map(|(((format, peek), update), (bytes_read, bytes))| FramesPoint {
            cache: format.to_string(),
            peek,
            update,
            bytes_read,
            bytes,
        })
        .collect())
}
