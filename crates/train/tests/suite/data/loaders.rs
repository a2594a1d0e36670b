//! Batches of training and validation.

use std::sync::Arc;

use burn::{
    data::dataloader::{DataLoader, split::split_dataloader},
    tensor::{Device, Int, Tensor},
};
use kv_cubecl::{Flex, Target};
use kv_train::data::{Batch, Order, TrainLoader, ValidLoader, Windows};

use super::{World, message};

fn device() -> Device {
    Flex::open().unwrap().clone()
}

/// Returns position and epoch of the first batch of an epoch.
fn place(loader: &dyn DataLoader<Batch>) -> (u64, u64) {
    let batch = loader.iter().next().unwrap().unwrap();
    (batch.position, batch.epoch)
}

fn rows(tensor: Tensor<2, Int>) -> Vec<Vec<i64>> {
    let [_, seq] = tensor.dims();
    let ids: Vec<i64> = tensor.into_data().convert::<i64>().try_into_vec().unwrap();
    ids.chunks(seq).map(<[i64]>::to_vec).collect()
}

/// Returns the windows of an epoch and the sizes of its batches. Checks that targets are the inputs
/// shifted by one.
fn epoch(loader: &dyn DataLoader<Batch>) -> (Vec<Vec<i64>>, Vec<usize>) {
    let mut iterator = loader.iter();
    let (mut windows, mut sizes, mut places) = (vec![], vec![], vec![]);
    assert_eq!(iterator.progress().items_total, loader.num_items());
    assert_eq!(iterator.progress().items_processed, 0);
    while let Some(batch) = iterator.next() {
        let batch = batch.unwrap();
        assert_eq!(batch.inputs.dims(), batch.targets.dims());
        places.push((batch.position, batch.epoch));
        sizes.push(batch.inputs.dims()[0]);
        for (mut input, target) in rows(batch.inputs).into_iter().zip(rows(batch.targets)) {
            assert_eq!(input[1..], target[..target.len() - 1]);
            input.push(target[target.len() - 1]);
            windows.push(input);
        }
        assert_eq!(iterator.progress().items_processed, windows.len());
    }
    for (i, pair) in places.windows(2).enumerate() {
        let expected = (pair[0].0 + sizes[i] as u64, pair[0].1);
        assert_eq!(pair[1], expected, "position and epoch");
    }
    assert!(iterator.progress().is_completed());
    assert!(iterator.next().is_none());
    (windows, sizes)
}

/// 23 windows of 7 ids, all different.
fn windows(world: &World) -> Arc<Windows> {
    Arc::new(Windows::new(world.tokens(23 * 6 + 1), 6).unwrap())
}

fn expected(windows: &Windows, order: &Order, positions: std::ops::Range<u64>) -> Vec<Vec<i64>> {
    let window = |position| {
        let window = windows.get(order.window_at(position)).unwrap();
        window.map(i64::from).collect()
    };
    positions.map(window).collect()
}

#[test]
fn epochs_follow_the_order_and_resume_anywhere() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    let new =
        |first| TrainLoader::new(windows.clone(), order.clone(), 4, 3, first, device()).unwrap();
    let loader = new(0);
    assert_eq!(loader.num_items(), 12);
    let epochs: Vec<_> = (0..8).map(|_| epoch(&loader)).collect();
    for (e, (windows_of, sizes)) in epochs.iter().enumerate() {
        let e = e as u64;
        assert_eq!(windows_of, &expected(&windows, &order, e * 12..(e + 1) * 12));
        assert_eq!(sizes, &[4; 3]);
    }
    for first in 0..8 {
        let resumed = new(first);
        for e in &epochs[first..] {
            assert_eq!(&epoch(&resumed), e);
        }
    }
    // A moved loader continues with the next epoch, and so does the original one.
    let loader = new(2);
    epoch(&loader);
    let moved = loader.to_device(&device());
    for e in &epochs[3..5] {
        assert_eq!(&epoch(&*moved), e);
    }
    assert_eq!(epoch(&loader), epochs[3]);
}

#[test]
fn workers_share_each_epoch() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    for (batch, batches, n_workers) in [(4, 3, 2), (4, 3, 3), (4, 3, 5), (2, 1, 3), (5, 2, 1)] {
        let items = (batch * batches) as u64;
        let new = |first| -> Arc<dyn DataLoader<Batch>> {
            let (windows, order) = (windows.clone(), order.clone());
            Arc::new(TrainLoader::new(windows, order, batch, batches, first, device()).unwrap())
        };
        let devices = vec![device(); n_workers];
        let workers = split_dataloader(new(0), &devices);
        let mut epochs = vec![];
        for e in 0..6_u64 {
            let shares: Vec<_> = workers.iter().map(|worker| epoch(&**worker)).collect();
            for (worker, (share, sizes)) in workers.iter().zip(&shares) {
                assert_eq!(share.len(), worker.num_items());
                assert!(sizes.iter().rev().skip(1).all(|&size| size == batch), "{sizes:?}");
            }
            let together: Vec<_> = shares.iter().flat_map(|(share, _)| share.clone()).collect();
            assert_eq!(together, expected(&windows, &order, e * items..(e + 1) * items));
            epochs.push(shares);
        }
        for first in 0..6 {
            let resumed = split_dataloader(new(first), &devices);
            for shares in &epochs[first..] {
                let again: Vec<_> = resumed.iter().map(|worker| epoch(&**worker)).collect();
                assert_eq!(&again, shares);
            }
        }
    }
    // Slices of slices, and slices beyond the end.
    let loader = TrainLoader::new(windows.clone(), order.clone(), 4, 3, 1, device()).unwrap();
    let slice = loader.slice(3, 11).slice(2, 5);
    assert_eq!(epoch(&*slice).0, expected(&windows, &order, 12 + 5..12 + 8));
    assert_eq!(loader.slice(10, 99).num_items(), 2);
    assert_eq!(loader.slice(99, 3).num_items(), 0);
    assert!(epoch(&*loader.slice(99, 3)).0.is_empty());
}

#[test]
fn batches_know_their_place() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    let loader = TrainLoader::new(windows.clone(), order, 4, 6, 2, device()).unwrap();
    // 24 items: 8 for each of three workers, in 2 batches.
    let workers = split_dataloader(loader.slice(0, 24), &[device(), device(), device()]);
    for epoch in 2..5 {
        assert_eq!(place(&loader), (24 * epoch, epoch));
        for (i, worker) in workers.iter().enumerate() {
            assert_eq!(place(&**worker), (24 * epoch + 8 * i as u64, epoch));
        }
    }
    let valid = ValidLoader::new(windows, 4, 10, device()).unwrap();
    assert_eq!(place(&valid), (0, 0));
    assert_eq!(place(&valid), (0, 0));
    assert_eq!(place(&*valid.slice(3, 9)), (3, 0));
}

#[test]
fn validation_is_the_same_every_time() {
    let world = World::new();
    let windows = windows(&world);
    let loader = ValidLoader::new(windows.clone(), 4, 10, device()).unwrap();
    let first: Vec<Vec<i64>> =
        (0..10).map(|i| windows.get(i).unwrap().map(i64::from).collect()).collect();
    for _ in 0..2 {
        assert_eq!(epoch(&loader), (first.clone(), vec![4, 4, 2]));
    }
    assert_eq!(epoch(&*loader.to_device(&device())).0, first);
    assert_eq!(epoch(&*loader.slice(2, 9)).0, first[2..9]);
    let all = ValidLoader::new(windows.clone(), 64, usize::MAX, device()).unwrap();
    assert_eq!((all.num_items(), epoch(&all).1), (23, vec![23]));
}

#[test]
fn loaders_refuse_invalid_sizes() {
    let world = World::new();
    let windows = windows(&world);
    let order = Order::new(5, windows.len()).unwrap();
    let train = |order: &Order, batch, batches| {
        message(TrainLoader::new(windows.clone(), order.clone(), batch, batches, 0, device()))
    };
    assert_eq!(train(&order, 0, 1), "batch = 0: must be at least 1");
    assert_eq!(train(&order, 1, 0), "batches_per_epoch = 0: must be at least 1");
    assert!(train(&order, 1 << 40, 1 << 40).starts_with("batches_per_epoch = "));
    let other = Order::new(5, 22).unwrap();
    assert_eq!(
        train(&other, 1, 1),
        "n_windows = 22: the order must have 23, the number of windows"
    );
    assert!(message(ValidLoader::new(windows.clone(), 0, 1, device())).starts_with("batch = 0"));
    assert!(message(ValidLoader::new(windows.clone(), 1, 0, device())).starts_with("max_windows"));
    // Positions beyond 64 bits give an error instead of a batch, then the end.
    let last = TrainLoader::new(windows, order, 4, 3, usize::MAX, device()).unwrap();
    let mut iterator = last.iter();
    let error = iterator.next().unwrap().unwrap_err();
    assert!(error.to_string().contains("below 2^64"), "{error}");
    assert!(iterator.next().is_none());
}
