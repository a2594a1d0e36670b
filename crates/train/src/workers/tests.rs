//! A step on several devices, with stubs as data loaders.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use core::ops::Range;
use std::sync::{Arc, Mutex, atomic::AtomicUsize};

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    tensor::{Int, TensorData},
};
use kv_models::kv_cubecl::{Autodiff, Flex, On, Target};

use super::*;
use crate::{
    TrainConfig,
    data::Batch,
    history::Recorder,
    setup::{Setup, set_up},
    step::Task,
};

const SEQ: usize = 8;
const ITEMS: usize = 6;
const DEADLINE: Duration = Duration::from_secs(60);

/// The failure of one item.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Never,
    Error(usize),
    Panic(usize),
    #[cfg(feature = "remote")]
    Slow(usize),
}

/// Batches of one sequence; one batch may fail.
struct Batches {
    items: Range<usize>,
    device: Device,
    failure: Failure,
}

impl Iterator for Batches {
    type Item = core::result::Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.items.next()?;
        match self.failure {
            Failure::Error(at) if at == item => {
                let error = std::io::Error::other(format!("item {item} fails"));
                return Some(Err(DatasetError::new(error)));
            }
            Failure::Panic(at) if at == item => panic!("item {item} panics"),
            #[cfg(feature = "remote")]
            Failure::Slow(at) if at == item => thread::sleep(Duration::from_secs(60)),
            _ => (),
        }
        let ids = |more: usize| {
            let ids = (0..SEQ).map(|i| ((item * 31 + (i + more) * 7) % 200) as i32).collect();
            Tensor::<2, Int>::from_data(TensorData::new::<i32, _>(ids, [1, SEQ]), &self.device)
        };
        Some(Ok(Batch { inputs: ids(0), targets: ids(1), position: item as u64, epoch: 0 }))
    }
}

impl DataLoaderIterator<Batch> for Batches {
    fn progress(&self) -> Progress {
        Progress::new(0, ITEMS, None)
    }
}

impl DataLoader<Batch> for Batches {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let Self { items, device, failure } = self;
        Box::new(Self { items: items.clone(), device: device.clone(), failure: *failure })
    }

    fn num_items(&self) -> usize {
        self.items.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        let Self { items, failure, .. } = self;
        Arc::new(Self { items: items.clone(), device: device.clone(), failure: *failure })
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let Self { device, failure, .. } = self;
        Arc::new(Self { items: start..end, device: device.clone(), failure: *failure })
    }
}

fn trainee() -> (Device, Trainee) {
    trainee_on(&On::<Autodiff<Flex>>::open().unwrap())
}

fn trainee_on<T: Target>(device: &On<T>) -> (Device, Trainee) {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/models");
    let model = kv_models::load(format!("{golden}/llama-tiny"), device).unwrap().model;
    let accumulation = ITEMS;
    let config = TrainConfig { seq_len: SEQ, batch: 1, accumulation, ..TrainConfig::default() };
    let Setup { prepared, teacher, autodiff } = set_up(device, model, &config).unwrap();
    let task = Arc::new(Task { config, recorder: Mutex::new(Recorder::default()) });
    (autodiff, Trainee { prepared, teacher, task })
}

/// The result of a step on `n_devices`, and the positions of the recorded batches.
fn step(
    n_devices: usize,
    failure: Failure,
    stop: &(dyn Fn() -> bool + Sync),
) -> (Result<Option<Vec<f32>>>, Vec<u64>) {
    let (device, trainee) = trainee();
    let devices = vec![device.clone(); n_devices];
    let loader: TrainLoader<Trainee> = Arc::new(Batches { items: 0..ITEMS, device, failure });
    let mut workers = Workers::new(&devices, Strategy::Auto, &loader, DEADLINE).unwrap();
    let mut positions = vec![];
    let mut record = |loss: &BatchLoss| positions.push(loss.record.position);
    let gradients = workers.step(&trainee, stop, &mut record);
    let id = trainee.prepared.model.decoder().head_weight().param().unwrap().id;
    let gradients = gradients.map(|gradients| {
        let of_head = |mut gradients: GradientsParams| gradients.remove::<2>(id).unwrap();
        gradients.map(|it| of_head(it).into_data().try_into_vec().unwrap())
    });
    (gradients, positions)
}

#[test]
fn gradients_do_not_depend_on_the_number_of_devices() {
    let (one, positions) = step(1, Failure::Never, &|| false);
    let one = one.unwrap().unwrap();
    let largest = one.iter().fold(0f32, |most, it| most.max(it.abs()));
    assert!(largest > 1e-3, "{largest}");
    assert_eq!(positions, [0, 1, 2, 3, 4, 5]);
    for n in 2..9 {
        let (several, positions) = step(n, Failure::Never, &|| false);
        assert_eq!(positions, [0, 1, 2, 3, 4, 5], "{n} devices");
        let several = several.unwrap().unwrap();
        let difference = one.iter().zip(&several).map(|(a, b)| (a - b).abs());
        // Sums of six terms in another order.
        let difference = difference.fold(0f32, f32::max);
        assert!(difference < 1e-6 * largest, "{n} devices: {difference} of {largest}");
    }
}

#[test]
fn one_device_that_fails_ends_the_step() {
    for n in [1, 2, 3, 6] {
        for item in [0, 3, 5] {
            let (failed, _) = step(n, Failure::Error(item), &|| false);
            let error = failed.unwrap_err().to_string();
            assert!(error.contains(&format!("item {item} fails")), "{error}");
            if n > 1 {
                let (failed, _) = step(n, Failure::Panic(item), &|| false);
                let error = failed.unwrap_err().to_string();
                assert!(error.contains(&format!("failed: item {item} panics")), "{error}");
            }
        }
    }
}

#[test]
fn a_step_that_is_stopped_has_no_gradients() {
    for n in [1, 2, 4] {
        let calls = AtomicUsize::new(0);
        let stop = || calls.fetch_add(1, Ordering::Relaxed) >= 3;
        let (stopped, positions) = step(n, Failure::Never, &stop);
        assert!(stopped.unwrap().is_none());
        assert_eq!(positions.len(), 3);
    }
}

/// Devices of the CPU are one device, so nothing has to move.
#[test]
fn devices_of_the_cpu_move_nothing() {
    let (device, trainee) = trainee();
    let devices = vec![device.clone(); 2];
    let loader: TrainLoader<Trainee> =
        Arc::new(Batches { items: 0..ITEMS, device, failure: Failure::Never });
    let mut workers = Workers::new(&devices, Strategy::Auto, &loader, DEADLINE).unwrap();
    workers.step(&trainee, &|| false, &mut |_| ()).unwrap().unwrap();
    assert_eq!(workers.moved(), [Moved::default(); 2]);
}

#[cfg(feature = "remote")]
mod on_workers;
