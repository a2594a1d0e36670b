use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    tensor::{Device, Int, Tensor, TensorData},
};

use super::{DataError, Order, Windows};

/// A batch of windows on one device.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Token ids, `[batch, seq]`.
    pub inputs: Tensor<2, Int>,
    /// The id that follows each input id, `[batch, seq]`.
    pub targets: Tensor<2, Int>,
    /// Position of the first window in the order of the whole run, counted from 0. The other
    /// windows have the next positions.
    pub position: u64,
    /// Number of epochs of the loader before this one.
    pub epoch: u64,
}

/// Training batches; each call of [`iter`](DataLoader::iter) yields one epoch.
///
/// An epoch is a number of batches, not a pass over the data: epoch `e` holds the samples at
/// positions `e * n .. (e + 1) * n` of an [`Order`], with `n = batch * batches_per_epoch`. An epoch
/// may start or end in the middle of a pass. The k-th call of `iter` yields epoch `first_epoch +
/// k`, so a loader with `first_epoch = e` continues exactly where another stopped after `e` epochs.
///
/// A [`slice`](DataLoader::slice) is a worker's share: the items `start..end` of every epoch, in
/// batches of the same size; the last one may be smaller. A slice and a loader moved by
/// [`to_device`](DataLoader::to_device) count their own epochs, starting from the next epoch of the
/// original loader.
#[derive(Debug)]
pub struct TrainLoader {
    windows: Arc<Windows>,
    order: Order,
    batch: usize,
    /// Number of items in an epoch, over all workers.
    epoch_items: usize,
    /// This loader's items of each epoch.
    share: Range<usize>,
    next_epoch: AtomicUsize,
    device: Device,
}

impl TrainLoader {
    /// Creates a loader of `batch` windows per batch in `order`, on `device`; `first_epoch` counts
    /// from 0.
    ///
    /// # Errors
    /// [`DataError::Argument`] if a size is 0, an epoch is too large to count, or `order` has
    /// another number of windows.
    pub fn new(
        windows: Arc<Windows>,
        order: Order,
        batch: usize,
        batches_per_epoch: usize,
        first_epoch: usize,
        device: Device,
    ) -> Result<Self, DataError> {
        at_least_one("batch", batch)?;
        at_least_one("batches_per_epoch", batches_per_epoch)?;
        if order.n_windows() != windows.len() {
            let rule = format!("the order must have {}, the number of windows", windows.len());
            return Err(DataError::argument("n_windows", order.n_windows(), rule));
        }
        let Some(epoch_items) = batch.checked_mul(batches_per_epoch) else {
            let rule = format!("times batch = {batch} must fit in memory");
            return Err(DataError::argument("batches_per_epoch", batches_per_epoch, rule));
        };
        let (share, next_epoch) = (0..epoch_items, AtomicUsize::new(first_epoch));
        Ok(Self { windows, order, batch, epoch_items, share, next_epoch, device })
    }

    fn part(&self, share: Range<usize>, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self {
            windows: self.windows.clone(),
            // A clone would share the permutation in memory, and workers in different passes over
            // the data would keep replacing it.
            order: self.order.detached(),
            batch: self.batch,
            epoch_items: self.epoch_items,
            share,
            next_epoch: AtomicUsize::new(self.next_epoch.load(Ordering::Relaxed)),
            device: device.clone(),
        })
    }
}

impl DataLoader<Batch> for TrainLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        Box::new(Batches {
            windows: &self.windows,
            share: self.share.clone(),
            next: self.share.start,
            batch: self.batch,
            epoch: self.next_epoch.fetch_add(1, Ordering::Relaxed) as u64,
            epoch_items: self.epoch_items as u64,
            device: &self.device,
            window: |position| self.order.window_at(position),
        })
    }

    fn num_items(&self) -> usize {
        self.share.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        self.part(self.share.clone(), device)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        self.part(sub_range(&self.share, start, end), &self.device)
    }
}

/// Validation batches: each call of [`iter`](DataLoader::iter) yields the same ones, in text order.
#[derive(Clone, Debug)]
pub struct ValidLoader {
    windows: Arc<Windows>,
    batch: usize,
    share: Range<usize>,
    device: Device,
}

impl ValidLoader {
    /// Creates a loader of at most the first `max_windows` of `windows`, in batches of `batch`. The
    /// last batch may be smaller.
    ///
    /// # Errors
    /// [`DataError::Argument`] if a size is 0.
    pub fn new(
        windows: Arc<Windows>,
        batch: usize,
        max_windows: usize,
        device: Device,
    ) -> Result<Self, DataError> {
        at_least_one("batch", batch)?;
        at_least_one("max_windows", max_windows)?;
        let share = 0..windows.len().min(max_windows);
        Ok(Self { windows, batch, share, device })
    }
}

impl DataLoader<Batch> for ValidLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        Box::new(Batches {
            windows: &self.windows,
            share: self.share.clone(),
            next: self.share.start,
            batch: self.batch,
            epoch: 0,
            epoch_items: 0,
            device: &self.device,
            window: |position| position as usize,
        })
    }

    fn num_items(&self) -> usize {
        self.share.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self { device: device.clone(), ..self.clone() })
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self { share: sub_range(&self.share, start, end), ..self.clone() })
    }
}

fn at_least_one(field: &'static str, value: usize) -> Result<(), DataError> {
    if value == 0 {
        return Err(DataError::argument(field, value, "must be at least 1"));
    }
    Ok(())
}

/// Returns items `start..end` of a share, clamped to its length.
fn sub_range(share: &Range<usize>, start: usize, end: usize) -> Range<usize> {
    let end = end.min(share.len());
    let start = start.min(end);
    share.start + start..share.start + end
}

/// Iterates over a share in batches. `window` maps a position in the run to a window.
struct Batches<'a, F> {
    windows: &'a Windows,
    share: Range<usize>,
    /// The next item.
    next: usize,
    batch: usize,
    epoch: u64,
    epoch_items: u64,
    device: &'a Device,
    window: F,
}

impl<F: Fn(u64) -> usize> Batches<'_, F> {
    fn batch(&self, items: Range<usize>) -> Result<Batch, DataError> {
        let beyond =
            || DataError::argument("epoch", self.epoch, "its positions must be below 2^64");
        let before = self.epoch.checked_mul(self.epoch_items).ok_or_else(beyond)?;
        before.checked_add(items.end as u64).ok_or_else(beyond)?;
        let position = before + items.start as u64;

        let shape = [items.len(), self.windows.seq_len()];
        let mut inputs = Vec::with_capacity(shape[0] * shape[1]);
        let mut targets = Vec::with_capacity(shape[0] * shape[1]);
        for item in items {
            let index = (self.window)(before + item as u64);
            let Some(ids) = self.windows.get(index) else {
                let rule = format!("must be below {}", self.windows.len());
                return Err(DataError::argument("window", index, rule));
            };
            for (i, id) in ids.enumerate() {
                // `TokenFile` holds only ids below 2^31.
                let id = id as i32;
                if i < shape[1] {
                    inputs.push(id);
                }
                if i > 0 {
                    targets.push(id);
                }
            }
        }
        let tensor = |ids| Tensor::from_data(TensorData::new(ids, shape), self.device);
        Ok(Batch { inputs: tensor(inputs), targets: tensor(targets), position, epoch: self.epoch })
    }
}

impl<F: Fn(u64) -> usize> Iterator for Batches<'_, F> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.share.end {
            return None;
        }
        let end = self.share.end.min(self.next.saturating_add(self.batch));
        let batch = self.batch(self.next..end);
        // The iterator ends after an error.
        self.next = if batch.is_ok() { end } else { self.share.end };
        Some(batch.map_err(DatasetError::new))
    }
}

impl<F: Fn(u64) -> usize> DataLoaderIterator<Batch> for Batches<'_, F> {
    fn progress(&self) -> Progress {
        Progress::new(self.next - self.share.start, self.share.len(), Some("items".to_string()))
    }
}
