//! The order of windows in training.

use std::collections::BTreeSet;

use kv_train::data::Order;

use super::{message, random};

#[test]
fn each_pass_is_a_permutation_of_its_own() {
    for n in [1, 2, 3, 7, 64, 1000, 4099] {
        let order = Order::new(7, n).unwrap();
        let mut passes = BTreeSet::new();
        for pass in 0..20_u64 {
            let of = |i| order.window_at(pass * n as u64 + i);
            let windows: Vec<usize> = (0..n as u64).map(of).collect();
            let mut sorted = windows.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..n), "pass {pass} of {n}");
            passes.insert(windows);
        }
        assert!(n < 64 || passes.len() == 20, "{n}: passes repeat");
    }
}

#[test]
fn an_order_depends_on_the_seed_and_the_position_only() {
    let n = 100;
    let whole: Vec<usize> =
        (0..1000).map(|position| Order::new(3, n).unwrap().window_at(position)).collect();
    let order = Order::new(3, n).unwrap();
    assert!(whole.iter().copied().eq((0..1000).map(|position| order.window_at(position))));
    let mut state = 5;
    for _ in 0..2000 {
        let position = random(&mut state) % 1000;
        assert_eq!(order.clone().window_at(position), whole[position as usize]);
    }
    let of = |seed| {
        let order = Order::new(seed, n).unwrap();
        (0..n as u64).map(|i| order.window_at(i)).collect::<Vec<_>>()
    };
    let orders: BTreeSet<Vec<usize>> = (0..200).map(of).collect();
    assert_eq!(orders.len(), 200);
    // Another seed does not give the same passes in another order.
    assert!(!orders.contains(&whole[100..200]));
    order.window_at(u64::MAX);
    message(Order::new(1, 0));
    message(Order::new(1, (1 << 32) + 1));
    // A run that resumes from a checkpoint relies on this order, so it must never change.
    assert_eq!(whole[..8], PINNED);
}

const PINNED: [usize; 8] = [83, 88, 11, 30, 97, 35, 50, 28];

#[test]
fn an_order_is_uniform() {
    // All 24 orders of 4 windows must be about equally frequent.
    let order = Order::new(11, 4).unwrap();
    let mut counts = std::collections::BTreeMap::<Vec<usize>, f64>::new();
    for pass in 0..24_000 {
        *counts.entry((0..4).map(|i| order.window_at(pass * 4 + i)).collect()).or_default() += 1.0;
    }
    let chi2: f64 = counts.values().map(|n| (n - 1000.0).powi(2) / 1000.0).sum();
    assert!(counts.len() == 24 && chi2 < 60.0, "chi2 of 23 degrees of freedom: {chi2}");
}
